"""`kvflow serve` with tenants, as a process: the admin surface's own address, SIGHUP, and keys that nothing shows."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from kvflow.tenants.keys import hash_of
from tests.net import free_ports, until
from tests.test_config import write
from tests.test_serve import WAIT_S, ended_well, ready, running, serving, unanswered

KEYS = {name: f"the-key-of-{name}" for name in ("acme", "globex")}
ADMIN = "the-admin-key"
TENANTS = [f"+policy@tenants.{name}.policy={policy}" for name, policy in (("acme", "aggressive"), ("globex", "off"))]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(autouse=True)
def keys_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("KVFLOW_KEYS", "KVFLOW_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVFLOW_KEYS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("KVFLOW_ADMIN_KEY", ADMIN)
    return write(tmp_path / "keys", line("acme"))


def line(name: str) -> str:
    return f"{name} {hash_of(KEYS[name])}\n"


def ask(method: str, url: str, key: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    sent = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, sent, method=method), timeout=WAIT_S) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as e:
        with e:
            return e.code, json.loads(e.read())


def chat(url: str, tenant: str) -> int:
    return ask("POST", f"{url}/v1/chat/completions", KEYS[tenant], CHAT)[0]


def kvflow(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvflow", *words], capture_output=True, text=True, check=False)


def test_the_admin_surface_at_an_address_of_its_own(tmp_path: Path) -> None:
    log, (port,) = tmp_path / "log", free_ports(1)
    with serving(log, *TENANTS, f"admin.port={port}") as (process, url):
        admin = f"http://127.0.0.1:{port}"
        until(lambda: ready(url), WAIT_S, log.read_text)
        assert ask("GET", f"{url}/admin/tenants", ADMIN)[0] == 404
        listed = [{"tenant": "acme", "policy": "aggressive"}, {"tenant": "globex", "policy": "off"}]
        assert ask("GET", f"{admin}/admin/tenants", ADMIN) == (200, {"tenants": listed})
        shown = kvflow("policy", "tenant=acme", f"url={admin}")
        assert (shown.returncode, shown.stdout.splitlines()[0], shown.stderr) == (0, "acme: aggressive", "")
        changed = kvflow("policy", "tenant=acme", "policy=conservative", f"url={admin}")
        assert (changed.returncode, changed.stdout.splitlines()[0]) == (0, "acme: conservative")
        assert kvflow("policy", f"url={admin}").stdout == "acme: conservative\nglobex: off\n"
        refused = kvflow("policy", "tenant=acme", "policy=bold", f"url={admin}")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("kvflow: there is no policy 'bold'; there are adaptive, aggressive, ")
        nowhere = kvflow("policy", "tenant=acme", f"url={url}")
        assert (nowhere.returncode, "has no admin surface" in nowhere.stderr) == (1, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert unanswered(port)
    assert ended_well(log)
    assert "the policy of tenant acme: aggressive -> conservative" in log.read_text()


def test_sighup_reads_keys_anew_and_keeps_the_old_where_one_is_wrong(tmp_path: Path, keys_file: Path) -> None:
    log = tmp_path / "log"
    with serving(log, *TENANTS) as (process, url):
        until(lambda: ready(url), WAIT_S, log.read_text)
        assert (chat(url, "acme"), chat(url, "globex")) == (200, 401)
        write(keys_file, line("acme") + line("globex"))
        process.send_signal(signal.SIGHUP)
        until(lambda: "SIGHUP: read anew: 2 keys" in log.read_text(), WAIT_S, log.read_text)
        assert (chat(url, "acme"), chat(url, "globex")) == (200, 200)
        write(keys_file, line("acme") + line("acme").replace("acme", "globex"))
        process.send_signal(signal.SIGHUP)
        until(lambda: "globex has the same key as acme" in log.read_text(), WAIT_S, log.read_text)
        assert "SIGHUP: keys and policies stay as they were: KVFLOW_KEYS_FILE" in log.read_text()
        write(keys_file, "")
        process.send_signal(signal.SIGHUP)
        until(lambda: "holds no key" in log.read_text(), WAIT_S, log.read_text)
        assert (chat(url, "acme"), chat(url, "globex")) == (200, 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert ended_well(log)
    for secret in (*KEYS.values(), *map(hash_of, KEYS.values()), ADMIN, hash_of(ADMIN)):
        assert secret not in log.read_text()


def test_a_header_cannot_make_anybody_a_trusted_proxy(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, *TENANTS, "auth.trusted_proxies=[10.0.0.1]") as (_, url):
        until(lambda: ready(url), WAIT_S, log.read_text)
        forged = {"x-forwarded-for": "10.0.0.1", "x-kvflow-tenant": "acme"}
        assert ask("POST", f"{url}/v1/chat/completions", "no-key", CHAT, **forged)[0] == 401


def test_an_option_from_config_dir_can_be_given(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write(tmp_path / "mine/policy/patient.yaml", "defaults: [balanced]\nname: patient\nretention: {ttl_s: 900}\n")
    write(tmp_path / "mine/policy/torn.yaml", "defaults: [balanced]\nretention: {ttl_s: 9\n")
    with serving(log, *TENANTS, "--config-dir", str(tmp_path / "mine")) as (_, url):
        until(lambda: ready(url), WAIT_S, log.read_text)
        place = f"{url}/admin/tenants/acme/policy"
        status, answer = ask("PUT", place, ADMIN, {"policy": "patient"})
        assert (status, answer["policy"], "900 s" in answer["words"][1]) == (200, "patient", True)
        status, answer = ask("PUT", place, ADMIN, {"policy": "torn"})
        assert (status, "torn.yaml, line" in answer["error"]["message"]) == (409, True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (line("acme") + "acme the-key\n", "line 2: what follows the name is no hash"),
        ("initech " + hash_of("x"), "there is no tenant 'initech'; there are acme, globex."),
        (line("acme") + line("acme").replace("acme", "globex"), "line 2: globex has the same key as acme."),
        (None, "cannot read"),
        ("# acme has none yet\n", "holds no key, so that nobody could be served."),
        (line("acme") + f"globex {hash_of(ADMIN)}", "tenant globex has the admin key; give it one of its own."),
    ],
)
def test_keys_that_are_wrong_start_nothing(tmp_path: Path, keys_file: Path, text: str | None, sentence: str) -> None:
    keys_file.unlink()
    if text is not None:
        write(keys_file, text)
    log, (port,) = tmp_path / "log", free_ports(1)
    with running(log, "-m", "kvflow", "serve", "cluster=simulated", *TENANTS, f"router.port={port}") as process:
        assert process.wait(WAIT_S) == 2
    said = log.read_text()
    assert said.startswith("kvflow: KVFLOW_KEYS_FILE")
    assert sentence in said
    assert said.count("\n") == 1
    assert "the-key" not in said


@pytest.mark.parametrize("words", [["--cfg", "job"], ["--cfg", "all"], ["--help"], ["format=json"], []])
def test_nothing_that_is_printed_shows_a_key(words: list[str]) -> None:
    result = kvflow("plan", *TENANTS, *words)
    assert (result.returncode, result.stderr) == (0, "")
    for secret in (*KEYS.values(), *map(hash_of, KEYS.values()), ADMIN, hash_of(ADMIN)):
        assert secret not in result.stdout
