"""An engine process: `python -m kvflow.nodes.engine_entry <arguments of vLLM's API server>`.

Not vLLM's own console command, which does not start where vLLM comes from a distribution of another name, and because
some things must be settled before vLLM is imported: that this process ends when kvflow does, that this is a vLLM the
connector was written for, and that the import will not break.
"""

import functools
import importlib
import importlib.util
import socket
import sys
from typing import Any

from kvflow.errors import KvflowError, StartError


def main() -> int:
    from kvflow.launchers import lifeline

    lifeline.watch()
    try:
        check_torchvision()
        from kvflow.connector import versions

        versions.check()
    except KvflowError as e:
        print(e, file=sys.stderr)
        return 1
    from vllm.entrypoints.launchers.api_server import entry

    send_at_once()
    entry.main()
    return 0


def send_at_once() -> None:
    """Have the API server send what it writes at once; connections inherit the setting from the socket that listens.

    vLLM makes that socket without naming its protocol, and then asyncio leaves the delay on: the body behind the
    headers, or the next event of a stream, would wait up to 40 ms for the client to acknowledge what came before.
    """
    from vllm.entrypoints.launchers import launcher

    create = launcher.create_server_socket

    @functools.wraps(create)
    def create_without_delay(*args: Any, **kwargs: Any) -> socket.socket:
        listener: socket.socket = create(*args, **kwargs)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener

    launcher.create_server_socket = create_without_delay


def check_torchvision() -> None:
    """Raises `StartError` where torchvision was built for another torch than the one installed.

    transformers then fails with `operator torchvision::nms does not exist`, from which nobody guesses the cause.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as e:
        raise StartError(
            f"The installed torchvision does not work with the installed torch ({e}); "
            "remove it (pip uninstall torchvision), text models do not need it."
        ) from None


if __name__ == "__main__":
    sys.exit(main())
