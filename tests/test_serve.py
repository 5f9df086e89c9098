"""`kvflow serve` as a process, with simulated nodes: what it says, how it ends, and what it leaves behind."""

import asyncio
import errno
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvflow import embedded
from kvflow.errors import ModelError
from kvflow.serve import Place, bound
from tests.net import free_ports, get, post, until

WAIT_S = 60


GRACE = """
import sys
from kvflow import config, graph, serve

serve.run(graph.build(config.load(config.compose("serve", sys.argv[2:]))), grace_s=float(sys.argv[1]))
"""
"""`kvflow serve` with another time for the turns under way."""

EARLY = """
import dataclasses, os, signal, sys
from kvflow import config, graph, serve

class Graph(graph.Graph):
    @property
    def start_timeout_s(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return 600.0

built = graph.build(config.load(config.compose("serve", sys.argv[1:])))
serve.run(Graph(**{f.name: getattr(built, f.name) for f in dataclasses.fields(built)}))
"""
"""`kvflow serve` that gets a signal at the moment when it is about to start its nodes."""

SLOW = "cluster.simulated.decode_tokens_per_s=5"
LONG = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "ignore_eos": True}


@contextmanager
def running(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *command], stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(
    log: Path, *overrides: str, port: int | None = None, command: Sequence[str] = ("-m", "kvflow", "serve")
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    router, prefill, decode = free_ports(3)
    router = port or router
    words = ["cluster=simulated", f"router.port={router}", f"cluster.prefill.port={prefill}"]
    words += [f"cluster.decode.port={decode}", *overrides]
    with running(log, *command, *words) as process:
        yield process, f"http://127.0.0.1:{router}"


@contextmanager
def streaming(url: str) -> Iterator[HTTPResponse]:
    """A turn whose answer has begun."""
    body = json.dumps({**LONG, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert answer.readline().startswith(b"data: ")
        yield answer


def unanswered(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def ended_well(log: Path) -> bool:
    said = log.read_text()
    return said.endswith("stopped\n") and "Traceback" not in said and "Cancel" not in said


def ready(url: str) -> bool:
    try:
        return get(f"{url}/ready")[0] == 200
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    with serving(log) as (process, url):
        until(lambda: ready(url), WAIT_S, log.read_text)
        status, raw, headers = post(f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
        assert (status, headers["x-kvflow-path"]) == (200, "cold")
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
    assert f"{number.name}: stopping" in log.read_text()
    assert ended_well(log)
    assert json.loads(raw)["choices"]


def test_turns_under_way_go_on_until_a_second_signal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, SLOW) as (process, url):
        until(lambda: ready(url), WAIT_S, log.read_text)
        with streaming(url) as answer:
            process.send_signal(signal.SIGTERM)
            until(lambda: "SIGTERM: stopping" in log.read_text(), WAIT_S)
            for _ in range(4):
                assert b"error" not in answer.readline()
            process.send_signal(signal.SIGTERM)
            assert answer.read().endswith(b"data: [DONE]\n\n")
            assert process.wait(WAIT_S) == 0
    assert "stopping at once" in log.read_text()
    assert ended_well(log)


def test_turns_that_take_too_long_are_broken_off_and_their_clients_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, SLOW, command=("-c", GRACE, "0.5")) as (process, url), ThreadPoolExecutor() as pool:
        until(lambda: ready(url), WAIT_S, log.read_text)
        whole = pool.submit(post, f"{url}/v1/chat/completions", LONG)
        with streaming(url) as answer:
            process.send_signal(signal.SIGTERM)
            *_, error, done = answer.read().strip().split(b"\n\n")
        status, raw, headers = whole.result()
        assert process.wait(WAIT_S) == 0
    expected = {"message": "kvflow is stopping", "type": "ServiceUnavailableError", "param": None, "code": 503}
    assert json.loads(error.removeprefix(b"data: "))["error"] == expected
    assert done == b"data: [DONE]"
    assert (status, headers["content-type"], headers["retry-after"]) == (503, "application/json", "1")
    assert json.loads(raw)["error"] == expected
    assert ended_well(log)


def test_a_client_that_does_not_read_delays_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    much = ("cluster.simulated.decode_tokens_per_s=0", f"model.name={'m' * 4000}")  # every event names the model
    with (
        serving(log, *much, command=("-c", GRACE, "2")) as (process, url),
        socket.socket() as client,
    ):
        until(lambda: ready(url), WAIT_S, log.read_text)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", urlsplit(url).port))
        body = json.dumps({**LONG, "stream": True})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: kvflow\r\ncontent-length: {len(body)}\r\n"
        client.sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())
        assert client.recv(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert ended_well(log)


def test_a_signal_before_the_nodes_have_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, command=("-c", EARLY)) as (process, _):
        assert process.wait(WAIT_S) == 0
    assert "SIGTERM: stopping" in log.read_text()
    assert ended_well(log)


def test_a_signal_while_nodes_are_awaited(tmp_path: Path) -> None:
    log, (router, nobody) = tmp_path / "log", free_ports(2)
    urls = [f"cluster.{role}.urls=[http://127.0.0.1:{nobody}]" for role in ("prefill", "decode")]
    with running(log, "-m", "kvflow", "serve", "cluster=external", f"router.port={router}", *urls) as process:
        until(lambda: not unanswered(router), WAIT_S, log.read_text)
        assert not ready(f"http://127.0.0.1:{router}")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    assert ended_well(log)


def test_nobody_is_kept_waiting_while_the_model_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is prepared by this test, as by another kvflow, until the process has shown what it does meanwhile."""
    monkeypatch.setenv("KVFLOW_CACHE", str(tmp_path / "cache"))
    logs, (port,) = (tmp_path / "first", tmp_path / "second"), free_ports(1)
    command = ("-m", "kvflow", "serve", f"router.port={port}")

    def meanwhile(_into: Path, _progress: embedded.Progress) -> Path:
        with running(logs[0], *command) as first:
            until(lambda: "Waiting for another kvflow" in logs[0].read_text(), WAIT_S, logs[0].read_text)
            assert unanswered(port)
            with running(logs[1], *command) as second:
                assert second.wait(WAIT_S) == 1
            assert first.poll() is None
            first.send_signal(signal.SIGINT)
            assert first.wait(WAIT_S) == 130
        raise ModelError("that was all")

    with pytest.raises(ModelError, match="that was all"):
        embedded.prepare(recipe=replace(embedded.SMOLLM2, fetch=meanwhile))
    assert f"cannot listen on 127.0.0.1:{port}: address already in use" in logs[1].read_text()
    assert "Traceback" not in logs[0].read_text() + logs[1].read_text()


def test_connections_that_linger_do_not_hold_the_port(tmp_path: Path) -> None:
    log, (port,) = tmp_path / "log", free_ports(1)
    with serving(log, port=port) as (process, url), socket.socket() as client:
        until(lambda: ready(url), WAIT_S, log.read_text)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /health HTTP/1.1\r\nhost: kvflow\r\n\r\n")
        assert client.recv(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    with serving(log, port=port) as (_, url):
        until(lambda: ready(url), WAIT_S, log.read_text)


@pytest.mark.parametrize("taken", ["router.port", "cluster.decode.port"])
def test_a_port_that_is_taken_is_said_and_nothing_stays(tmp_path: Path, taken: str) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        overrides = [] if taken == "router.port" else [f"{taken}={port}"]
        with serving(log, *overrides, port=port if taken == "router.port" else None) as (process, url):
            assert process.wait(WAIT_S) == 1
    said = log.read_text()
    assert str(port) in said
    assert "already in use" in said or "taken" in said
    assert "Traceback" not in said
    with pytest.raises(OSError):  # noqa: PT011 - whatever it is, nobody answers
        get(f"{url}/health")


def test_any_free_port_will_do(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, "router.port=0"):
        until(lambda: "ready after" in log.read_text(), WAIT_S, log.read_text)
        url = next(w for w in log.read_text().split() if w.startswith("http://")).removesuffix("/v1")
        assert ready(url)


async def test_what_is_written_is_sent_at_once() -> None:
    """Else the body of an answer waits until the client has acknowledged its headers."""
    accepted = asyncio.Queue[bool]()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.put_nowait(bool(option))
        writer.close()

    with bound(Place(host="127.0.0.1", port=0, keys="")) as listener:
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await accepted.get()
            writer.close()
