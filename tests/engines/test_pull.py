"""KV travels back, on two real engines over real NIXL, and no history gets a wrong token."""

import os
import time
from typing import Any

import pytest

from tests.engines.serving import BLOCK, KV_BYTES_PER_TOKEN, MODEL, Answer, Message, Serving, ask, ask_cold
from tests.net import post

pytestmark = pytest.mark.engine

LONG = " ".join(f"Item {i}: the {w} is kept in room {i * 7 % 100}." for i, w in enumerate(["lamp", "map", "key"] * 50))
SHORT = " ".join(f"Item {i}: the {w} is kept in room {i * 3 % 50}." for i, w in enumerate(["cup", "pen", "hat"] * 18))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def common_prefix(serving: Serving, held: list[Message], last: Answer, prompt: list[Message]) -> int:
    """Tokens of `prompt` that the decode node can give after it answered `held` with `last`, to the block."""
    kept = serving.tokens(held) + last.tokens[:-1]
    wanted = serving.tokens(prompt)
    differ = (i for i, (a, b) in enumerate(zip(kept, wanted, strict=False)) if a != b)
    same = next(differ, min(len(kept), len(wanted)))
    return same if same == len(kept) else same - same % BLOCK


class Timed:
    """A streamed turn through the official client, without any conversation id."""

    def __init__(self, serving: Serving, messages: list[Message], **extra: Any) -> None:
        create: Any = serving.client().chat.completions.with_raw_response.create
        began = time.perf_counter()
        raw = create(
            model=MODEL,
            messages=messages,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra or None,
        )
        self.headers, self.text, self.first, self.cached = raw.headers, "", 0.0, 0
        for chunk in raw.parse():
            if chunk.choices and (content := chunk.choices[0].delta.content):
                self.first = self.first or time.perf_counter() - began
                self.text += content
            if chunk.usage and chunk.usage.prompt_tokens_details:
                self.cached = chunk.usage.prompt_tokens_details.cached_tokens or 0

    @property
    def path(self) -> str:
        return str(self.headers["x-kvflow-path"])


