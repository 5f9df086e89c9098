import socket

import pytest

from kvflow.errors import StartError
from kvflow.launchers.ports import check_free


def check(host: str, port: int) -> None:
    check_free(host, port, who="prefill-0", key="cluster.prefill.port")


@pytest.mark.parametrize("share", [0, 1], ids=["alone", "with SO_REUSEPORT"])
def test_a_taken_port(share: int) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=rf"^prefill-0 .*port {port} on 127.0.0.1 .*set cluster.prefill.port\.$"):
            check("127.0.0.1", port)
    check("127.0.0.1", port)


def test_a_port_whose_last_connection_is_just_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    check(*address)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(StartError, match=r"^prefill-0 .* port 8100 of 192\.0\.2\.1 \(cluster\.prefill\.port\): "):
        check("192.0.2.1", 8100)
