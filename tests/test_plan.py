"""What `kvflow plan` shows."""

import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from kvflow.config import Format
from kvflow.graph import Graph
from kvflow.plan import as_json, show, write
from tests.test_config import CLUSTERS
from tests.test_graph import LAPTOP, graph


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLOW_CACHE", str(tmp_path))


def page(g: Graph, width: int) -> str:
    """As on a terminal of `width` columns."""
    console = Console(width=width, force_terminal=True, no_color=True, highlight=False, color_system=None)
    with console.capture() as capture:
        write(console, g)
    return capture.get()


def commands(text: str) -> list[list[str]]:
    """The command lines of a plan, as a shell would take them apart."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.startswith(("DO_NOT_TRACK=", "A="))]


@pytest.mark.parametrize("cluster", ["local", "p5en_efa"])
def test_command_lines_can_be_pasted_into_a_shell(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    g = graph(f"cluster={cluster}", "model=qwen3_32b", "+cluster.env.A='two words'", *CLUSTERS[cluster])
    show(g, Format.table)
    wanted = [[*(f"{k}={v}" for k, v in s.env), *s.command] for s in g.specs]
    assert commands(capsys.readouterr().out) == wanted
    assert commands(page(g, 80)) == wanted


def test_words_fit_the_terminal_and_are_not_wrapped_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    g = graph("cluster=simulated", machine=LAPTOP)
    for width in (80, 100, 120):
        assert max(map(len, page(g, width).splitlines())) <= width
    show(g, Format.table)
    piped = capsys.readouterr().out.splitlines()
    assert all(f"  {sentence}" in piped for sentence in g.policy.describe())
    assert not any(line.endswith(" ") for line in piped)


def test_every_node_with_its_addresses_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    show(graph("cluster.prefill.replicas=2"), Format.table)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["router", "router", "http://127.0.0.1:8000/v1", "this", "machine"] in rows
    assert ["prefill-1", "prefill", "http://127.0.0.1:8101", "127.0.0.1:5601", "CPU", "1"] in rows
    assert ["decode-0", "decode", "http://127.0.0.1:8200", "127.0.0.1:5700", "CPU", "2"] in rows


def test_connector_settings_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show(graph("connector.lease_s=42"), Format.table)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kv_lease_duration", "42"] in rows
    assert ["bidirectional_kv_xfer", "true"] in rows
    assert ["backends", "UCX"] in rows


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("local", "fetches the model, starts these nodes and stops them"),
        ("p5en_efa", "Start each node on its host with its command line below"),
        ("external", "These engines are not kvflow's to start"),
        ("simulated", "within its own process"),
    ],
)
def test_what_serve_would_do(cluster: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(graph(f"cluster={cluster}", *CLUSTERS[cluster]), Format.table)
    assert words in capsys.readouterr().out


def test_json_says_everything_about_a_node() -> None:
    g = graph("cluster=p5en_efa", "model=glm5", "policy=off", *CLUSTERS["p5en_efa"])
    plan = json.loads(json.dumps(as_json(g)))
    assert plan["model"] == {"name": "zai-org/GLM-5-FP8", "path": "zai-org/GLM-5-FP8"}
    assert plan["cluster"] == {"name": "p5en_efa", "kind": "remote"}
    assert plan["router"] == {"url": "http://127.0.0.1:8000", "host": "127.0.0.1", "port": 8000}
    assert plan["policy"] == {"name": "off", "words": g.policy.describe()}
    node = plan["nodes"][1]
    spec = g.specs[1]
    assert (node["name"], node["role"], node["url"]) == ("decode-0", "decode", "http://10.0.0.2:8200")
    assert (node["host"], node["port"]) == ("10.0.0.2", 8200)
    assert node["side_channel"] == {"host": "10.0.0.2", "port": 5700}
    assert node["command"] == list(spec.command)
    assert node["env"] == dict(spec.env)
    assert shlex.split(node["command_line"]) == [*(f"{k}={v}" for k, v in spec.env), *spec.command]
    assert node["connector"]["kv_role"] == "kv_consumer"
    assert node["connector"]["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]


def test_json_of_engines_that_already_run() -> None:
    node = as_json(graph("cluster=external", *CLUSTERS["external"]))["nodes"][0]
    assert (node["host"], node["port"]) == ("10.0.0.1", 8000)
    assert (node["command"], node["command_line"], node["connector"], node["side_channel"]) == ([], "", None, None)


def test_what_would_become_of_typical_turns(capsys: pytest.CaptureFixture[str]) -> None:
    g = graph("cluster=simulated", "policy=aggressive")
    show(g, Format.table)
    out = capsys.readouterr().out
    assert "guesses until measured" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["-", "512", "cold"] in [row[:3] for row in rows]
    assert ["4096", "32", "direct"] in [row[:3] for row in rows]
    (everybody,) = as_json(g)["tenants"]
    assert everybody["name"] == "default"
    turns = {(t["history"], t["new"]): t for t in everybody["turns"]}
    assert turns[4096, 512]["path"] == "pull"
    assert 0 < turns[4096, 32]["first_token_s"] < turns[4096, 512]["first_token_s"]
    assert max(h + n for h, n in turns) <= g.config.model.max_model_len
    assert {t["path"] for t in as_json(graph("policy=off"))["tenants"][0]["turns"]} == {"cold"}


def test_tenants_with_policies_limits_and_where_keys_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVFLOW_KEYS_FILE", "KVFLOW_KEYS", "KVFLOW_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    words = ("cluster=simulated", "+policy@tenants.acme.policy=off", "+policy@tenants.beta.policy=balanced")
    limits = ("tenants.acme.max_turns=4", "tenants.acme.max_pinned_share=0.2")
    show(graph(*words, *limits), Format.table)
    assert "keys     none yet" in capsys.readouterr().out
    monkeypatch.setenv("KVFLOW_KEYS", "acme a-secret")
    monkeypatch.setenv("KVFLOW_ADMIN_KEY", "another-secret")
    g = graph(*words, *limits)
    show(g, Format.table)
    out = capsys.readouterr().out
    assert "secret" not in out + json.dumps(as_json(g))
    rows = [line.split() for line in out.splitlines()]
    assert ["keys", "KVFLOW_KEYS"] in rows
    assert ["acme", "off", "4", "16", "5", "s", "20%"] in rows
    assert "http://127.0.0.1:8000/admin, with the key from KVFLOW_ADMIN_KEY" in out
    assert "Reuse: never; every turn is computed from its first token." in out
    acme, _ = as_json(g)["tenants"]
    assert (acme["name"], acme["policy"]["name"], acme["limits"]["max_turns"]) == ("acme", "off", 4)
    assert max(map(len, page(g, 80).splitlines())) <= 80
