"""What travels between two engines, and that it is never wrong unless somebody trusts a handle."""

from dataclasses import replace

import pytest

from kvflow.connector.wire import KEY, DecodeOrder
from kvflow.types import Reason
from tests.nodes.simulation import COLD, DIRECT, SMALL, Pair, alone, ask, chat, common, job

STORY = " ".join(f"line{i} of the old story" for i in range(20))
OTHER = " ".join(f"verse{i} of another song" for i in range(20))


async def test_two_nodes_answer_as_one_would() -> None:
    pair = Pair()
    first, second = await pair.turn(chat(STORY))
    assert second.text == await alone(chat(STORY))
    assert first.tokens == 1
    assert pair.decode.pulled_tokens == first.prefill.prompt_tokens
    pair.check()


async def test_the_next_turn_pulls_everything_that_is_kept() -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    prompt = chat(STORY, kept.text, "And then?")
    again, answer = await pair.turn(prompt, kept.handle)
    assert answer.text == await alone(prompt)
    assert again.prefill.pulled_tokens == again.prefill.verified_tokens == kept.decode.tokens
    assert again.prefill.reason is None
    assert pair.prefill.pulled_bytes == kept.decode.tokens * SMALL.bytes_per_token
    assert answer.last.cached_tokens == kept.decode.tokens
    pair.check()


