"""Tenants in configuration: how policies of theirs compose; what is refused of them, of keys, of the admin surface."""

from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvflow.config import Config, check_servable, compose, load
from kvflow.errors import ConfigError
from tests.test_config import loaded, refusal, write

OURS = """
defaults:
  - /policy@acme.policy: aggressive
  - _self_
acme:
  max_turns: 4
  policy:
    reuse:
      min_pull_tokens: 32
beta:
  max_wait_s: 3
"""
ACME = "policy@tenants.acme.policy"
SOURCES = ("KVFLOW_KEYS_FILE", "KVFLOW_KEYS", "KVFLOW_ADMIN_KEY", "KVFLOW_POLICY_MODULES")


@pytest.fixture(autouse=True)
def _ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SOURCES:
        monkeypatch.delenv(name, raising=False)
    write(tmp_path / "mine/tenants/ours.yaml", OURS)
    monkeypatch.setenv("KVFLOW_CONFIG_PATH", str(tmp_path / "mine"))


def reuse(config: Config, tenant: str) -> tuple[str, int]:
    policy = config.tenants[tenant].policy
    return policy["name"], policy["reuse"]["min_pull_tokens"]


def unservable(*overrides: str) -> str:
    config = loaded(*overrides)
    with pytest.raises(ConfigError) as e:
        check_servable(config)
    return str(e.value)


def test_nobody_has_tenants_unless_they_are_named() -> None:
    config = loaded()
    assert config.tenants == {}
    check_servable(config)


def test_a_file_of_tenants_chooses_options_and_changes_single_keys() -> None:
    config = loaded("tenants=ours")
    assert reuse(config, "acme") == ("aggressive", 32)
    assert config.tenants["acme"].policy["retention"]["ttl_s"] == 1800
    assert config.tenants["beta"].policy == {}
    assert (config.tenants["acme"].max_turns, config.tenants["beta"].max_wait_s) == (4, 3)
    assert config.policy["name"] == "balanced"


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([f"+{ACME}=aggressive"], ("aggressive", 16)),
        ([f"+{ACME}=aggressive", "tenants.acme.policy.reuse.min_pull_tokens=32"], ("aggressive", 32)),
        (["tenants=ours", f"{ACME}=conservative"], ("conservative", 32)),
        (["tenants=ours", "tenants.acme.policy.reuse.min_pull_tokens=99", "policy=off"], ("aggressive", 99)),
    ],
)
def test_the_command_line_chooses_for_a_tenant(overrides: list[str], wanted: tuple[str, int]) -> None:
    assert reuse(loaded(*overrides), "acme") == wanted


