"""The two that are compared: one stock engine, and kvflow with the same model and the same arguments."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvflow.launchers import lifeline
from kvflow.launchers.spawn import Tied, spawn
from kvflow.nodes.command import flag
from tests.engines import serving, tiny
from tests.engines.serving import READY_S, Serving
from tests.net import free_ports, get, until

NAME = "tiny"
"""What clients send as `model`."""

ARGS: Mapping[str, Any] = {
    "enforce_eager": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "trust_request_chat_template": True,
    "trust_request_mm_kwargs": True,
    "default_chat_template_kwargs": {"enable_thinking": False},
}
"""Of all engines, so that every parameter of a request can be tried."""
ENV = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
KV_BLOCKS = 2048


@dataclass(frozen=True, slots=True)
class Stock:
    """A running engine without anything of kvflow's in it."""

    tied: Tied
    log: Path
    url: str

    def ready(self) -> bool:
        assert self.tied.process.poll() is None, self.explain()
        try:
            return get(f"{self.url}/health")[0] == 200
        except OSError:
            return False

    def explain(self) -> str:
        return self.log.read_text()[-5000:]

    def stop(self) -> None:
        os.close(self.tied.lifeline)
        session = self.tied.process.pid
        until(lambda: not lifeline.members(session), 30, lambda: f"still running: {lifeline.members(session)}")
        self.tied.process.wait()


@dataclass(frozen=True, slots=True)
class Pair:
    stock: Stock
    kvflow: Serving


@contextmanager
def pair(folder: Path, kind: tiny.Kind, args: Mapping[str, Any] = ARGS) -> Iterator[Pair]:
    """Both, ready; at the end nothing of them is left."""
    model = tiny.make(kind, folder / "model")
    with ExitStack() as stack:
        stock = start_stock(model, folder / "stock.log", args)
        stack.callback(stock.stop)
        kvflow = start_kvflow(model, folder / "serve.log", args)
        stack.callback(_end, kvflow)
        kvflow.wait_ready()
        until(stock.ready, READY_S, stock.explain)
        yield Pair(stock, kvflow)
        assert kvflow.stop(signal.SIGTERM) == 0


def _end(kvflow: Serving) -> None:
    if kvflow.process.poll() is None:
        kvflow.process.kill()
        kvflow.process.wait()


def start_stock(model: Path, log: Path, args: Mapping[str, Any]) -> Stock:
    """As `kvflow.nodes.command` starts an engine, without connector and middleware."""
    port = free_ports(1)[0]
    settings = {
        "model": str(model),
        "served_model_name": NAME,
        "host": "127.0.0.1",
        "port": port,
        "max_model_len": tiny.MAX_MODEL_LEN,
        "dtype": "float32",
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": KV_BLOCKS,
        "kv_cache_memory_bytes": 2**30,
        "enable_prompt_tokens_details": True,
        **args,
    }
    command = [sys.executable, "-m", "kvflow.launchers.tied", "vllm.entrypoints.launchers.api_server.entry"]
    words = [word for name, value in settings.items() for word in flag(name, value)]
    env = {
        **ENV,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    }
    with log.open("wb") as out:
        return Stock(spawn([*command, *words], env, out.fileno()), log, f"http://127.0.0.1:{port}")


def start_kvflow(model: Path, log: Path, args: Mapping[str, Any]) -> Serving:
    """Without a prefix cache on the prefill node, so that what is reused of a first turn is pulled.

    A turn is followed at once or never, so that hundreds of them leave room for the next.
    """
    return serving.start(
        log,
        f"model.path={model}",
        f"model.name={NAME}",
        f"model.max_model_len={tiny.MAX_MODEL_LEN}",
        "cluster.prefill.prefix_caching=false",
        "policy.retention.ttl_s=60",
        "policy.retention.max_pinned_share=0.75",
        *(f"cluster.{role}.kv_blocks={KV_BLOCKS}" for role in ("prefill", "decode")),
        *(f"+model.engine_args.{name}={_hydra(value)}" for name, value in args.items()),
        *(f"+cluster.env.{name}={value!r}" for name, value in ENV.items()),
    )


def _hydra(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_hydra(v)}" for k, v in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
