from random import Random

from benchmarks.reuse.ideal import AllKnowing

BLOCK = 4


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def by_definition(held: list[list[int]], prompt: list[int]) -> int:
    """Turn by turn: whole blocks of what is common, or all that the turn holds."""
    found = [common(h, prompt) for h in held]
    exact = [n if n == len(h) else n // BLOCK * BLOCK for n, h in zip(found, held, strict=True)]
    return min(max(exact, default=0), len(prompt) - 1)


def test_nothing_is_reusable_at_first() -> None:
    assert AllKnowing(BLOCK).reusable([1, 2, 3, 4, 5]) == 0


def test_a_conversation_that_goes_on_reuses_all_but_the_answers_last_token() -> None:
    cache = AllKnowing(BLOCK)
    cache.add([1, 2, 3, 4, 5], [6, 7, 8])
    assert cache.reusable([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 7


def test_what_differs_counts_in_whole_blocks() -> None:
    cache = AllKnowing(BLOCK)
    cache.add([1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert cache.reusable([1, 2, 3, 4, 5, 6, 7, 0, 0, 0]) == 4


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    cache = AllKnowing(BLOCK)
    cache.add([1, 2, 3, 4], [5])
    assert cache.reusable([1, 2, 3, 4]) == 3


def test_an_earlier_end_counts_although_a_later_turn_passed_it() -> None:
    cache = AllKnowing(BLOCK)
    cache.add([1, 2], [3, 4])
    cache.add([1, 2, 3, 4, 5, 6], [7, 8])
    assert cache.reusable([1, 2, 3, 9, 9]) == 3


def test_turns_that_had_not_ended_do_not_count() -> None:
    cache = AllKnowing(BLOCK)
    cache.add([1, 2, 3, 4, 5], [6, 7])
    before = len(cache)
    cache.add([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11])
    cache.add([1, 2, 3, 4, 5, 6], [0])
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]
    assert (cache.reusable(prompt, before), cache.reusable(prompt)) == (6, 10)


def test_it_is_what_its_definition_says() -> None:
    """Few different tokens, so that sequences part everywhere."""
    random = Random(1)
    cache, held = AllKnowing(BLOCK), list[list[int]]()
    moments = []
    for _ in range(600):
        prompt = random.choice(held)[: random.randint(1, 40)] if held and random.random() < 0.8 else []
        prompt = [*prompt, *random.choices([1, 2], k=random.randint(1, 12))]
        answer = random.choices([1, 2], k=random.randint(1, 12))
        assert cache.reusable(prompt) == by_definition(held, prompt)
        moments.append((len(cache), prompt))
        cache.add(prompt, answer)
        held.append(prompt + answer[:-1])
    for before, prompt in moments:
        assert cache.reusable(prompt, before) == by_definition(held[:before], prompt)
