"""Pages of other sites may ask engines, as they may ask vLLM, and nothing that is kvflow's own."""

import pytest

from tests.cluster import cluster, say

SITE = {"origin": "https://example.com"}
PREFLIGHT = {**SITE, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_engines_answer_is_for_every_site(stream: bool) -> None:
    async with cluster() as c:
        answer = await c.chat(say("hello"), headers=SITE, stream=stream)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert (await c.chat(say("hello"))).headers["vary"] == "Origin"


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 200), ("/v1/conversations/c-1", 405)])
async def test_a_browser_that_asks_first_is_told(path: str, status: int) -> None:
    async with cluster() as c, c.session.options(c.url + path, headers=PREFLIGHT) as answer:
        assert answer.status == status
        assert answer.headers.get("access-control-allow-origin") == ("*" if status == 200 else None)
