"""What engines say at the end of a leg, read with care: they are other programs, perhaps of other versions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvflow.connector.wire import KEY, DecodeReport, PrefillReport
from kvflow.conversations import EXPIRY_MARGIN_S
from kvflow.errors import WireError
from kvflow.router.upstream import EngineError
from kvflow.types import Handle, Reason

_HANDLE_OVERHEAD = 4
"""Parsed JSON takes about so many times the memory of its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The outcome of a prefill leg: that the engine refuses the request, or what the decode leg needs."""

    params: dict[str, Any] | None = None
    report: PrefillReport | None = None
    refused: bool = False

    @property
    def pulled(self) -> int:
        return self.report.pulled_tokens if self.report else 0

    @property
    def read(self) -> bool:
        """The engine has told the one that kept the KV that it is done with it.

        Of a failed transfer nobody tells, nor does an engine that is set up to pull nothing.
        """
        return self.report is not None and self.report.reason not in (Reason.TRANSFER_FAILED, Reason.ONE_WAY)

    @property
    def prompt_digest(self) -> str | None:
        return self.report.prompt_digest if self.report else None


def json_object(node: str, data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise EngineError(node, "answered with something else than a JSON object", reached=True)
    return body


def prefilled(node: str, data: bytes) -> Prefilled:
    """Of a prefill leg that succeeded. A stock engine sends no report, one without a connector not even params."""
    body = json_object(node, data)
    if _finish_reason(body) == "error":
        raise EngineError(node, "could not load the KV it was to pull", reached=True)
    params = body.get("kv_transfer_params")
    if not isinstance(params, dict):
        return Prefilled()
    report = params.pop(KEY, None)
    try:
        return Prefilled(params=params, report=None if report is None else PrefillReport.from_wire(report))
    except WireError as e:
        raise EngineError(node, f"sent a broken report: {e}", reached=True) from None


def decode_report(params: Mapping[str, Any]) -> DecodeReport | None:
    """None from a stock engine. Raises `WireError`."""
    return DecodeReport.from_wire(params[KEY]) if KEY in params else None


def handle(node: str, params: dict[str, Any], report: DecodeReport, now: float) -> Handle:
    """Raises `WireError`."""
    engine, pin = params.get("remote_engine_id"), params.get("remote_request_id")
    if not isinstance(engine, str) or not isinstance(pin, str):
        raise WireError("a handle must name its engine and its request")
    return Handle(
        node=node,
        epoch=engine.partition("_dp")[0],  # with data parallelism, engine ids are the epoch and the rank
        tokens=report.tokens,
        deadline=now + report.retain_s - EXPIRY_MARGIN_S,
        pin=pin,
        blocks=_count_blocks(params.get("remote_block_ids")),
        kept_at=now,
        params=params,
        size=_HANDLE_OVERHEAD * len(json.dumps(params)),
    )


def _count_blocks(groups: object) -> int:
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise WireError("a handle must list its blocks by cache group")
    return sum(map(len, groups))


def _finish_reason(body: Mapping[str, Any]) -> object:
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first.get("finish_reason") if isinstance(first, dict) else None