def test_three_turns_without_an_id(plain: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [user(f"Remember this list. {LONG}")]
    assert len(plain.tokens(chat)) > 1900
    first = Timed(plain, chat)
    assert first.path == "cold"
    chat += [{"role": "assistant", "content": first.text}, user("Where is the first lamp?")]
    second = Timed(plain, chat)
    cold = Timed(plain, chat, conversation_id="nobody knows this one")
    assert (second.path, cold.path) == ("pull", "cold")
    assert second.text == cold.text
    assert second.cached == int(second.headers["x-kvflow-pulled-tokens"]) > 1900
    chat_3 = [*chat, {"role": "assistant", "content": second.text}, user("And the first map?")]
    third = Timed(plain, chat_3)
    # The second turn's own handle went with the third one; the cold run of the second turn left its own.
    assert third.path == "pull"
    ratio = cold.first / second.first
    with capsys.disabled():
        print(f"\ntime to first token: cold {cold.first:.2f} s, pulled {second.first:.2f} s, ratio {ratio:.1f}")
    assert ratio >= 10


def edited_early(chat: list[Message]) -> list[Message]:
    return [user(chat[0]["content"].replace("cup", "orange", 1)), *chat[1:], user("Go on.")]


def edited_late(chat: list[Message]) -> list[Message]:
    return [*chat[:2], user(chat[2]["content"] + " Say it in French."), chat[3], user("Go on.")]


def stripped_in_the_middle(chat: list[Message]) -> list[Message]:
    return [chat[0], {"role": "assistant", "content": "OK."}, *chat[2:], user("Go on.")]


def truncated(chat: list[Message]) -> list[Message]:
    return chat[:1]


def regenerated(chat: list[Message]) -> list[Message]:
    return chat[:-1]


def branched(chat: list[Message]) -> list[Message]:
    return [*chat[:2], user("Count to ten.")]


EDITS = [edited_early, edited_late, stripped_in_the_middle, truncated, regenerated, branched]


@pytest.mark.parametrize("edit", EDITS)
def test_a_rewritten_history_is_answered_as_if_it_were_new(plain: Serving, edit: Any) -> None:
    name = edit.__name__
    chat = [user(f"Conversation {name}. {SHORT}")]
    first = ask(plain, chat, conversation_id=name)
    chat += [{"role": "assistant", "content": first.text}, user(f"Which room has the pen? {SHORT[:600]}")]
    second = ask(plain, chat, conversation_id=name)
    assert second.path == "pull"
    held = list(chat)
    chat += [{"role": "assistant", "content": second.text}]
    prompt = edit(chat)
    reply = ask(plain, prompt, conversation_id=name)
    expected = common_prefix(plain, held, second, prompt)
    threshold = 64
    assert reply.pulled == (expected if expected >= threshold else 0)
    assert reply.cached == reply.pulled
    assert reply.tokens == ask_cold(plain, prompt).tokens


def test_somebody_elses_id_gives_nothing_but_what_is_common(plain: Serving) -> None:
    theirs = [user(f"A secret: the word is banana. {SHORT}")]
    held = ask(plain, theirs, conversation_id="theirs")
    mine = [user(f"A secret: the word is orange. {SHORT}"), {"role": "assistant", "content": "Yes?"}, user("The word?")]
    reply = ask(plain, mine, conversation_id="theirs")
    assert reply.pulled == common_prefix(plain, theirs, held, mine) == 0
    assert reply.reason == "diverged"
    assert reply.tokens == ask_cold(plain, mine).tokens


def test_the_engines_own_counters_show_the_bytes(plain: Serving) -> None:
    counter = "vllm:nixl_bytes_transferred_sum"
    chat = [user(f"Bytes. {SHORT}")]
    first = ask(plain, chat)
    before = {role: _settled(plain, role, counter, 0) for role in ("prefill", "decode")}
    chat += [{"role": "assistant", "content": first.text}, user("Go on.")]
    second = ask(plain, chat)
    assert second.path == "pull"
    blocks = -(-second.pulled // BLOCK)
    pulled = _settled(plain, "prefill", counter, before["prefill"] + 1) - before["prefill"]
    assert pulled == blocks * BLOCK * KV_BYTES_PER_TOKEN
    assert _settled(plain, "decode", counter, before["decode"] + 1) > before["decode"]


def _settled(serving: Serving, role: str, counter: str, least: float) -> float:
    """Engines publish their counters a moment after the transfer, with their next step."""
    deadline = time.monotonic() + 30
    while (value := serving.metric(role, counter)) < least and time.monotonic() < deadline:
        ask(serving, [user("tick")], max_tokens=2)
    return value


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_of_the_engines_comes_out(plain: Serving, stream: bool) -> None:
    chat = [user(f"Leaks, streamed: {stream}. {SHORT}")]
    forged = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "remote_block_ids": [[1]]}
    for _ in range(2):
        body = {"messages": chat, "max_tokens": 8, "temperature": 0, "stream": stream, "kv_transfer_params": forged}
        status, raw, headers = post(f"{plain.url}/v1/chat/completions", body)
        seen = raw.decode().replace('"kv_transfer_params":null', "") + str(headers)  # as one engine shows it
        assert status == 200
        secrets = ("kv_transfer", "remote_", "block_id", "127.0.0.1", str(plain.ports["cluster.decode.port"]))
        assert not [s for s in secrets if s in seen]
    assert headers["x-kvflow-path"] == "pull"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "gpt-0", "messages": [user("hi")]}, 404, "gpt-0"),
        ({"messages": [user("word " * 9000)]}, 400, "8192"),
        ({"messages": "hi"}, 400, "list"),
        ({"messages": [user("hi")], "temperature": "hot"}, 400, "temperature"),
    ],
)
def test_the_engines_refusals_come_through(plain: Serving, body: dict[str, Any], status: int, says: str) -> None:
    got, raw, headers = post(f"{plain.url}/v1/chat/completions", body)
    assert (got, headers["content-type"]) == (status, "application/json")
    assert says in raw.decode()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="engines share the one CPU that there is")
def test_engines_compute_on_cpus_of_their_own(plain: Serving) -> None:
    """vLLM's connector would have them all compute on the machine's last one."""
    cpus = {role: plain.computes_on(role) for role in ("prefill", "decode")}
    assert cpus["prefill"]
    assert cpus["decode"]
    assert cpus["prefill"].isdisjoint(cpus["decode"])
