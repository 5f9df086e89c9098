"""From the body of an OpenAI request to jobs for the engine, with vLLM's checks and vLLM's words."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any
from uuid import uuid4

from kvflow.nodes.simulated.language import render, tokenize
from kvflow.nodes.simulated.run import Job
from kvflow.nodes.simulated.settings import Settings

MALFORMED = "Bad Request"


class Refused(Exception):
    """A request that vLLM would answer with an error."""

    def __init__(self, message: str, *, param: str | None, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.malformed = kind == MALFORMED
        """Refused by vLLM's validation, before any of its handlers sees the request."""
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request. It has one job for each of its prompts."""

    id: str
    chat: bool
    model: str
    jobs: tuple[Job, ...]
    choices: int
    stream: bool
    include_usage: bool
    usage_in_chunks: bool
    echo: str
    """Text that goes before each answer; empty for most."""


def parse(content_type: str, data: bytes) -> dict[str, Any]:
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed", param=None)
    try:
        body = json.loads(data)
    except ValueError as e:
        at = f"body.{getattr(e, 'pos', 0)}"
        what = {"type": "json_invalid", "loc": at, "msg": "JSON decode error", "ctx": {"error": str(e).split(":")[0]}}
        raise _invalid(what, param=at) from None
    if not isinstance(body, dict):
        raise wrong("body", "model_attributes_type", "Input should be a valid dictionary", body)
    return body


def check_model(body: Mapping[str, Any], settings: Settings) -> None:
    model = body.get("model")
    if model and model != settings.model:
        message = f"The model `{model}` does not exist. Valid aliases: {settings.model}."
        raise Refused(message, param="model", status=404, kind="NotFoundError")


def chat(body: Mapping[str, Any], settings: Settings, request_id: str | None) -> Call:
    prompt = chat_prompt(body)
    check_model(body, settings)
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return _call(body, settings, [tokenize(prompt)], request_id, is_chat=True, limit=limit)


def chat_prompt(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    if "messages" not in body:
        raise wrong("body.messages", "missing", "Field required", body)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise wrong("body.messages", "list_type", "Input should be a valid list", messages)
    opens = bool(body.get("add_generation_prompt", True))
    return render(messages, body.get("tools"), open_answer=opens)


def completion(body: Mapping[str, Any], settings: Settings, request_id: str | None) -> Call:
    prompts = _prompts(body.get("prompt"))
    check_model(body, settings)
    return _call({"max_tokens": 16, **body}, settings, prompts, request_id, is_chat=False, limit="max_tokens")


def _prompts(prompt: object) -> list[list[int]]:
    """A text, several texts, token ids, or several lists of token ids."""
    if not prompt:
        raise wrong("body", "value_error", "Either prompt or prompt_embeds must be provided and non-empty.", prompt)
    if isinstance(prompt, str):
        return [tokenize(prompt)]
    if isinstance(prompt, list) and all(type(p) is int for p in prompt):
        return [prompt]
    if isinstance(prompt, list) and all(isinstance(p, str | list) for p in prompt):
        return [tokens for p in prompt for tokens in _prompts(p)]
    raise wrong("body.prompt", "string_type", "Input should be a valid string", prompt)


def _call(
    body: Mapping[str, Any],
    settings: Settings,
    prompts: Sequence[list[int]],
    request_id: str | None,
    *,
    is_chat: bool,
    limit: str,
) -> Call:
    call_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id or uuid4().hex}"
    asked = _number(body, limit)
    jobs = []
    for i, prompt in enumerate(prompts):
        job_id = call_id if is_chat else f"{call_id}-{i}"
        jobs.append(_job(body, prompt, job_id, _room(settings, prompt, asked, limit)))
    options = _typed(body, "stream_options", dict, "Input should be a valid dictionary") or {}
    prompt_text = body.get("prompt")
    return Call(
        id=call_id,
        chat=is_chat,
        model=body.get("model") or settings.model,
        jobs=tuple(jobs),
        choices=_number(body, "n") or 1,
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        usage_in_chunks=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        echo=prompt_text if body.get("echo") and isinstance(prompt_text, str) else "",
    )


def _room(settings: Settings, prompt: Sequence[int], asked: int | None, limit: str) -> int:
    """Tokens the answer may have."""
    most = settings.max_model_len
    if asked is not None and asked > most:
        message = f"{limit}={asked} cannot be greater than max_model_len={most}. Please request fewer output tokens."
        raise Refused(message, param=limit)
    if len(prompt) > most:
        message = (
            f"This model's maximum context length is {most} tokens. However, your prompt contains {len(prompt)} input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
            "prompt."
        )
        raise Refused(message, param="input_tokens")
    tokens = min(most - len(prompt), most if asked is None else asked)
    if tokens < 1:
        raise Refused(f"max_tokens must be at least 1, got {tokens}.", param="max_tokens")
    return tokens


def _job(body: Mapping[str, Any], prompt: list[int], job_id: str, tokens: int) -> Job:
    least = _number(body, "min_tokens") or 0
    if least > tokens:
        raise Refused(f"min_tokens must be less than or equal to max_tokens={tokens}, got {least}.", param=None)
    stop = _typed(body, "stop", str | list, "Input should be a valid string or list") or []
    return Job(
        request_id=job_id,
        prompt=tuple(prompt),
        max_tokens=tokens,
        min_tokens=least,
        ignore_eos=bool(body.get("ignore_eos")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=frozenset(_typed(body, "stop_token_ids", list, "Input should be a valid list") or ()),
        cache_salt=_typed(body, "cache_salt", str, "Input should be a valid string"),
        params=_typed(body, "kv_transfer_params", dict, "Input should be a valid dictionary") or {},
    )


def _number(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is not None and type(value) is not int:
        raise wrong(f"body.{key}", "int_parsing", "Input should be a valid integer", value)
    return value


def _typed(body: Mapping[str, Any], key: str, wanted: type | UnionType, message: str) -> Any:
    value = body.get(key)
    if value is not None and not isinstance(value, wanted):
        raise wrong(f"body.{key}", "type", message, value)
    return value


def wrong(at: str, kind: str, message: str, value: object) -> Refused:
    shown = (
        value if isinstance(value, str | int | float | None) else f"<{type(value).__name__} of {_size(value)} items>"
    )
    return _invalid({"type": kind, "loc": at, "msg": message, "input": shown}, param=at)


def _invalid(what: object, *, param: str | None) -> Refused:
    return Refused(f"1 validation error:\n  {what}", param=param, kind=MALFORMED)


def _size(value: object) -> int:
    return len(value) if isinstance(value, Sequence | Mapping) else 0
