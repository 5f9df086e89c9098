"""What is sent to an engine for each leg of a turn: pure functions from the client's body to an engine's."""

from collections.abc import Mapping
from typing import Any

from kvflow.connector.wire import KEY, DecodeOrder, PrefillOrder
from kvflow.router.endpoints import Endpoint
from kvflow.types import Handle, Plan

OURS = ("kv_transfer_params", "ec_transfer_params", "conversation_id", KEY)
"""Fields that only the router may set, or that nobody but the router knows; never passed on from a client."""


def clean(body: Mapping[str, Any]) -> dict[str, Any]:
    """The client's body without what must not reach an engine."""
    out = {k: v for k, v in body.items() if k not in OURS}
    extra = out.get("vllm_xargs")
    if isinstance(extra, Mapping) and any(k in extra for k in OURS):
        out["vllm_xargs"] = {k: v for k, v in extra.items() if k not in OURS}
    return out


def prefill_body(endpoint: Endpoint, body: Mapping[str, Any], plan: Plan, handle: Handle | None) -> dict[str, Any]:
    """One token, not streamed. With a handle, the connector pulls what it can prove."""
    out = {k: v for k, v in body.items() if k not in endpoint.answer_fields}
    out.update(endpoint.prefill_fields)
    out.update(dict.fromkeys(endpoint.other_limits & out.keys(), 1))
    endpoint.prefill_forms(out)
    if out.get("tools") and _demands_a_call(out.get("tool_choice")):
        out["tool_choice"] = endpoint.no_tool
    out["kv_transfer_params"] = _prefill_params(plan, handle)
    return out


def _demands_a_call(choice: object) -> bool:
    """A call that must come cannot be cut off after one token. (Some templates show the choice to the model, so others
    are left as they are.)
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    return kind not in (None, "auto", "none")


def _prefill_params(plan: Plan, handle: Handle | None) -> dict[str, Any]:
    if handle is None:
        return {"do_remote_decode": True, "do_remote_prefill": False, KEY: PrefillOrder().to_wire()}
    kept = dict(handle.params)
    report = kept.pop(KEY, {})
    order = PrefillOrder(min_pull_tokens=plan.min_pull_tokens, fingerprint=report.get("fingerprint"))
    return {**kept, "do_remote_decode": True, "do_remote_prefill": False, KEY: order.to_wire()}


def decode_body(body: Mapping[str, Any], prefilled: Mapping[str, Any] | None, order: DecodeOrder) -> dict[str, Any]:
    """The client's own request; with a prefill node's handle the KV is pulled from there, else computed."""
    if not prefilled and order == DecodeOrder():
        return dict(body)
    params = dict(prefilled or {"do_remote_decode": False, "do_remote_prefill": False})
    return {**body, "kv_transfer_params": {**params, KEY: order.to_wire()}}
