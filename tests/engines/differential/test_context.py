"""What agreement between the servers proves: the model's answers depend on tokens far away."""

import random

import pytest

from tests.engines.differential.compare import LOGPROB_TOLERANCE
from tests.engines.differential.exchange import JSON, Request
from tests.engines.differential.servers import Pair
from tests.engines.differential.turns import both

pytestmark = pytest.mark.engine

LENGTH = 1500
WATCHED = list(range(5000, 5020))
"""Token ids whose log-probabilities are looked at."""


def answers(servers: Pair, prompt: list[int]) -> list[tuple[list[int], list[float]]]:
    """Of both servers: greedy tokens, and log-probabilities of the first one's alternatives."""
    asked = {"max_tokens": 24, "temperature": 0, "logprobs": 1, "logprob_token_ids": WATCHED, "return_token_ids": True}
    found = []
    for response in both(servers, Request("/v1/completions", {"prompt": prompt, **asked}, JSON)):
        choice = response.json["choices"][0]
        watched = choice["logprobs"]["top_logprobs"][0]
        found.append((choice["token_ids"], [value for _, value in sorted(watched.items())]))
    return found


@pytest.mark.parametrize("back", [1100, 1300, LENGTH])
def test_one_far_away_token_changes_the_answer(servers: Pair, back: int) -> None:
    rng = random.Random(back)
    prompt = [rng.randrange(1000, 40_000) for _ in range(LENGTH)]
    changed = list(prompt)
    changed[-back] = rng.randrange(1000, 40_000)
    for (tokens, values), (other_tokens, other_values) in zip(
        answers(servers, prompt), answers(servers, changed), strict=True
    ):
        assert tokens != other_tokens
        assert len(set(tokens)) > 16
        far = [abs(a - b) for a, b in zip(values, other_values, strict=False)]
        assert max(far) > 25 * LOGPROB_TOLERANCE
