"""The example of `docs/write-a-policy.md`: a user's class, in a user's directory, named in a user's YAML."""

import os
import subprocess
import sys
from pathlib import Path as File

import pytest

from kvflow.config import compose, load
from kvflow.errors import ConfigError
from kvflow.graph import build
from kvflow.policies import Policy
from kvflow.policies.conformance import faults
from kvflow.types import Path, Plan, Reason
from tests.policies.build import decode, handle, prefill, turn, view

ROOT = File(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_policy"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("KVFLOW_CONFIG_PATH", str(EXAMPLE))
    monkeypatch.setenv("KVFLOW_POLICY_MODULES", "acme_policies")


def steady(*overrides: str) -> Policy:
    return build(load(compose("serve", ["policy=steady", "cluster=simulated", *overrides]))).policy


def planned(policy: Policy, tokens: int, in_flight: int) -> Plan:
    asked = turn(handle=handle(tokens=tokens), prompt_tokens=tokens + 100, new_tokens=100)
    return policy.plan(asked, view(prefill(in_flight=in_flight), decode()))


@pytest.mark.parametrize(
    ("tokens", "in_flight", "path"),
    [(511, 0, Path.COLD), (512, 0, Path.PULL), (511, 1, Path.PULL), (63, 1, Path.COLD)],
)
def test_the_users_class_takes_the_decision(tokens: int, in_flight: int, path: Path) -> None:
    plan = planned(steady(), tokens, in_flight)
    assert (plan.path, plan.reason) == (path, None if path is Path.PULL else Reason.BELOW_THRESHOLD)


def test_its_keys_are_overridden_like_ours() -> None:
    policy = steady("policy.reuse.idle_min_pull_tokens=100", "policy.retention.ttl_s=60")
    plan = planned(policy, 100, 0)
    assert (plan.path, plan.retain_s) == (Path.PULL, 60)
    assert "from 100 on" in policy.describe()[0]


def test_its_own_checks_refuse_what_it_cannot_take() -> None:
    with pytest.raises(ConfigError) as e:
        steady("policy.reuse.idle_min_pull_tokens=-1")
    assert str(e.value) == "policy.reuse.idle_min_pull_tokens must be at least 0, got -1"


def test_it_keeps_every_rule() -> None:
    assert faults(steady()) == []


@pytest.mark.parametrize("allowed", ["", "acme", "other_policies,acme_policies.sub"])
def test_a_module_that_is_not_allowed_is_refused(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLOW_POLICY_MODULES", allowed)
    with pytest.raises(ConfigError) as e:
        steady()
    assert str(e.value).startswith("policy.reuse._target_: 'acme_policies.Steady' is not allowed; classes come from kv")


def test_the_configuration_cannot_allow_itself_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFLOW_POLICY_MODULES")
    with pytest.raises(ConfigError, match="is not allowed"):
        load(compose("serve", ["policy.reuse._target_=os.system"]))


def test_the_page_shows_what_the_files_hold() -> None:
    text = (ROOT / "docs" / "write-a-policy.md").read_text()
    shown = text.partition("The class, in ")[2].partition("Python must find")[0]
    files = [EXAMPLE / "acme_policies.py", EXAMPLE / "policy" / "steady.yaml"]
    held = {line.strip() for file in files for line in file.read_text().splitlines()}
    lines = [line.strip() for line in shown.splitlines() if line.startswith("    ")]
    assert len(lines) > 15
    assert set(lines) <= held


def test_the_command_of_the_page_shows_it() -> None:
    folder = str(EXAMPLE.relative_to(ROOT))
    env = {**os.environ, "PYTHONPATH": folder, "KVFLOW_POLICY_MODULES": "acme_policies"}
    del env["KVFLOW_CONFIG_PATH"]
    words = [sys.executable, "-m", "kvflow", "plan", "--config-dir", folder, "policy=steady", "cluster=simulated"]
    result = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "from 512 on where the prefill node has nothing to do" in result.stdout
