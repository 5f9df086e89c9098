import json
import random
import time

import pytest

from kvflow.connector.fingerprint import MAX_DIGESTS, Fingerprint, Identity, Item, prompt_digest
from kvflow.errors import WireError

PLAIN = Identity()


def ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(n)]


def fingerprint(tokens: list[int], block: int = 16, identity: Identity = PLAIN, most: int = MAX_DIGESTS) -> Fingerprint:
    made = Fingerprint.of(tokens, block, identity, most)
    assert made is not None
    return made


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 160, 161, 1000])
def test_a_prompt_that_begins_with_all_of_it_is_verified_to_the_token(length: int) -> None:
    held = ids(length)
    for more in ([], [1], ids(40, seed=1)):
        assert fingerprint(held).common_prefix(held + more, PLAIN) == length


@pytest.mark.parametrize(("change", "verified"), [(0, 0), (15, 0), (16, 16), (31, 16), (99, 96), (100, 96)])
def test_an_edit_leaves_the_whole_blocks_before_it(change: int, verified: int) -> None:
    held = ids(101)
    edited = [*held[:change], held[change] + 1, *held[change + 1 :]]
    assert fingerprint(held).common_prefix(edited, PLAIN) == verified


def test_what_follows_an_edit_is_never_verified_though_it_be_the_same() -> None:
    held = ids(200)
    assert fingerprint(held).common_prefix([*held[:20], 1, 2, 3, *held[23:]], PLAIN) == 16


@pytest.mark.parametrize(("length", "verified"), [(0, 0), (10, 0), (16, 16), (33, 32), (100, 96)])
def test_a_shorter_prompt_is_verified_to_its_last_whole_block(length: int, verified: int) -> None:
    held = ids(101)
    assert fingerprint(held).common_prefix(held[:length], PLAIN) == verified
    assert fingerprint(held).provable(length) == verified


def test_random_edits_never_verify_too_much_and_lose_less_than_a_span() -> None:
    rng = random.Random(7)
    for round_ in range(300):
        held = [rng.randrange(3) for _ in range(rng.randrange(1, 400))]
        prompt = list(held)
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(prompt) + 1)
            prompt[at : at + rng.randrange(3)] = [rng.randrange(3) for _ in range(rng.randrange(3))]
        made = fingerprint(held, rng.choice([1, 4, 16]), most=rng.choice([3, 20, 512]))
        verified, shared = made.common_prefix(prompt, PLAIN), common(held, prompt)
        assert verified <= shared, round_
        assert verified == len(held) if shared == len(held) else shared - verified < made.stride * made.block_size


@pytest.mark.parametrize(
    "other",
    [
        Identity(cache_salt="other"),
        Identity(lora=("name", "path")),
        Identity(items=(Item("image", 0, 4),)),
        Identity(items=(Item("image", 14, 4),)),
    ],
)
def test_another_identity_verifies_nothing(other: Identity) -> None:
    held = ids(64)
    assert fingerprint(held).common_prefix(held, other) == 0
    assert fingerprint(held, identity=other).common_prefix(held, PLAIN) == 0
    assert fingerprint(held, identity=other).common_prefix(held, other) == 64


def test_names_do_not_run_into_one_another() -> None:
    identities = [Identity(cache_salt="ab"), Identity(lora=("a", "b")), Identity(lora=("ab", "")), Identity()]
    assert len({i.root() for i in identities}) == len(identities)
    assert Identity(cache_salt="").root() == Identity().root()  # vLLM takes an empty salt for none


def test_an_item_counts_where_it_lies() -> None:
    held = ids(128)
    made = fingerprint(held, identity=Identity(items=(Item("cat", 40, 10),)))
    assert made.common_prefix(held, Identity(items=(Item("cat", 40, 10),))) == 128
    assert made.common_prefix(held, Identity(items=(Item("dog", 40, 10),))) == 32
    assert made.common_prefix(held, Identity(items=(Item("cat", 41, 10),))) == 32
    assert made.common_prefix(held, Identity(items=(Item("cat", 40, 10), Item("dog", 100, 5)))) == 96
    assert made.common_prefix(held, Identity(items=(Item("cat", 40, 10), Item("dog", 128, 5)))) == 128


@pytest.mark.parametrize("tokens", [[-1], [2**32], [None], ["x"], [1.5]])
def test_ids_that_are_none_have_no_fingerprint(tokens: list[int]) -> None:
    assert Fingerprint.of(tokens, 16, PLAIN) is None
    assert fingerprint([1]).common_prefix(tokens, PLAIN) == 0
    assert prompt_digest(tokens, PLAIN) is None


def test_its_size_is_bounded_and_its_stride_as_small_as_that_allows() -> None:
    for length, stride in ((512 * 16, 1), (512 * 16 + 16, 2), (1024 * 16, 2), (1_000_000, 123)):
        made = fingerprint(ids(length))
        assert (made.stride, len(made.digests) <= MAX_DIGESTS) == (stride, True)
        assert len(json.dumps(made.to_wire())) < 12_000


def test_it_survives_the_wire() -> None:
    for length in (1, 16, 100, 10_000):
        made = fingerprint(ids(length), most=10)
        assert Fingerprint.from_wire(json.loads(json.dumps(made.to_wire()))) == made


WIRE = fingerprint(ids(100)).to_wire()


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "x",
        {},
        {**WIRE, "block_size": 0},
        {**WIRE, "block_size": "16"},
        {**WIRE, "block_size": 32},
        {**WIRE, "stride": True},
        {**WIRE, "stride": -1},
        {**WIRE, "tokens": 101.0},
        {**WIRE, "tokens": 2**40},
        {**WIRE, "tokens": 1000},
        {**WIRE, "digests": None},
        {**WIRE, "digests": "%%%"},
        {**WIRE, "digests": "AAAA"},
        {**WIRE, "digests": "ü"},
        {**WIRE, "digests": "A" * 10_000_000},
    ],
)
def test_rubbish_is_refused(data: object) -> None:
    with pytest.raises(WireError, match=r"^fingerprint: "):
        Fingerprint.from_wire(data)


def test_two_prompts_have_one_digest_if_and_only_if_they_are_one() -> None:
    prompt = ids(1000)
    assert prompt_digest(prompt, PLAIN) == prompt_digest(list(prompt), Identity())
    others = [prompt[:-1], [*prompt, 0], [*prompt[:-1], 0]]
    assert prompt_digest(prompt, PLAIN) not in [prompt_digest(p, PLAIN) for p in others]
    assert prompt_digest(prompt, PLAIN) != prompt_digest(prompt, Identity(cache_salt="x"))


def test_a_long_prompt_costs_milliseconds() -> None:
    held = ids(100_000)
    started = time.process_time()
    made = fingerprint(held)
    assert made.common_prefix(held, PLAIN) == 100_000
    # About 10 ms; the bound only tells hashing in bulk from a loop over tokens.
    assert time.process_time() - started < 1
