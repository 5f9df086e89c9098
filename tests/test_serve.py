"""`kvflow serve` as a process, with simulated nodes: what it says, how it ends, and what it leaves behind."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.net import free_ports, get, post, until

WAIT_S = 60


@contextmanager
def serving(log: Path, *overrides: str, port: int | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    router, prefill, decode = free_ports(3)
    router = port or router
    words = ["cluster=simulated", f"router.port={router}", f"cluster.prefill.port={prefill}"]
    words += [f"cluster.decode.port={decode}", *overrides]
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "kvflow", "serve", *words], stdout=out, stderr=out)
    try:
        yield process, f"http://127.0.0.1:{router}"
    finally:
        process.kill()
        process.wait()


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
    said = log.read_text()
    assert f"{number.name}: stopping" in said
    assert said.endswith("stopped\n")
    assert "Traceback" not in said
    assert json.loads(raw)["choices"]


def test_turns_under_way_are_finished_and_a_second_signal_ends_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with serving(log, "cluster.simulated.decode_tokens_per_s=5") as (process, url):
        until(lambda: ready(url), WAIT_S, log.read_text)
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            assert answer.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            until(lambda: "SIGTERM: stopping" in log.read_text(), WAIT_S)
            for _ in range(4):
                assert answer.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
    assert "stopping at once" in log.read_text()
    assert "Traceback" not in log.read_text()


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
    prefill, decode = free_ports(2)
    words = ["cluster=simulated", "router.port=0", f"cluster.prefill.port={prefill}", f"cluster.decode.port={decode}"]
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "kvflow", "serve", *words], stdout=out, stderr=out)
    try:
        until(lambda: "ready after" in log.read_text(), WAIT_S, log.read_text)
        url = next(w for w in log.read_text().split() if w.startswith("http://")).removesuffix("/v1")
        assert ready(url)
    finally:
        process.kill()
        process.wait()
