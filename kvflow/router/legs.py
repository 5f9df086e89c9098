"""What is sent to an engine for each leg of a turn: pure functions from the client's body to an engine's."""

from collections.abc import Mapping
from typing import Any

from kvflow.connector.wire import KEY, DecodeOrder, PrefillOrder
from kvflow.types import Handle, Plan

OURS = ("kv_transfer_params", "ec_transfer_params", "conversation_id", KEY)
"""Fields that only the router may set, or that nobody but the router knows; never passed on from a client."""

_ANSWER_FIELDS = frozenset(
    {
        "best_of",
        "include_reasoning",
        "logprob_token_ids",
        "logprobs",
        "min_tokens",
        "response_format",
        "return_prompt_text",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "stream_options",
        "structured_outputs",
        "thinking_token_budget",
        "top_logprobs",
    }
)
"""Fields that shape the answer and leave the prompt alone; the prefill leg's one token is thrown away."""


def clean(body: Mapping[str, Any]) -> dict[str, Any]:
    """The client's body without what must not reach an engine."""
    out = {k: v for k, v in body.items() if k not in OURS}
    extra = out.get("vllm_xargs")
    if isinstance(extra, Mapping) and any(k in extra for k in OURS):
        out["vllm_xargs"] = {k: v for k, v in extra.items() if k not in OURS}
    return out


def splittable(body: Mapping[str, Any]) -> bool:
    """Whether two nodes can serve the request as one would.

    A handle is read once, so several choices or prompts cannot share one; log-probabilities of the prompt, and what
    `echo` adds to them, exist only where the prompt is computed; truncation depends on the output length, which differs
    between the legs.
    """
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return False
    if any(body.get(k) not in (None, False) for k in ("use_beam_search", "echo")):
        return False
    if any(body.get(k) is not None for k in ("prompt_logprobs", "prompt_embeds", "truncate_prompt_tokens", "suffix")):
        return False
    return "messages" in body or _is_one_prompt(body.get("prompt"))


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(type(t) is int for t in prompt)
    return isinstance(prompt, str) and prompt != ""


def prefill_body(body: Mapping[str, Any], plan: Plan, handle: Handle | None) -> dict[str, Any]:
    """One token, not streamed. With a handle, the connector pulls what it can prove."""
    out = {k: v for k, v in body.items() if k not in _ANSWER_FIELDS}
    out["stream"] = False
    out["max_tokens"] = 1
    if "max_completion_tokens" in out:
        out["max_completion_tokens"] = 1
    if out.get("tools"):
        out["tool_choice"] = "none"
    out["kv_transfer_params"] = _prefill_params(plan, handle)
    return out


def _prefill_params(plan: Plan, handle: Handle | None) -> dict[str, Any]:
    if handle is None:
        return {"do_remote_decode": True, "do_remote_prefill": False, KEY: PrefillOrder().to_wire()}
    kept = dict(handle.params)
    report = kept.pop(KEY, {})
    order = PrefillOrder(min_pull_tokens=plan.min_pull_tokens, fingerprint=report.get("fingerprint"))
    return {**kept, "do_remote_decode": True, "do_remote_prefill": False, KEY: order.to_wire()}


def decode_body(
    body: Mapping[str, Any], plan: Plan, prefilled: Mapping[str, Any] | None, prompt_digest: str | None = None
) -> dict[str, Any]:
    """The client's own request; with a prefill node's handle the KV is pulled from there, else computed."""
    if not prefilled and not plan.retain_s:
        return dict(body)
    params: dict[str, Any] = dict(prefilled or {"do_remote_decode": False, "do_remote_prefill": False})
    order = DecodeOrder(retain_s=plan.retain_s, max_pinned_share=plan.max_pinned_share, prompt_digest=prompt_digest)
    params[KEY] = order.to_wire()
    return {**body, "kv_transfer_params": params}
