"""Writes what vLLM's own classes make of one answer, each kind as JSON, by the calls that vLLM's server makes."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, _StateType
from vllm.entrypoints.serve.engine import protocol as engine
from vllm.entrypoints.serve.tokenize import protocol as tokenize
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams

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


def response(status: str, **fields: Any) -> responses.ResponsesResponse:
    request = responses.ResponsesRequest(model="m", input="x", request_id="resp_1")
    return responses.ResponsesResponse.from_request(
        request, SamplingParams(max_tokens=4), model_name="m", created_time=1, status=status, **fields
    )


def responses_usage() -> responses.ResponseUsage:
    details = responses.InputTokensDetails(cached_tokens=3, cache_write_tokens=0)
    return responses.ResponseUsage(
        input_tokens=5,
        input_tokens_details=details,
        output_tokens=2,
        output_tokens_details=responses.OutputTokensDetails(),
        total_tokens=7,
    )


def responses_answer() -> dict[str, Any]:
    part = responses.ResponseOutputMessage.model_validate(
        {
            "id": "msg_1",
            "content": [{"text": "x", "annotations": [], "type": "output_text", "logprobs": None}],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        }
    )
    answer = response("completed", output=[part], usage=responses_usage())
    dumped: dict[str, Any] = answer.model_dump(mode="json", by_alias=True)
    return dumped


def responses_events() -> dict[str, Any]:
    """By type."""
    first = response("in_progress", output=[]).model_dump(mode="json", by_alias=True)
    events: list[Any] = [
        responses.ResponseCreatedEvent(type="response.created", sequence_number=0, response=first),
        responses.ResponseInProgressEvent(type="response.in_progress", sequence_number=0, response=first),
    ]
    process = SimpleStreamingEventProcessor()
    output = CompletionOutput(index=0, text="x", token_ids=[1], cumulative_logprob=None, logprobs=None)
    events += process.open(_StateType.CONTENT)
    events += process.emit_delta(DeltaMessage(content="x"), output, lambda _: [])
    events += process.close_current()
    last = response("completed", output=process.output_items, usage=responses_usage())
    events.append(responses.ResponseCompletedEvent(type="response.completed", sequence_number=0, response=last))
    return {e.type: json.loads(e.model_dump_json(indent=None, by_alias=True)) for e in events}


def messages_answer() -> dict[str, Any]:
    choice = chat_answer()
    dumped: dict[str, Any] = AnthropicServingMessages.messages_full_converter(None, choice).model_dump(
        exclude_none=True
    )
    return dumped


def messages_events() -> dict[str, Any]:
    """By type."""

    async def chunks() -> AsyncGenerator[str]:
        end = chat_chunk(DeltaMessage(content=""), **END)
        usage_chunk = chat.ChatCompletionStreamResponse(**CHUNK, choices=[], usage=usage())
        first = opening()
        first.usage = engine.UsageInfo(prompt_tokens=5, total_tokens=5, completion_tokens=0)
        for part in (first, chat_chunk(DeltaMessage(content="x"), finish_reason=None), end, usage_chunk):
            yield f"data: {part.model_dump_json(exclude_unset=True)}\n\n"
        yield "data: [DONE]\n\n"

    async def read() -> dict[str, Any]:
        found = {}
        async for event in AnthropicServingMessages.message_stream_converter(None, chunks()):
            head, data = event.strip().split("\n")
            found[head.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
        return found

    return asyncio.run(read())


def small() -> dict[str, Any]:
    context = anthropic.AnthropicContextManagement(original_input_tokens=1)
    count = anthropic.AnthropicCountTokensResponse(input_tokens=1, context_management=context)
    error = anthropic.AnthropicErrorResponse(error=anthropic.AnthropicError(type="x", message="y"))
    return {
        "count_tokens": count.model_dump(exclude_none=True),
        "messages error": error.model_dump(),
        "tokenize": tokenize.TokenizeResponse(count=1, max_model_len=5, tokens=[1]).model_dump(),
        "detokenize": tokenize.DetokenizeResponse(prompt="x").model_dump(),
    }


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
        "responses": responses_answer(),
        "responses events": responses_events(),
        "messages": messages_answer(),
        "messages events": messages_events(),
        **small(),
        "error": engine.ErrorResponse(error=engine.ErrorInfo(message="x", type="y", code=400)).model_dump(),
    }


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    json.dump(shapes(), answers)
    sys.exit()
