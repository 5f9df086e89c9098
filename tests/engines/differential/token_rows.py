"""The same for /tokenize, /detokenize and /v1/messages/count_tokens, which compute nothing."""

from typing import Any

from tests.engines.differential.chat_rows import TOOL, said
from tests.engines.differential.exchange import JSON
from tests.engines.differential.messages_rows import TOOL as ANTHROPIC_TOOL
from tests.engines.differential.row import TEXT, Row, user
from tests.engines.differential.servers import NAME


def tokenize(name: str, /, **fields: Any) -> Row:
    return Row(name, "/tokenize", {"model": NAME, **fields}, headers=JSON, first_turn_only=True)


def detokenize(name: str, /, **fields: Any) -> Row:
    return Row(name, "/detokenize", {"model": NAME, **fields}, headers=JSON, first_turn_only=True)


def count(name: str, /, **fields: Any) -> Row:
    body = {"model": NAME, "messages": [user(TEXT)], **fields}
    return Row(name, "/v1/messages/count_tokens", body, headers=JSON, first_turn_only=True)


ANSWERED: tuple[Row, ...] = (
    tokenize("a prompt", prompt=TEXT),
    tokenize("no model", model=None, prompt=TEXT),
    tokenize("an empty prompt", prompt=""),
    tokenize("return_token_strs", prompt="Hi there", return_token_strs=True),
    tokenize("add_special_tokens", prompt="Hi", add_special_tokens=False),
    tokenize("a chat", messages=[user(TEXT)]),
    tokenize("a chat with tools", messages=[user("Hi")], tools=[TOOL]),
    tokenize("add_generation_prompt", messages=[user("Hi")], add_generation_prompt=False),
    tokenize("continued", messages=[user("Hi"), said("It")], add_generation_prompt=False, continue_final_message=True),
    tokenize("thinking", messages=[user("Hi")], chat_template_kwargs={"enable_thinking": True}),
    tokenize("chat_template", messages=[user("Hi")], chat_template="{{ messages[0].content }}"),
    tokenize("for images", messages=[user("Hi")], media_io_kwargs={"image": {}}, mm_processor_kwargs={}),
    tokenize("more than the model takes", prompt="word " * 5000),
    detokenize("tokens", tokens=[1000, 1001, 1002]),
    detokenize("no model", model=None, tokens=[1000]),
    detokenize("tokens unknown", tokens=[10**7]),
    detokenize("no tokens", tokens=[]),
    count("a message"),
    count("a system prompt", system="Be brief."),
    count("tools", tools=[ANTHROPIC_TOOL], tool_choice={"type": "auto"}),
    count("thinking", thinking={"type": "adaptive"}, output_config={"effort": "low"}),
    count("chat_template_kwargs", chat_template_kwargs={"enable_thinking": True}),
)

REFUSED: tuple[Row, ...] = (
    tokenize("unknown model", model="gpt-0", prompt="Hi"),
    tokenize("neither prompt nor messages"),
    tokenize("prompt is a number", prompt=5),
    tokenize("messages is text", messages="Hi"),
    tokenize("messages are empty", messages=[]),
    tokenize("continued and prompted", messages=[user("Hi")], add_generation_prompt=True, continue_final_message=True),
    detokenize("unknown model", model="gpt-0", tokens=[1]),
    detokenize("tokens is text", tokens="x"),
    detokenize("tokens negative", tokens=[-1]),
    detokenize("without tokens"),
    count("unknown model", model="gpt-0"),
    count("model is empty", model=""),
    count("messages is text", messages="Hi"),
    count("unknown role", messages=[{"role": "wizard", "content": "Hi"}]),
    count("system is a number", system=5),
)
