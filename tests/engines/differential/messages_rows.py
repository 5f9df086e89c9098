"""The same for /v1/messages, Anthropic's API."""

from typing import Any

from tests.engines.differential.chat_rows import SHAPE, said
from tests.engines.differential.row import LEFT_OUT, TEXT, Row, refusals, row_of, user

PATH = "/v1/messages"
TOOL = {"name": "find", "description": "Finds a thing.", "input_schema": SHAPE}
NAMED = {"type": "tool", "name": "find"}
USED = {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"room": 2}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "It is here."}


def message(name: str, /, **fields: Any) -> Row:
    return row_of(name, PATH, {"messages": [user(TEXT)], **fields})


ANSWERED: tuple[Row, ...] = (
    message("nothing but a message"),
    message("content in blocks", messages=[user([{"type": "text", "text": TEXT}])]),
    message("an answer", messages=[user(TEXT), said("Yes?"), user("Where?")]),
    message("an answer in blocks", messages=[user(TEXT), said([{"type": "text", "text": "Yes?"}]), user("Where?")]),
    message("a tool was used", messages=[user(TEXT), said([USED]), user([RESULT])], tools=[TOOL]),
    message(
        "thinking in a message",
        messages=[
            user(TEXT),
            said([{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "Yes."}]),
            user("Sure?"),
        ],
    ),
    message("system", system="Be brief."),
    message("system in blocks", system=[{"type": "text", "text": "Be brief."}]),
    message("a short prompt", messages=[user("Hi")], FIRST_TURN_ONLY=True),
    message("max_tokens 1", max_tokens=1),
    message("stop_sequences", stop_sequences=["e"], max_tokens=24),
    message("stop_sequences, several", stop_sequences=["zq", "a"], max_tokens=24),
    message("top_k, top_p", temperature=0, top_k=1, top_p=0.9),
    message("metadata", metadata={"user_id": "ann"}),
    message("tools", tools=[TOOL]),
    message("tool_choice auto", tools=[TOOL], tool_choice={"type": "auto"}),
    message("tool_choice any", tools=[TOOL], tool_choice={"type": "any"}, max_tokens=40),
    message(
        "tool_choice tool",
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "find"},
        max_tokens=40,
        EITHER_REFUSED=True,
    ),
    message("tool_choice none", tools=[TOOL], tool_choice={"type": "none"}),
    message(
        "one tool at a time",
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=40,
    ),
    message("thinking", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1100, stop_sequences=["e"]),
    message("thinking disabled", thinking={"type": "disabled"}),
    message("thinking adaptive", thinking={"type": "adaptive"}),
    message("output_config", output_config={"effort": "low"}),
    message("output_config format", output_config={"format": {"type": "json_schema", "schema": SHAPE}}, max_tokens=24),
    message("chat_template_kwargs", chat_template_kwargs={"enable_thinking": True}),
    message("cache_salt", cache_salt="pepper"),
    message("for render endpoints", mm_payload="none", return_mm_kwargs=False),
    message("vllm_xargs", vllm_xargs={"mine": 1}, watermarking=False),
    message("unknown fields", nonsense=1),
)

REFUSED: tuple[Row, ...] = refusals(
    message,
    {
        "unknown model": {"model": "gpt-0"},
        "no model": {"model": LEFT_OUT},
        "model is empty": {"model": ""},
        "no messages": {"messages": LEFT_OUT},
        "messages is text": {"messages": "hi"},
        "messages are empty": {"messages": []},
        "unknown role": {"messages": [{"role": "wizard", "content": "hi"}]},
        "content is a number": {"messages": [user(3)]},
        "unknown block": {"messages": [user([{"type": "smell"}])]},
        "no max_tokens": {"max_tokens": LEFT_OUT},
        "max_tokens 0": {"max_tokens": 0},
        "max_tokens negative": {"max_tokens": -1},
        "max_tokens too long": {"max_tokens": 100_000},
        "max_tokens is text": {"max_tokens": "many"},
        "prompt too long": {"messages": [user("word " * 5000)]},
        "temperature": {"temperature": -1},
        "top_p": {"top_p": 2},
        "top_k": {"top_k": -5},
        "stop_sequences too many": {"stop_sequences": ["a", "b", "c", "d", "e"]},
        "stop_sequences is text": {"stop_sequences": "a"},
        "tool_choice without a name": {"tools": [TOOL], "tool_choice": {"type": "tool"}},
        "tool_choice unknown": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "fly"}},
        "tools without a schema": {"tools": [{"name": "find"}]},
        "thinking without enough tokens": {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        "thinking budget": {"thinking": {"type": "enabled", "budget_tokens": 5}},
        "thinking unknown": {"thinking": {"type": "deep"}},
        "system is a number": {"system": 5},
        "metadata is text": {"metadata": "x"},
        "cache_salt empty": {"cache_salt": ""},
    },
)
