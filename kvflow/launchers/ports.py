"""Whether a port is free, before a process that needs it spends minutes on finding out."""

import errno
import socket

from kvflow.errors import StartError


def check_free(host: str, port: int, *, who: str, key: str) -> None:
    """Raise `StartError`, naming `key`, if `who` could not listen on `port`.

    A port counts as taken also where its holder would share it (SO_REUSEPORT): the two would get each other's requests.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as e:
        raise StartError(refusal(e, host, port, who=who, key=key)) from None


def refusal(error: OSError, host: str, port: int, *, who: str, key: str) -> str:
    """Why `who` cannot listen on a port that `key` sets, in one sentence."""
    if error.errno == errno.EADDRINUSE:
        return f"{who} cannot start: port {port} on {host} is taken by another process; stop that, or set {key}."
    return f"{who} cannot start: it cannot listen on port {port} of {host} ({key}): {error.strerror}."
