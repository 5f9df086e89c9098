"""Response bodies with exactly the fields of vLLM's OpenAI server, those that are null included."""

import json
import time
from collections.abc import Mapping
from typing import Any

from kvflow.nodes.simulated.requests import Call
from kvflow.nodes.simulated.run import Step

SYSTEM_FINGERPRINT = "vllm-0.32.0-simulated"
DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """As in a stream, where what is null is left out."""
    out: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    return out if cached is None else {**out, "prompt_tokens_details": {"cached_tokens": cached}}


def full_usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    details = {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {**usage(prompt, completion), "prompt_tokens_details": details, "completion_tokens_details": None}


class Body:
    """What all parts of the response to one call share."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._created = int(time.time())

    def full(
        self, choices: list[dict[str, Any]], usage: Mapping[str, Any], params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        kind = "chat.completion" if self._call.chat else "text_completion"
        prompt = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None} if self._call.chat else {}
        return {
            **self._head(kind),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "usage": usage,
            **prompt,
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def choice(self, index: int, text: str, last: Step) -> dict[str, Any]:
        end = {"logprobs": None, "finish_reason": last.finish, "stop_reason": last.stop_reason, "token_ids": None}
        if self._call.chat:
            return {"index": index, "message": _message(text), **end, "routed_experts": None}
        prompt = {"prompt_logprobs": None, "prompt_token_ids": None}
        return {"index": index, "text": text, **end, **prompt, "routed_experts": None}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        chunk = self._chunk({**choice, "finish_reason": None})
        return {**chunk, "prompt_token_ids": None, "prompt_text": None}

    def chunk(self, index: int, step: Step) -> dict[str, Any]:
        text = {"delta": {"content": step.text}} if self._call.chat else {"text": step.text}
        choice: dict[str, Any] = {"index": index, **text, "logprobs": None, "finish_reason": step.finish}
        if step.finish or not self._call.chat:
            choice["stop_reason"] = step.stop_reason
        if not self._call.chat:
            choice["prompt_token_ids"] = None
        choice["token_ids"] = None
        out = self._chunk(choice)
        if step.finish and not self._call.include_usage:
            out["system_fingerprint"] = SYSTEM_FINGERPRINT
        return out

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last chunk, where it was asked for."""
        head = self._head("chat.completion.chunk" if self._call.chat else "text_completion")
        return {**head, "choices": [], "usage": usage, "system_fingerprint": SYSTEM_FINGERPRINT}

    def _chunk(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk" if self._call.chat else "text_completion"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._call.id, "object": kind, "created": self._created, "model": self._call.model}


def _message(text: str) -> dict[str, Any]:
    empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    return {"role": "assistant", "content": text, **empty}


def models(name: str, max_model_len: int) -> dict[str, Any]:
    now = int(time.time())
    allowed = dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True)
    refused = dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False)
    permission = {"id": "modelperm-simulated", "object": "model_permission", "created": now, **allowed, **refused}
    card = {"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": name, "parent": None}
    permissions = [{**permission, "organization": "*", "group": None}]
    return {"object": "list", "data": [{**card, "max_model_len": max_model_len, "permission": permissions}]}
