"""The contract between the router and an engine that runs kvflow's connector. Imports no vLLM.

Everything travels inside vLLM's own `kv_transfer_params`, under one key of ours, `KEY`. The engine passes unknown keys
through to the connector, so a stock engine ignores them.

Prefill leg, request  (`PrefillOrder`)     what the connector is asked to do before it schedules the prompt
Prefill leg, response (`PrefillReport`)    what it did
Decode leg, request   (`DecodeOrder`)      what becomes of the KV when the turn ends
Decode leg, response  (`DecodeReport`)     what was kept; beside it, unless nothing was, vLLM's own handle

Not streamed, a response carries the dict in its body, as vLLM does. In a streamed one it is one more server-sent
event: `event: kvflow`, then `data:` with `{"kv_transfer_params": {...}}`, then an empty line. The engine sends it as
soon as the turn's last output exists and before it passes that output on, so that a client that has seen the end of its
answer finds the handle filed.

`GET /kvflow/node` on an engine answers `NodeReport`. An engine without that route is a stock one.
`POST /kvflow/release` on a decode engine takes `{"kv_transfer_params": {...}}` of a decode leg that will not come: with
a prefill engine's handle, that engine is told that nobody will pull; with a `DecodeOrder`, what it lists is released.
An optional `data_parallel_rank` says which of the engine's ranks is meant. A leg that an engine was sent needs none of
this: if it ends before it is scheduled, refused or because its client left, the engine lets go of the same by itself, a
prefill engine of the handle that it was to pull.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from kvflow.errors import WireError
from kvflow.types import Blocks, Reason

VERSION = 1
KEY = "kvflow"
NODE_PATH = "/kvflow/node"
RELEASE_PATH = "/kvflow/release"
EVENT_PREFIX = b"event: kvflow\n"
_MOST = 2**63
"""Whole numbers in a message are below; Python's own know no bound, and divide to no float."""


class _Message:
    """A flat dataclass that travels as a JSON object; unknown keys from a newer peer are ignored."""

    def to_wire(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v is not None}  # type: ignore[call-overload]

    @classmethod
    def from_wire(cls, data: object) -> Self:
        if not isinstance(data, Mapping):
            raise WireError(f"{cls.__name__}: expected an object, got {type(data).__name__}")
        hints = get_type_hints(cls)
        known = {k: v for k, v in data.items() if k in hints}
        for key, value in known.items():
            if not _fits(value, hints[key]):
                raise WireError(f"{cls.__name__}: {key} cannot be {value!r:.80}")
        try:
            return cls(**known)
        except TypeError as e:
            raise WireError(f"{cls.__name__}: {e}") from None


def _fits(value: object, hint: Any) -> bool:
    """No number in a message is negative, too large to calculate with, or no number at all."""
    if get_origin(hint) is UnionType:
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(v, get_args(hint)[0]) for v in value)
    if get_origin(hint) is dict:
        kind = get_args(hint)[1]
        return isinstance(value, dict) and (kind is Any or all(_fits(v, kind) for v in value.values()))
    if hint in (int, float):
        most = _MOST if type(value) is int else inf
        return type(value) in (int, hint) and 0 <= value < most  # type: ignore[operator]
    return isinstance(value, hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOrder(_Message):
    """With a handle's params beside it, pull what `fingerprint` proves to be a prefix of the prompt."""

    min_pull_tokens: int = 0
    fingerprint: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed(_Message):
    """Where a leg's time went until its first token, in seconds; absent where the engine cannot say.

    They came after version 1 did: who does not know them passes over them, and who misses them does without.
    """

    queue_s: float | None = None
    """Waiting inside the engine."""
    load_s: float | None = None
    """Reading KV from another engine."""
    compute_s: float | None = None
    """Computing, from the first step of the prompt to the first token. Absent where the request was preempted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport(_Timed):
    """Token counts of one prefill leg. prompt = computed + local + pulled, but for the last token of a full hit."""

    prompt_tokens: int
    verified_tokens: int = 0
    """Length of the prefix that the fingerprint proved."""
    local_tokens: int = 0
    """Taken from the prefill node's own prefix cache."""
    pulled_tokens: int = 0
    """Moved from the decode node."""
    reason: str | None = None
    """A `Reason`, where less was pulled than was offered."""
    prompt_digest: str | None = None
    """Of the prompt whose KV this is, for the decode node to compare with its own."""
    blocks: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOrder(_Message):
    """What becomes of the KV when the turn ends; and, with a prefill node's handle, what prompt that was for."""

    retain_s: float = 0.0
    max_pinned_share: float = 0.0
    prompt_digest: str | None = None
    """From the `PrefillReport`. A decode node whose own prompt has another digest pulls nothing."""
    release: list[str] | None = None
    """`remote_request_id` of handles that nobody will read any more: freed before this request is scheduled. Those that
    the engine does not keep (any longer) are passed over."""
    turn: str | None = None
    """The router's name for the turn, by which it can be abandoned."""
    abandon: list[str] | None = None
    """Turns whose end nobody has seen, by `turn`: what is kept of them is freed, and what is not yet will not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport(_Timed):
    """What the decode node did at the end of the turn. `fingerprint` and `retain_s` only where the KV was kept."""

    retained: bool = False
    tokens: int = 0
    """Tokens whose KV is kept."""
    retain_s: float = 0.0
    fingerprint: dict[str, Any] | None = None
    refused: str | None = None
    """`policy` (not asked for), `share` (the pinned share is used up), `unhashable` (the prompt has no token ids)."""
    load_failed: bool = False
    """The pull from the prefill node broke, or was for another prompt; the decode node computed the prompt itself."""
    prompt_tokens: int | None = None
    local_tokens: int | None = None
    """Of those, the ones that the decode node's own prefix cache had."""
    pulled_tokens: int | None = None
    """Of those, the ones moved from the prefill node."""
    blocks: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport(_Message):
    """Identity of an engine. `epoch` is new in every life of the process; its handles name it in `remote_engine_id`."""

    version: int
    epoch: str
    role: str
    vllm: str
    block_size: int
    max_model_len: int
    prefix_caching: bool = True


def blocks_from_wire(data: Mapping[str, int] | None) -> Blocks | None:
    """Raises `WireError`."""
    try:
        if data is None:
            return None
        reserve = data.get("reserve", 0)
        return Blocks(free=data["free"], pinned=data["pinned"], total=data["total"], reserve=reserve)
    except KeyError as e:
        raise WireError(f"blocks: {e.args[0]} is missing") from None


def reason_from_wire(word: str | None) -> Reason | None:
    """A word that a newer engine may have and we do not is no reason to fail a turn."""
    return next((r for r in Reason if r.value == word), None)


def event(params: Mapping[str, Any] | None) -> bytes:
    """The event that carries a handle in a stream."""
    body = json.dumps({"kv_transfer_params": params}, separators=(",", ":"))
    return EVENT_PREFIX + b"data: " + body.encode() + b"\n\n"
