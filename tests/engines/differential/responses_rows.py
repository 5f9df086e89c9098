"""The same for /v1/responses."""

from typing import Any

from tests.engines.differential.chat_rows import EOS, SHAPE, THINK, said
from tests.engines.differential.row import LEFT_OUT, TEXT, Row, refusals, row_of, user

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "find", "description": "Finds a thing.", "parameters": SHAPE}
CALL = {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": '{"room": 2}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "It is here."}
FORMAT = {"format": {"type": "json_schema", "name": "answer", "schema": SHAPE}}


def response(name: str, /, **fields: Any) -> Row:
    return row_of(name, PATH, {"input": TEXT, "max_tokens": LEFT_OUT, "max_output_tokens": 8, **fields})


ANSWERED: tuple[Row, ...] = (
    response("nothing but an input"),
    response("no model", model=LEFT_OUT),
    response("messages", input=[user(TEXT)]),
    response("content in parts", input=[user([{"type": "input_text", "text": TEXT}])]),
    response("an answer", input=[user(TEXT), said("Yes?"), user("Where?")]),
    response("a tool was used", input=[user(TEXT), CALL, OUTPUT], tools=[TOOL]),
    response("a short prompt", input="Hi", FIRST_TURN_ONLY=True),
    response("instructions", instructions="Be brief."),
    response("max_output_tokens 1", max_output_tokens=1),
    response("store", store=False),
    response("metadata", metadata={"of": "ann"}),
    response("user", user="ann", service_tier="default", prompt_cache_key="k"),
    response("truncation", truncation="disabled"),
    response("truncation auto", truncation="auto", ALONE=True),
    response("top_logprobs", top_logprobs=2, include=["message.output_text.logprobs"]),
    response("logit_bias", logit_bias={"2000": 100}),
    response("the first token ends it", logit_bias=EOS),
    response("ignore_eos", logit_bias=EOS, ignore_eos=True),
    response("special tokens shown", logit_bias=EOS, ignore_eos=True, skip_special_tokens=False),
    response("penalties", presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
    response("seed, top_p, top_k, min_p", temperature=0.9, seed=5, top_p=0.9, top_k=40, min_p=0.01),
    response("stop", stop="e", max_output_tokens=24),
    response("stop, kept", stop=["e"], include_stop_str_in_output=True, max_output_tokens=24),
    response("stop_token_ids", logit_bias={"1000": 100}, stop_token_ids=[1000]),
    response("text format", text=FORMAT, max_output_tokens=24),
    response("structured_outputs", structured_outputs={"choice": ["yes", "no"]}),
    response("tools", tools=[TOOL]),
    response("tool_choice none", tools=[TOOL], tool_choice="none"),
    response("tool_choice required", tools=[TOOL], tool_choice="required", max_output_tokens=40),
    response("tool_choice named", tools=[TOOL], tool_choice={"type": "function", "name": "find"}, max_output_tokens=40),
    response("parallel_tool_calls", tools=[TOOL], parallel_tool_calls=False, max_tool_calls=2),
    response("reasoning", reasoning={"effort": "low"}, include_reasoning=True),
    response("thinking", chat_template_kwargs=THINK),
    response("enable_response_messages", enable_response_messages=True),
    response("cache_salt", cache_salt="pepper"),
    response("priority", priority=3),
    response("session_id", session_id="s-1"),
    response("request_id", request_id="resp_mine"),
    response("vllm_xargs", vllm_xargs={"mine": 1}),
    response("watermarking", watermarking=False),
    response("for images", media_io_kwargs={"image": {}}, mm_processor_kwargs={}),
    response("for render endpoints", mm_payload="none", return_mm_kwargs=False),
    response("unknown fields", nonsense=1),
)

REFUSED: tuple[Row, ...] = refusals(
    response,
    {
        "unknown model": {"model": "gpt-0"},
        "no input": {"input": LEFT_OUT},
        "input is null": {"input": None},
        "input is a number": {"input": 5},
        "input is empty": {"input": []},
        "unknown item": {"input": [{"type": "smell"}]},
        "input too long": {"input": "word " * 5000},
        "previous_response_id unknown": {"previous_response_id": "resp_of_nobody"},
        "previous_response_id nonsense": {"previous_response_id": "x"},
        "previous_input_messages": {"previous_response_id": "resp_x", "previous_input_messages": []},
        "prompt": {"prompt": {"id": "p"}},
        "background without store": {"background": True, "store": False},
        "max_output_tokens 0": {"max_output_tokens": 0},
        "max_output_tokens negative": {"max_output_tokens": -1},
        "max_output_tokens too long": {"max_output_tokens": 100_000},
        "temperature": {"temperature": -1},
        "top_p": {"top_p": 2},
        "presence_penalty": {"presence_penalty": 9},
        "top_logprobs too many": {"top_logprobs": 1000, "include": ["message.output_text.logprobs"]},
        "include unknown": {"include": ["x"]},
        "tool_choice without tools": {"tool_choice": "required"},
        "tool_choice unknown": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "fly"}},
        "tools is text": {"tools": "x"},
        "text is text": {"text": "x"},
        "truncation": {"truncation": "x"},
        "stop too many": {"stop": ["a", "b", "c", "d", "e"]},
        "structured_outputs regex": {"structured_outputs": {"regex": "(["}},
        "cache_salt empty": {"cache_salt": ""},
        "logit_bias unknown": {"logit_bias": {"10000000": 1}},
    },
)
