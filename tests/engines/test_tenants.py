"""Two tenants on the same real engines, whose prefix caches are on."""

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvflow.tenants.keys import hash_of
from tests.engines.serving import BLOCK, MODEL, Message, Serving, start
from tests.net import post

pytestmark = pytest.mark.engine

NAMES = ("acme", "globex")
SECRET = "The code of the vault is " + " ".join(f"{n * 7919 % 9973}" for n in range(160)) + "."


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys.txt"
    keys.write_text("".join(f"{name} {hash_of(f'key-of-{name}')}\n" for name in NAMES))
    policies = [f"+policy@tenants.{name}.policy=balanced" for name in NAMES]
    serving = start(folder / "serve.log", f"auth.keys_file={keys}", *policies)
    try:
        serving.wait_ready()
        yield serving
        assert serving.stop(signal.SIGTERM) == 0
    finally:
        if serving.process.poll() is None:
            serving.process.kill()
            serving.process.wait()


class Turn:
    def __init__(self, raw: bytes, headers: dict[str, str]) -> None:
        body = json.loads(raw)
        self.text: str = body["choices"][0]["message"]["content"]
        self.path = headers["x-kvflow-path"]
        self.pulled = int(headers["x-kvflow-pulled-tokens"])
        self.cached = int(body["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)


def ask(serving: Serving, tenant: str, messages: Sequence[Message], **body: Any) -> Turn:
    asked = {"model": MODEL, "messages": list(messages), "max_tokens": 16, "temperature": 0, **body}
    headers = {"authorization": f"Bearer key-of-{tenant}"}
    status, raw, answered = post(f"{serving.url}/v1/chat/completions", asked, headers)
    assert status == 200, raw
    return Turn(raw, answered)


def test_anothers_history_brings_neither_text_nor_speed(tenants: Serving) -> None:
    opening = [{"role": "user", "content": SECRET}]
    first = ask(tenants, "globex", opening, conversation_id="vault")
    messages = [*opening, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Repeat it."}]

    for same_id in ({}, {"conversation_id": "vault"}):
        theirs = ask(tenants, "acme", messages, **same_id)
        assert (theirs.path, theirs.pulled) == ("cold", 0)
        # The second time it is acme's own that is found.
        assert (theirs.cached > 0) == bool(same_id)

    own = ask(tenants, "globex", messages, conversation_id="vault")
    assert own.pulled + own.cached > 2 * BLOCK
    assert own.text == theirs.text


def test_without_a_key_engines_are_not_asked(tenants: Serving) -> None:
    before = tenants.metric("decode", "vllm:request_success_total")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-kvflow-tenant": "acme"}):
        status, raw, _ = post(f"{tenants.url}/v1/chat/completions", {"messages": []}, headers)
        assert status == 401, raw
    assert tenants.metric("decode", "vllm:request_success_total") == before


def test_keys_are_in_no_log(tenants: Serving) -> None:
    logs = [tenants.log, *Path(tenants.log.parent / tenants.log.stem).iterdir()]
    for log in logs:
        text = log.read_text(errors="replace")
        for name in NAMES:
            assert f"key-of-{name}" not in text
            assert hash_of(f"key-of-{name}")[7:] not in text
