"""A model with latent attention, whose KV is one compressed vector per token: it travels back as any other."""

import signal
from collections.abc import Iterator

import pytest

from tests.engines import serving, tiny
from tests.engines.serving import Message, Serving, ask, ask_cold

pytestmark = pytest.mark.engine

LIST = " ".join(f"Item {i}: the lamp is in room {i * 7 % 31}." for i in range(60))


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("latent")
    started = serving.start(
        folder / "serve.log",
        f"model.path={tiny.make(tiny.Kind.LATENT, folder / 'model')}",
        f"model.max_model_len={tiny.MAX_MODEL_LEN}",
        "cluster.prefill.prefix_caching=false",
        "+cluster.engine_args.enforce_eager=true",
    )
    try:
        started.wait_ready()
        yield started
        assert started.stop(signal.SIGTERM) == 0
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


def test_a_history_is_pulled_and_the_answer_that_of_a_cold_run(latent: Serving) -> None:
    chat: list[Message] = [{"role": "user", "content": f"Remember. {LIST}"}]
    for turn in range(3):
        reply = ask(latent, chat)
        assert reply.path == ("pull" if turn else "cold")
        assert reply.cached == reply.pulled
        assert reply.tokens == ask_cold(latent, chat).tokens
        chat += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": f"And then? {LIST[:400]}"}]


def test_an_edited_history_is_reused_up_to_the_edit(latent: Serving) -> None:
    chat: list[Message] = [{"role": "user", "content": f"Edit this. {LIST}"}]
    first = ask(latent, chat, conversation_id="edited")
    edited = [{"role": "user", "content": chat[0]["content"].replace("room 28", "room 99")}]
    edited += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
    second = ask(latent, edited, conversation_id="edited")
    assert 0 < second.pulled < len(latent.tokens(chat))
    assert second.tokens == ask_cold(latent, edited).tokens
