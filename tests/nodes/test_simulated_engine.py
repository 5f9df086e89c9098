"""Memory, time and limits of one simulated engine."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from kvflow.connector.wire import KEY
from kvflow.errors import ConfigError
from kvflow.nodes.simulated import Engine, Fabric, Settings, Speed
from kvflow.nodes.simulated.run import Job
from kvflow.types import Reason, Role
from tests.nodes.simulation import COLD, SMALL, Answer, EagerClock, Pair, alone, ask, chat, job, settle

STORY = " ".join(f"line{i} of the old story" for i in range(20))
TINY = replace(SMALL, blocks=128)
"""Room for one request of the full length, or for four stories."""


def single(settings: Settings = SMALL, **fields: Any) -> Engine:
    return Engine(role=Role.DECODE, fabric=Fabric(), settings=settings, **fields)


# Retention


async def test_a_kept_turn_is_pinned_until_its_time_is_up() -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY), retain_s=60)
    report = kept.decode
    assert (report.retained, report.retain_s) == (True, 60)
    assert pair.decode.occupancy().pinned == -(-report.tokens // SMALL.block_size)
    pair.clock.advance(59)
    assert pair.decode.occupancy().pinned > 0
    pair.clock.advance(1)
    assert pair.decode.occupancy().pinned == 0
    assert pair.decode.occupancy().free == SMALL.blocks
    pair.check()


@pytest.mark.parametrize(("retain_s", "share"), [(0, 0.5), (480, 0)])
async def test_what_is_not_ordered_is_not_kept(retain_s: float, share: float) -> None:
    pair = Pair()
    _, answer = await pair.turn(chat(STORY), retain_s=retain_s, share=share)
    assert (answer.decode.retained, answer.decode.refused) == (False, "policy")
    assert set(answer.handle) == {KEY}
    assert pair.decode.occupancy().free == SMALL.blocks


async def test_pins_never_exceed_the_share_and_nobody_waits() -> None:
    pair = Pair(clock=EagerClock())
    limit = int(0.3 * SMALL.blocks)
    refused = []
    for i in range(12):
        _, answer = await pair.turn(chat(f"{i} {STORY}"), share=0.3)
        refused.append(answer.decode.refused)
        assert pair.decode.occupancy().pinned <= limit
        assert answer.decode.blocks == {
            "free": pair.decode.occupancy().free,
            "pinned": pair.decode.occupancy().pinned,
            "total": SMALL.blocks,
            "reserve": SMALL.longest,
        }
    assert refused[0] is None
    assert refused[-1] == "share"
    pair.check()


async def test_room_for_the_longest_request_is_never_pinned() -> None:
    pair = Pair(decode=replace(SMALL, blocks=SMALL.longest + 10))
    _, answer = await pair.turn(chat(STORY), share=1.0)
    assert answer.decode.refused == "share"


@pytest.mark.parametrize("prompt", [STORY, STORY.replace("line0", "lineX")])
async def test_a_pin_ends_when_the_handle_is_used_pulled_or_not(prompt: str) -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    await pair.prefill_leg(chat(prompt), kept.handle)
    assert pair.decode.occupancy().pinned == 0
    pair.check()


async def test_the_blocks_that_two_turns_share_count_once() -> None:
    pair = Pair(decode=replace(SMALL, prefix_caching=True))
    _, one = await pair.turn(chat(STORY))
    before = pair.decode.occupancy().pinned
    await pair.turn(chat(STORY))
    assert before < pair.decode.occupancy().pinned < before + 10  # the answer lies in blocks of its own
    await pair.prefill_leg(chat(STORY), one.handle)
    assert pair.decode.occupancy().pinned == before
    pair.check()


async def test_dropped_pins_leave_handles_that_lie() -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    pair.decode.drop_pins()
    assert pair.decode.occupancy().pinned == 0
    for i in range(10):
        await pair.turn(chat(f"{i} {STORY}"), retain_s=0)
    prompt = chat(STORY, kept.text, "Go on.")
    _, answer = await pair.turn(prompt, kept.handle)
    assert answer.text != await alone(prompt)
    pair.check()


# Transfers that fail


async def assert_recomputed(pair: Pair, kept: Answer) -> None:
    prompt = chat(STORY, kept.text, "Go on.")
    first, answer = await pair.turn(prompt, kept.handle)
    assert (first.prefill.reason, first.prefill.pulled_tokens) == (Reason.TRANSFER_FAILED, 0)
    assert answer.text == await alone(prompt)
    assert not answer.decode.load_failed
    pair.check()


async def test_a_handle_about_to_expire_is_declined() -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY), retain_s=60)
    pair.clock.advance(56)
    await assert_recomputed(pair, kept)


async def test_an_engine_that_is_gone_cannot_be_read() -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    pair.decode.leave()
    pair.decode = Engine(role=Role.DECODE, fabric=pair.fabric, settings=SMALL, clock=pair.clock)
    pair.decode.join()
    await assert_recomputed(pair, kept)


async def test_transfers_fail_on_demand() -> None:
    pair = Pair()
    _, kept = await pair.turn(chat(STORY))
    pair.prefill.faults.failed_transfers = 1
    await assert_recomputed(pair, kept)
    assert pair.prefill.transfers == 0


async def test_a_decode_node_that_cannot_load_computes_and_says_so() -> None:
    pair = Pair()
    pair.decode.faults.failed_transfers = 1
    _, answer = await pair.turn(chat(STORY))
    assert answer.decode.load_failed
    assert answer.text == await alone(chat(STORY))
    _, again = await pair.turn(chat(STORY))
    assert not again.decode.load_failed


async def test_handles_are_dropped_on_demand() -> None:
    pair = Pair()
    pair.prefill.faults.drop_handles = pair.decode.faults.drop_handles = True
    first = await pair.prefill_leg(chat(STORY))
    assert "remote_block_ids" not in first.handle
    answer = await pair.decode_leg(chat(STORY), {"do_remote_prefill": False, "do_remote_decode": False})
    assert "remote_block_ids" not in answer.handle


# Waiting


async def test_a_request_waits_for_blocks_until_a_pin_ends() -> None:
    pair = Pair(prefill=TINY)
    for i in range(4):
        await pair.prefill_leg(chat(f"{i} {STORY}"))
    waiting = asyncio.create_task(pair.prefill_leg(chat(f"9 {STORY}")))
    await settle()
    assert pair.prefill.occupancy().waiting == 1
    pair.clock.advance(SMALL.lease_s)
    assert (await waiting).tokens == 1
    assert pair.prefill.occupancy().waiting == 0
    pair.check()


async def test_first_come_first_served() -> None:
    pair = Pair(prefill=TINY)
    for i in range(4):
        await pair.prefill_leg(chat(f"{i} {STORY}"))
    big = asyncio.create_task(pair.prefill_leg(chat(f"9 {STORY}")))
    await settle()
    small = asyncio.create_task(pair.prefill_leg(chat("hi")))
    await settle()
    assert not small.done()
    pair.clock.advance(SMALL.lease_s)
    await asyncio.gather(big, small)
    pair.check()


async def test_a_request_that_stops_waiting_lets_the_next_one_through() -> None:
    pair = Pair(prefill=TINY)
    for i in range(4):
        await pair.prefill_leg(chat(f"{i} {STORY}"))
    big = asyncio.create_task(pair.prefill_leg(chat(f"9 {STORY}")))
    await settle()
    small = asyncio.create_task(pair.prefill_leg(chat("hi")))
    await settle()
    big.cancel()
    assert (await small).tokens == 1
    await asyncio.gather(big, return_exceptions=True)
    pair.check()


async def test_a_lease_runs_out_unless_its_reader_has_come() -> None:
    pair = Pair(decode=replace(SMALL, max_running=1))
    await pair.prefill_leg(chat(f"lost {STORY}"))
    first = await pair.prefill_leg(chat(STORY))
    async with aclosing(pair.decode.generate(job(chat("busy")))) as busy:
        await anext(busy)
        late = asyncio.create_task(pair.decode_leg(chat(STORY), first.handle))
        await settle()
        pair.clock.advance(SMALL.lease_s + 1)
        assert pair.prefill.occupancy().leased == 1
    assert (await late).text == await alone(chat(STORY))
    assert pair.prefill.occupancy().leased == 0
    pair.check()


async def test_no_more_requests_run_than_may() -> None:
    engine = single(replace(SMALL, max_running=2))
    streams = [engine.generate(job(chat(f"{i}"))) for i in range(3)]
    for stream in streams[:2]:
        await anext(stream)
    third = asyncio.create_task(anext(streams[2]))
    await settle()
    assert (engine.occupancy().running, engine.occupancy().waiting) == (2, 1)
    await streams[0].aclose()
    assert (await third).prompt_tokens > 0
    for stream in streams[1:]:
        await stream.aclose()
    assert engine.occupancy().running == 0


# Aborts


async def test_an_abandoned_request_frees_what_it_used() -> None:
    pair = Pair()
    first = await pair.prefill_leg(chat(STORY))
    async with aclosing(pair.decode.generate(job(chat(STORY), first.handle))) as steps:
        await anext(steps)
        assert pair.decode.occupancy().free < SMALL.blocks
    assert pair.decode.occupancy().free == pair.prefill.occupancy().free == SMALL.blocks
    pair.check()


async def test_a_request_abandoned_while_it_waits_lets_its_source_go() -> None:
    pair = Pair(decode=replace(SMALL, max_running=1))
    first = await pair.prefill_leg(chat(STORY))
    async with aclosing(pair.decode.generate(job(chat("busy")))) as busy:
        await anext(busy)
        waiting = asyncio.create_task(pair.decode_leg(chat(STORY), first.handle))
        await settle()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert pair.prefill.occupancy().leased == 0
    pair.check()


async def test_a_rejected_request_lets_its_source_go() -> None:
    pair = Pair()
    first = await pair.prefill_leg(chat(STORY))
    pair.decode.reject(first.handle)
    assert pair.prefill.occupancy().leased == 0


async def test_every_block_is_accounted_for_whatever_happens() -> None:
    pair = Pair(prefill=replace(TINY, prefix_caching=True), decode=replace(TINY, prefix_caching=True))
    rng = random.Random(7)
    handles: list[dict[str, Any]] = []

    async def one(i: int) -> None:
        prompt = chat(f"{rng.randrange(6)} {STORY[: rng.randrange(600)]}")
        handle = handles.pop() if handles and rng.random() < 0.7 else None
        pair.prefill.faults.failed_transfers = int(rng.random() < 0.2)
        first = await pair.prefill_leg(prompt, handle)
        if rng.random() < 0.1:
            return
        second = await pair.decode_leg(prompt, first.handle, retain_s=30 * i)
        if second.decode.retained:
            handles.append(second.handle)

    for i in range(60):
        tasks = [asyncio.create_task(one(i)) for _ in range(3)]
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            tasks[0].cancel()
        for _ in range(20):
            await settle()
            pair.check()
            pair.clock.advance(10)
        await asyncio.gather(*tasks, return_exceptions=True)
    pair.clock.advance(10_000)
    assert pair.prefill.occupancy().free == pair.decode.occupancy().free == TINY.blocks
    pair.check()


# The prefix cache


async def test_the_prefix_cache_finds_whole_blocks_and_never_the_last_token() -> None:
    engine = single(replace(SMALL, prefix_caching=True))
    first = await ask(engine, job(chat(STORY)))
    again = await ask(engine, job(chat(STORY)))
    assert first.last.cached_tokens == 0
    assert again.last.cached_tokens == (again.last.prompt_tokens - 1) // 4 * 4
    assert again.text == first.text
    assert engine.occupancy().cached > 0
    assert engine.check() == []


@pytest.mark.parametrize(("caching", "salt"), [(False, None), (True, "other")])
async def test_nothing_is_found_without_the_cache_or_under_another_salt(caching: bool, salt: str | None) -> None:
    engine = single(replace(SMALL, prefix_caching=caching))
    await ask(engine, job(chat(STORY)))
    assert (await ask(engine, job(chat(STORY), cache_salt=salt))).last.cached_tokens == 0


async def test_what_is_taken_for_others_is_no_longer_found() -> None:
    engine = single(replace(TINY, prefix_caching=True))
    await ask(engine, job(chat(STORY)))
    for i in range(4):
        await ask(engine, job(chat(f"{i} {STORY}")))
    assert (await ask(engine, job(chat(STORY)))).last.cached_tokens == 0
    assert engine.check() == []


# Answers


async def test_the_answer_ends_by_itself_or_at_the_limit() -> None:
    whole = await ask(single(), job(chat(STORY)))
    assert (whole.last.finish, whole.last.stop_reason) == ("stop", None)
    words = len(whole.text.split())
    assert SMALL.min_answer <= words <= SMALL.max_answer
    assert whole.tokens == words + 1
    cut = await ask(single(), job(chat(STORY), max_tokens=3))
    assert (cut.last.finish, cut.tokens, cut.text) == ("length", 3, " ".join(whole.text.split()[:3]))


async def test_an_answer_can_be_kept_from_ending() -> None:
    settings = replace(SMALL, min_answer=2, max_answer=4)
    at_least = await ask(single(settings), job(chat(STORY), min_tokens=20))
    assert (at_least.tokens, at_least.last.finish) == (21, "stop")
    all_of_them = await ask(single(settings), job(chat(STORY), ignore_eos=True, max_tokens=30))
    assert (all_of_them.tokens, all_of_them.last.finish) == (30, "length")


async def test_stop_strings_are_cut_off_and_never_shown_in_part() -> None:
    whole = await alone(chat(STORY))
    stop = whole[7:20]
    engine = single()
    async with aclosing(engine.generate(job(chat(STORY), stop=(stop,)))) as steps:
        answer = [step async for step in steps]
    assert "".join(s.text for s in answer) == whole[:7]
    assert (answer[-1].finish, answer[-1].stop_reason) == ("stop", stop)
    assert engine.check() == []


async def test_a_stop_token_ends_the_answer() -> None:
    async with aclosing(single().generate(job(chat(STORY)))) as steps:
        third = [step async for step in steps][2].token
    answer = await ask(single(), job(chat(STORY), stop_token_ids=frozenset({third})))
    assert (answer.tokens, answer.last.finish, answer.last.stop_reason) == (3, "stop", third)


async def test_a_prompt_of_the_full_length_fits() -> None:
    engine = single(replace(SMALL, blocks=SMALL.longest))
    answer = await ask(engine, Job(request_id="r", prompt=tuple(range(511)), max_tokens=1))
    assert answer.last.finish == "length"


# Time


async def test_a_pull_takes_the_time_of_a_transfer_and_not_of_a_prefill() -> None:
    speed = Speed(prefill=100, transfer=10_000, prefill_s=0.5, transfer_s=0.1)
    clock = EagerClock()
    pair = Pair(prefill=replace(SMALL, speed=speed), clock=clock)
    _, kept = await pair.turn(chat(STORY))
    prompt = chat(STORY, kept.text, "Go on.")
    clock.slept = 0
    cold = await pair.prefill_leg(prompt)
    tokens = cold.last.prompt_tokens
    assert clock.slept == pytest.approx(0.5 + tokens / 100)
    clock.slept = 0
    pulled = (await pair.prefill_leg(prompt, kept.handle)).prefill.pulled_tokens
    assert clock.slept == pytest.approx(0.1 + pulled / 10_000 + 0.5 + (tokens - pulled) / 100)


async def test_words_come_at_the_speed_of_decoding() -> None:
    clock = EagerClock()
    answer = await ask(single(replace(SMALL, speed=Speed(decode=4)), clock=clock), job(chat(STORY)))
    assert clock.slept == pytest.approx(answer.tokens / 4)


async def test_one_prompt_is_computed_at_a_time() -> None:
    pair = Pair(prefill=replace(SMALL, speed=Speed(prefill_s=1)))
    legs = [asyncio.create_task(ask(pair.prefill, job(chat(f"{i}"), COLD, max_tokens=1))) for i in range(2)]
    await settle()
    pair.clock.advance(1)
    await settle()
    assert [leg.done() for leg in legs] == [True, False]
    pair.clock.advance(1)
    await asyncio.gather(*legs)


# Settings


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Settings(block_size=0), "simulated.block_size must be at least 1, got 0"),
        (lambda: Settings(max_answer=3), "simulated.max_answer must be at least 8, got 3"),
        (lambda: Settings(lease_s=0), "simulated.lease_s must be above 0, got 0"),
        (lambda: Speed(prefill=-1), "simulated.speed.prefill must be at least 0, got -1"),
        (
            lambda: Settings(blocks=10, block_size=16, max_model_len=200),
            "simulated.blocks must be at least 13 for max_model_len=200, got 10",
        ),
    ],
)
def test_bad_settings_are_refused_by_key(build: Any, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        build()
    assert str(e.value) == message
