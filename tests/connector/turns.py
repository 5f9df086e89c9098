"""Turns as the router would send them to an engine of `tests.connector.scheduling`. Imports no vLLM."""

import random
from typing import Any

from kvflow.connector.wire import KEY

BLOCK = 16
LONGEST = 16
TOKEN = 7
DIRECT = {"do_remote_decode": False, "do_remote_prefill": False}
COLD = {"do_remote_decode": True, "do_remote_prefill": False}
FROM_PREFILL = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "prefill",
    "remote_request_id": "there",
    "remote_host": "h",
    "remote_port": 1,
    "tp_size": 1,
}


def ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(n)]


def keep(retain_s: float = 60, share: float = 1.0, **more: Any) -> dict[str, Any]:
    return {**DIRECT, KEY: {"retain_s": retain_s, "max_pinned_share": share}, **more}


def pull(handle: dict[str, Any], minimum: int = 0, **changed: Any) -> dict[str, Any]:
    """What the router makes of a handle for the next prefill leg."""
    order = {"min_pull_tokens": minimum, "fingerprint": handle[KEY]["fingerprint"], **changed}
    return {**handle, **COLD, "remote_block_ids": [list(g) for g in handle["remote_block_ids"]], KEY: order}


def held(scheduling: Any, tokens: list[int], answer: int = 5, **more: Any) -> dict[str, Any]:
    """The handle of a turn on some decode node."""
    engine = scheduling.decode()
    engine.add("turn", tokens, keep(), answer=answer, **more)
    handle: dict[str, Any] = engine.run("turn")
    return handle


def pulled(engine: Any, name: str = "next") -> int:
    """Blocks that the worker was told to fetch for a request; -1 if it was told nothing of it."""
    receive = engine.meta.reqs_to_recv.get(name)
    if receive is None:
        return -1
    return len(receive.local_block_ids[0]) if receive.local_block_ids else 0
