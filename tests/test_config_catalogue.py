"""All options of the group `policy`, as tenants can be given them."""

from pathlib import Path

import pytest

from kvflow.config import PolicyOption, policy_options
from kvflow.graph import build
from tests.test_config import POLICIES, loaded, write


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFLOW_CONFIG_PATH", "KVFLOW_POLICY_MODULES", "KVFLOW_KEYS", "KVFLOW_KEYS_FILE", "KVFLOW_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def options(*overrides: str, dirs: tuple[Path, ...] = ()) -> dict[str, PolicyOption]:
    return {o.name: o for o in policy_options(loaded(*overrides), dirs)}


def test_every_shipped_option_as_it_is_written() -> None:
    found = options("policy=aggressive", "policy.retention.ttl_s=77")
    assert set(found) == set(POLICIES)
    for name, option in found.items():
        assert option.node == loaded(f"policy={name}").policy


def test_options_of_the_users_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "env/policy/patient.yaml", "defaults: [balanced]\nretention: {ttl_s: 900}\n")
    own = tmp_path / 'a "b", c'
    write(own / "policy/slow.yaml", 'defaults: [balanced]\nretention: {ttl_s: "${router.silence_timeout_s}"}\n')
    monkeypatch.setenv("KVFLOW_CONFIG_PATH", str(tmp_path / "env"))
    found = options("router.silence_timeout_s=321", dirs=(own,))
    assert set(found) == {*POLICIES, "patient", "slow"}
    patient, slow = found["patient"].node, found["slow"].node
    assert patient
    assert slow
    assert (patient["name"], patient["retention"]["ttl_s"]) == ("patient", 900)
    assert slow["retention"]["ttl_s"] == 321


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("defaults: [nope]\n", "policy/nope: there is no such configuration."),
        ("defaults: [mine]\n", "an option contains itself; what its defaults name must have another name."),
        ("retention: &r {again: *r}\n", "an option contains itself; "),
        ("retention: {ttl_s: 9\n", "line 2: this is no YAML: "),
        ("name: bare\n", "policy._target_ is missing; extend an option that has it, as in defaults: [balanced]."),
        ("defaults: [balanced]\nreuse: {_target_: os.system}\n", "policy.reuse._target_: 'os.system' is not allowed; "),
        ("defaults: [balanced]\nretention: {ttl_s: '${no}'}\n", "policy.retention.ttl_s: Interpolation key 'no' not "),
        ("defaults: [balanced]\nretention: {ttl_s: 3}\n", "policy.retention.ttl_s must be 0 or at least 10 seconds"),
        ("defaults: [balanced]\nreuse: {min: 3}\n", "policy: "),
    ],
)
def test_an_option_that_is_broken_hinders_no_other(tmp_path: Path, text: str, problem: str) -> None:
    write(tmp_path / "policy/mine.yaml", text)
    _, control = build(loaded("cluster=simulated"), dirs=(tmp_path,)).open()
    assert set(control.catalogue.policies) == set(POLICIES)
    assert problem in control.catalogue.broken["mine"]


def test_a_tenants_policy_is_named_where_one_of_its_values_is_bad() -> None:
    with pytest.raises(Exception, match=r"^tenants\.acme\.policy\.retention\.ttl_s must be 0 or at least 10 seconds"):
        build(loaded("+policy@tenants.acme.policy=off", "tenants.acme.policy.retention.ttl_s=3"))
