"""Writes what vLLM's own classes make of one answer, each kind as JSON, by the calls that vLLM's server makes."""

import json
import os
import sys

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.serve.engine import protocol as engine

HEAD = {"id": "i", "created": 1, "model": "m"}
CHUNK = {"object": "chat.completion.chunk", **HEAD}
TEXT = {"object": "text_completion", **HEAD}
END = {"finish_reason": "stop", "stop_reason": None, "token_ids": None}


def usage() -> engine.UsageInfo:
    out = engine.UsageInfo(prompt_tokens=5, total_tokens=7, completion_tokens=2)
    out.prompt_tokens_details = engine.PromptTokenUsageInfo(
        cached_tokens=3, created_cache_tokens=None, multimodal_tokens=None
    )
    return out


def chat_answer() -> chat.ChatCompletionResponse:
    message = chat.ChatMessage(role="assistant", reasoning=None, content="x")
    choice = chat.ChatCompletionResponseChoice(index=0, message=message, logprobs=None, **END)
    return chat.ChatCompletionResponse(**HEAD, choices=[choice], usage=usage())


def chat_chunk(delta: DeltaMessage, **fields: object) -> chat.ChatCompletionStreamResponse:
    choice = chat.ChatCompletionResponseStreamChoice(index=0, delta=delta, logprobs=None, **fields)
    return chat.ChatCompletionStreamResponse(**CHUNK, choices=[choice])


def text_answer() -> completion.CompletionResponse:
    choice = completion.CompletionResponseChoice(index=0, text="x", logprobs=None, **END)
    return completion.CompletionResponse(**HEAD, choices=[choice], usage=usage())


def text_chunk(**fields: object) -> completion.CompletionStreamResponse:
    choice = completion.CompletionResponseStreamChoice(
        index=0, text="x", logprobs=None, prompt_token_ids=None, token_ids=None, stop_reason=None, **fields
    )
    return completion.CompletionStreamResponse(**TEXT, choices=[choice])


def opening() -> chat.ChatCompletionStreamResponse:
    out = chat_chunk(DeltaMessage(role="assistant", content=""), finish_reason=None)
    out.prompt_token_ids, out.prompt_text = None, None
    return out


def shapes() -> dict[str, object]:
    last = {"usage": usage(), "system_fingerprint": "f", "metrics": None}
    chat_end = chat_chunk(DeltaMessage(content=""), **END)
    text_end = text_chunk(finish_reason="stop")
    chat_end.system_fingerprint = text_end.system_fingerprint = "f"
    chat_usage = chat.ChatCompletionStreamResponse(**CHUNK, choices=[], **last)
    text_usage = completion.CompletionStreamResponse(**HEAD, choices=[], **last)
    delta = chat_chunk(DeltaMessage(content="x"), finish_reason=None, token_ids=None)
    return {
        "chat": chat_answer().model_dump(),
        "chat opening": opening().model_dump(exclude_unset=True),
        "chat chunk": delta.model_dump(exclude_unset=True),
        "chat end": chat_end.model_dump(exclude_unset=True),
        "chat usage": chat_usage.model_dump(exclude_unset=True, exclude_none=True),
        "text": text_answer().model_dump(),
        "text chunk": text_chunk(finish_reason=None).model_dump(exclude_unset=True),
        "text end": text_end.model_dump(exclude_unset=True),
        "text usage": text_usage.model_dump(exclude_unset=False, exclude_none=True),
        "models": engine.ModelList(
            data=[engine.ModelCard(id="m", root="m", max_model_len=5, permission=[engine.ModelPermission()])]
        ).model_dump(),
        "error": engine.ErrorResponse(error=engine.ErrorInfo(message="x", type="y", code=400)).model_dump(),
    }


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    json.dump(shapes(), answers)
    sys.exit()
