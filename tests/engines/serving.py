"""`kvflow serve` as a process of its own, with real engines, as a user starts it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import OpenAI

from kvflow.launchers import lifeline
from tests.net import free_ports, get, post, until

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BLOCK = 128
"""Tokens in a block of vLLM's KV cache on CPUs."""
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Of SmolLM2-135M in float32: layers, keys and values, KV heads, head size, bytes."""
READY_S = 400

Message = dict[str, Any]


@dataclass(slots=True)
class Serving:
    """A running `kvflow serve`. `sessions` are those that its engines lead, by node name."""

    process: subprocess.Popen[bytes]
    log: Path
    ports: dict[str, int]
    sessions: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['router.port']}"

    def engine(self, role: str) -> str:
        return f"http://127.0.0.1:{self.ports[f'cluster.{role}.port']}"

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    def wait_ready(self) -> None:
        until(self.ready, READY_S, self.explain)
        self.sessions = {role: _session(self.ports[f"cluster.{role}.port"]) for role in ("prefill", "decode")}

    def ready(self) -> bool:
        assert self.process.poll() is None, self.explain()
        try:
            return get(f"{self.url}/ready")[0] == 200
        except OSError:
            return False

    def explain(self) -> str:
        return self.log.read_text()[-5000:]

    def stop(self, number: signal.Signals) -> int:
        """Send a signal, wait for the end, and see that nothing is left; the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(60)
        until(lambda: not self.left(), 30, lambda: f"still running: {self.left()}")
        return status

    def left(self) -> list[int]:
        return [pid for session in self.sessions.values() for pid in lifeline.members(session)]

    def computes_on(self, role: str) -> set[int]:
        """CPUs on which the main threads of an engine's workers may run."""
        workers = [pid for pid in lifeline.members(self.sessions[role]) if _title(pid).startswith("VLLM::Worker")]
        return {cpu for pid in workers for cpu in os.sched_getaffinity(pid)}

    def metric(self, role: str, name: str) -> float:
        """Of an engine, summed over its labels."""
        page = get(f"{self.engine(role)}/metrics")[1].decode()
        return sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    def post_to(self, role: str, path: str, body: Any) -> bytes:
        """The answer of an engine that is asked past the router."""
        status, raw, _ = post(self.engine(role) + path, body)
        assert status == 200, raw
        return raw

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Of the prompt that the engines make of a chat."""
        body = {"model": MODEL, "messages": list(messages)}
        found: list[int] = json.loads(post(f"{self.engine('prefill')}/tokenize", body)[1])["tokens"]
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    tokens: list[int]
    headers: dict[str, str]
    cached: int
    raw: str

    @property
    def path(self) -> str:
        return self.headers["x-kvflow-path"]

    @property
    def pulled(self) -> int:
        return int(self.headers["x-kvflow-pulled-tokens"])

    @property
    def reason(self) -> str | None:
        return self.headers.get("x-kvflow-reason")


def start(log: Path, *overrides: str) -> Serving:
    keys = ["router.port", *(f"cluster.{role}.{key}" for role in ("prefill", "decode") for key in PORTS)]
    ports = dict(zip(keys, free_ports(len(keys)), strict=True))
    words = [*(f"{k}={v}" for k, v in ports.items()), f"cluster.log_dir={log.parent / log.stem}", *overrides]
    with log.open("wb") as out:
        command = [sys.executable, "-m", "kvflow", "serve", *words]
        return Serving(subprocess.Popen(command, stdout=out, stderr=out), log, ports)


PORTS = ("port", "side_channel_port")


def ask(serving: Serving, messages: Sequence[Message], *, max_tokens: int = 24, **body: Any) -> Answer:
    """A greedy turn, not streamed."""
    body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **body}
    status, raw, headers = post(f"{serving.url}/v1/chat/completions", body)
    assert status == 200, raw
    answer = json.loads(raw)
    choice = answer["choices"][0]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
    return Answer(choice["message"]["content"], choice["token_ids"], headers, cached, raw.decode())


def ask_cold(serving: Serving, messages: Sequence[Message], **body: Any) -> Answer:
    """The same without a history that anybody could know: no conversation has this id, no cache this salt."""
    unique = f"cold-{time.monotonic_ns()}"
    answer = ask(serving, messages, conversation_id=unique, cache_salt=unique, **body)
    assert (answer.path, answer.pulled, answer.cached) == ("cold", 0, 0)
    return answer


def _title(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text().rstrip("\0 ")
    except OSError:
        return ""


def _session(port: int) -> int:
    """Session of the engine whose API listens on `port`: the process that was told so."""
    for pid in (p for p in Path("/proc").iterdir() if p.name.isdigit()):
        try:
            words = (pid / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"kvflow.nodes.engine_entry" in words and str(port).encode() in words:
            return int(pid.name)
    raise AssertionError(f"no engine listens on {port}")
