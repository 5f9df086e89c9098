"""An engine process: `python -m kvflow.nodes.engine_entry <arguments of vLLM's API server>`.

Not vLLM's own console command, which does not start where vLLM comes from a distribution of another name, and because
some things must be settled before vLLM is imported: that this process ends when kvflow does, that this is a vLLM the
connector was written for, and that the import will not break.
"""

import importlib
import importlib.util
import sys

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

    entry.main()
    return 0


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