def test_a_file_outside_the_group_can_spell_the_whole_package(tmp_path: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - /policy@tenants.acme.policy: aggressive\n  - _self_\n"
    write(tmp_path / "mine/tenants/whole.yaml", f"{text}tenants:\n  acme:\n    max_turns: 7\n")
    config = loaded("tenants=whole")
    assert reuse(config, "acme") == ("aggressive", 16)
    assert config.tenants["acme"].max_turns == 7


@pytest.mark.parametrize("chosen", [(f"+{ACME}=off,aggressive",), ("tenants=ours", f"{ACME}=off,aggressive")])
def test_sweeps_compose(chosen: tuple[str, ...]) -> None:
    """As Hydra's own sweeper takes `-m` apart."""
    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(chosen)), None)
    names = [load(compose("serve", overrides)).tenants["acme"].policy["name"] for overrides in batch]
    assert names == ["off", "aggressive"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("tenants=nope", "tenants=nope: no such option; tenants is one of none, ours."),
        ("tenants.acme.max_turns=3", "tenants.acme: there is no such tenant so far; add it in a file of the group "),
        ("+tenants.acme.max_turns=3", "tenants.acme: there is no such tenant so far; add it in a file of the group "),
        (f"{ACME}=off", f"{ACME}: no option is chosen there so far; write +{ACME}=..."),
        (f"tenants=ours +{ACME}=off", f"{ACME} has a choice already; write {ACME}=off."),
        (f"tenants=ours {ACME}=of", "policy=of: no such option; policy is one of adaptive, aggressive, balanced, "),
        (f"tenants=ours {ACME}=off,balanced", f"{ACME}: one option, please, not off,balanced; kvflow takes one "),
        ("tenants=ours tenants.acme.foo=3", "tenants.acme.foo: no such key; tenants.acme has policy, max_turns, "),
        ("tenants=ours tenants.acme.max_turns=x", "tenants.acme.max_turns: 'x' is not a whole number."),
        ("tenants=ours tenants.acme.max_turns=0", "tenants.acme.max_turns must be at least 1, got 0."),
        ("tenants=ours tenants.acme.max_waiting=-1", "tenants.acme.max_waiting must be at least 0, got -1."),
        ("tenants=ours tenants.acme.max_wait_s=-1", "tenants.acme.max_wait_s must be from 0 to 600, got -1."),
        ("tenants=ours tenants.acme.max_wait_s=inf", "tenants.acme.max_wait_s must be from 0 to 600, got inf."),
        ("tenants=ours tenants.acme.max_pinned_share=2", "tenants.acme.max_pinned_share must be from 0 to 1, got 2."),
        (
            "tenants=ours tenants.acme.policy.reuse.min_pull=3",
            "tenants.acme.policy.reuse.min_pull: no such key; tenants.acme.policy.reuse has enabled, min_pull_tokens, ",
        ),
        (
            "tenants=ours tenants.beta.policy.reuse.min_pull_tokens=3",
            "tenants.beta.policy.reuse: the tenant has the server's own policy so far; write +policy@tenants.beta.p",
        ),
        (
            "tenants=ours +tenants.beta.policy.reuse.min_pull_tokens=3",
            "tenants.beta.policy: single keys change an option; choose one, as in +policy@tenants.beta.policy=bal",
        ),
        (
            "tenants=ours tenants.acme.policy.reuse._target_=os.system",
            "tenants.acme.policy.reuse._target_: 'os.system' is not allowed; classes come from ",
        ),
        ("tenants=ours auth.anonymous=true", "auth.anonymous: says something only without tenants."),
        ("auth.trusted_proxies=[10.0.0.1]", "auth.trusted_proxies: says something only with tenants."),
        (
            "tenants=ours auth.trusted_proxies=[10.0.0.1,proxy]",
            "auth.trusted_proxies: proxy is neither an address nor a network such as 10.0.0.0/24.",
        ),
        ("auth.tenant_header=x:y", "auth.tenant_header: 'x:y' cannot be the name of a header."),
        ("auth.tenant_header=X-Api-Key", "auth.tenant_header: X-Api-Key carries keys; name another."),
        ("auth.keys=secret", "auth.keys: no such key; auth has keys_file, anonymous, trusted_proxies, tenant_header."),
        ("+auth.keys=secret", "auth.keys: no such key; auth has keys_file, anonymous, trusted_proxies, tenant_header."),
        ("admin.key=secret", "admin.key: no such key; admin has key_file, port, host, public."),
        ("admin.port=8000", "admin.port: port 8000 is already taken by router.port."),
        ("admin.port=8100", "cluster.prefill.port: port 8100 is already taken by admin.port."),
        ("router.host=0.0.0.0", "router.host: on 0.0.0.0 everybody who reaches this machine would be served without"),
        ("router.host=10.0.0.1", "router.host: on 10.0.0.1 everybody who reaches this machine would be served without"),
    ],
)
def test_what_is_refused(overrides: str, sentence: str) -> None:
    said = refusal(*overrides.split())
    assert said.startswith(sentence)
    assert "secret" not in said


def test_a_name_that_no_header_could_carry(tmp_path: Path) -> None:
    write(tmp_path / "mine/tenants/odd.yaml", "'a b': {max_turns: 1}\n")
    assert refusal("tenants=odd").startswith("tenants.a b: a tenant's name is 1 to 64 letters, digits, dots, dashes")


@pytest.mark.parametrize("overrides", [["auth.anonymous=true"], ["tenants=ours"]])
def test_an_address_that_others_reach_is_a_choice(overrides: list[str]) -> None:
    assert loaded("router.host=0.0.0.0", *overrides).router.host == "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_choice(host: str) -> None:
    assert loaded(f"router.host={host}").router.host == host


# Secrets


def test_tenants_that_nobody_could_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert unservable("tenants=ours").startswith("tenants: nobody could be served, since no tenant has a key; ")
    check_servable(loaded("tenants=ours", "auth.trusted_proxies=[10.0.0.1]"))
    check_servable(loaded("tenants=ours", f"auth.keys_file={tmp_path / 'keys'}"))
    monkeypatch.setenv("KVFLOW_KEYS", "acme: sk-1")
    check_servable(loaded("tenants=ours"))


@pytest.mark.parametrize("variable", ["KVFLOW_KEYS", "KVFLOW_KEYS_FILE"])
def test_keys_without_tenants(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "/some/file")
    said = unservable()
    assert said.startswith(variable)
    assert "there are keys, and no tenants that they could be of" in said


def test_an_admin_port_without_a_key() -> None:
    assert unservable("admin.port=9000") == (
        "admin.port: needs a key, in a file that admin.key_file names or in KVFLOW_ADMIN_KEY."
    )


def test_the_admin_surface_is_public_only_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    public = ("router.host=0.0.0.0", "auth.anonymous=true")
    check_servable(loaded(*public))
    monkeypatch.setenv("KVFLOW_ADMIN_KEY", "secret")
    assert unservable(*public).startswith("router.host: on 0.0.0.0 other machines could reach what changes tenants; ")
    elsewhere = ("admin.port=9000", "admin.host=0.0.0.0")
    assert unservable(*elsewhere).startswith("admin.host: on 0.0.0.0 other machines could reach what changes tenants")
    check_servable(loaded(*public, "admin.public=true"))
    check_servable(loaded(*elsewhere, "admin.public=true"))
    check_servable(loaded(*public, "admin.port=9000"))
    check_servable(loaded())