@pytest.mark.parametrize(
    "history",
    [
        pytest.param((STORY.replace("line0", "lineX"), "{}", "Go on."), id="edited early"),
        pytest.param((STORY.replace("line15", "lineX"), "{}", "Go on."), id="edited late"),
        pytest.param((STORY, "something else", "Go on."), id="answer replaced"),
        pytest.param((STORY.replace("line9 of the old story ", ""), "{}", "Go on."), id="stripped in the middle"),
        pytest.param((STORY[: len(STORY) // 2],), id="truncated"),
        pytest.param((STORY,), id="regenerated"),
        pytest.param((OTHER, "{}", "Go on."), id="somebody else's"),
    ],
)
async def test_a_rewritten_history_is_reused_up_to_the_first_difference(history: tuple[str, ...]) -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    prompt = chat(*(text.format(kept.text) for text in history))
    again, answer = await pair.turn(prompt, kept.handle)
    assert answer.text == await alone(prompt)
    shared = common(prompt, chat(STORY, kept.text, ""))
    block = SMALL.block_size
    assert shared - block < again.prefill.verified_tokens <= shared
    assert again.prefill.pulled_tokens == again.prefill.verified_tokens
    provable = min(kept.decode.tokens, again.prefill.prompt_tokens // block * block)
    assert again.prefill.reason == (None if again.prefill.verified_tokens >= provable else Reason.DIVERGED)
    pair.check()


async def test_an_engine_that_trusts_its_caller_answers_another_question() -> None:
    pair = Pair(prefill=replace(SMALL, stock=True))
    _, kept = await pair.turn(chat(STORY))
    prompt = chat(STORY.replace("line3", "lineX"), kept.text, "Go on.")
    _, answer = await pair.turn(prompt, kept.handle)
    assert answer.text != await alone(prompt)


async def test_a_handle_that_is_used_twice_reads_what_is_in_the_blocks_by_then() -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    prompt = chat(STORY, kept.text, "Go on.")
    await pair.prefill_leg(prompt, kept.handle)
    for i in range(10):
        await pair.turn(chat(f"{i} {OTHER}"), retain_s=0)
    second, answer = await pair.turn(prompt, kept.handle)
    assert second.prefill.reason is None
    assert answer.text != await alone(prompt)


async def test_a_short_pull_is_not_worth_it_and_lets_the_handle_go() -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    prompt = chat(STORY, kept.text, "Go on.")
    leg = await pair.prefill_leg(prompt, kept.handle, min_pull_tokens=kept.decode.tokens + 1)
    assert (leg.prefill.pulled_tokens, leg.prefill.reason) == (0, Reason.BELOW_THRESHOLD)
    assert pair.decode.occupancy().pinned == 0


async def test_the_local_cache_comes_first() -> None:
    pair = Pair(prefill=replace(SMALL, prefix_caching=True))
    _, kept = await pair.turn(chat(STORY))
    again, answer = await pair.turn(chat(STORY), kept.handle)
    assert again.prefill.local_tokens == (again.prefill.prompt_tokens - 1) // 4 * 4
    assert again.prefill.pulled_tokens == again.prefill.verified_tokens - again.prefill.local_tokens
    assert answer.text == kept.text
    pair.check()


async def test_what_the_local_cache_has_need_not_be_pulled() -> None:
    pair = Pair(prefill=replace(SMALL, prefix_caching=True))
    _, kept = await pair.turn(chat(STORY))
    await pair.prefill_leg(chat(STORY, kept.text, "Go on."))
    leg = await pair.prefill_leg(chat(STORY, kept.text, "Go on, please."), kept.handle)
    assert (leg.prefill.pulled_tokens, leg.prefill.reason) == (0, Reason.LOCAL_CACHE)


async def test_another_salt_shares_nothing() -> None:
    pair = Pair(prefill=replace(SMALL, prefix_caching=True))
    _, kept = await pair.turn(chat(STORY), cache_salt="ours")
    leg = await pair.prefill_leg(chat(STORY), kept.handle, cache_salt="theirs")
    assert (leg.prefill.verified_tokens, leg.prefill.local_tokens) == (0, 0)
    assert leg.prefill.reason == Reason.DIVERGED


async def test_a_direct_turn_ends_with_a_handle_too() -> None:
    pair = Pair(decode=replace(SMALL, prefix_caching=True))
    order = DecodeOrder(retain_s=480, max_pinned_share=0.5).to_wire()
    kept = await ask(pair.decode, job(chat(STORY), {**DIRECT, KEY: order}))
    prompt = chat(STORY, kept.text, "Go on.")
    again, answer = await pair.turn(prompt, kept.handle)
    assert again.prefill.pulled_tokens == kept.decode.tokens
    assert answer.text == await alone(prompt)


async def test_a_handle_without_a_fingerprint_proves_nothing() -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    bare = {k: v for k, v in kept.handle.items() if k != KEY}
    leg = await pair.prefill_leg(chat(STORY), bare)
    assert (leg.prefill.verified_tokens, leg.prefill.pulled_tokens) == (0, 0)
    assert leg.prefill.reason == Reason.DIVERGED


@pytest.mark.parametrize(
    "order", [{"fingerprint": {"tokens": "many"}}, {"min_pull_tokens": "few"}, 5, {"fingerprint": 1}]
)
async def test_an_order_that_makes_no_sense_pulls_nothing(order: object) -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    leg = await ask(pair.prefill, job(chat(STORY), {**kept.handle, **COLD, KEY: order}, max_tokens=1))
    assert leg.prefill.pulled_tokens == 0
    pair.check()


async def test_a_decode_order_that_makes_no_sense_keeps_nothing() -> None:
    pair = Pair()
    answer = await ask(pair.decode, job(chat(STORY), {**DIRECT, KEY: {"retain_s": "long"}}))
    assert answer.decode.refused == "policy"


async def test_a_fingerprint_of_other_blocks_or_of_more_blocks_than_are_offered_proves_nothing() -> None:
    pair = Pair(decode=replace(SMALL, block_size=8))
    _, kept = await pair.turn(chat(STORY))
    assert kept.decode.load_failed
    assert (await pair.prefill_leg(chat(STORY), kept.handle)).prefill.verified_tokens == 0
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    short = {**kept.handle, "remote_block_ids": [kept.handle["remote_block_ids"][0][:3]]}
    assert (await pair.prefill_leg(chat(STORY), short)).prefill.verified_tokens == 0


async def test_a_stock_decode_engine_keeps_nothing_and_says_nothing() -> None:
    pair = Pair(decode=replace(SMALL, stock=True))
    first = await pair.prefill_leg(chat(STORY))
    answer = await pair.decode_leg(chat(STORY), first.handle)
    assert answer.last.params is None
    assert answer.text == await alone(chat(STORY))
    assert pair.decode.occupancy().free == SMALL.blocks


async def test_without_params_there_is_no_connector() -> None:
    pair = Pair()
    answer = await ask(pair.decode, job(chat(STORY)))
    assert answer.last.params is None
    assert answer.text == await alone(chat(STORY))
