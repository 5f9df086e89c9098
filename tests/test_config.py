"""Composing and loading: every combination, where YAML comes from, and what is refused."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from itertools import product
from pathlib import Path

import pytest

from kvflow.config import Config, Device, Format, Kind, PlanConfig, check_servable, compose, conf_dir, load
from kvflow.errors import ConfigError

MODELS = ("smollm2", "qwen3_32b", "glm5")
POLICIES = ("off", "conservative", "balanced", "aggressive", "adaptive")
CLUSTERS = {
    "local": [],
    "simulated": [],
    "p5en_efa": ["cluster.prefill.hosts=[10.0.0.1]", "cluster.decode.hosts=[10.0.0.2]"],
    "external": ["cluster.prefill.urls=[http://10.0.0.1:8000]", "cluster.decode.urls=[http://10.0.0.2:8000]"],
}
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFLOW_CONFIG_PATH", "KVFLOW_POLICY_MODULES"):
        monkeypatch.delenv(name, raising=False)


def loaded(*overrides: str, verb: str = "serve") -> Config:
    return load(compose(verb, overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as e:
        loaded(*overrides)
    assert e.value.exit_code == 2
    return str(e.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(("model", "cluster", "policy"), list(product(MODELS, CLUSTERS, POLICIES)))
def test_every_combination_loads(model: str, cluster: str, policy: str) -> None:
    config = loaded(f"model={model}", f"cluster={cluster}", f"policy={policy}", *CLUSTERS[cluster])
    assert config.cluster.name == cluster
    assert config.policy["name"] == policy


def test_the_groups_have_no_other_options() -> None:
    for group, names in (("model", MODELS), ("cluster", tuple(CLUSTERS)), ("policy", POLICIES)):
        assert {f.stem for f in (conf_dir() / group).glob("*.yaml")} == set(names)


def test_defaults() -> None:
    config = loaded()
    assert type(config) is Config
    assert (config.model.path, config.model.max_model_len) == ("embedded", 8192)
    assert (config.cluster.kind, config.cluster.device) == (Kind.local, Device.auto)
    assert (config.cluster.prefill.replicas, config.cluster.decode.replicas) == (1, 1)
    assert (config.router.host, config.router.port) == ("127.0.0.1", 8000)
    assert config.policy["name"] == "balanced"


def test_plan_has_a_format_and_serve_has_none() -> None:
    config = loaded("format=json", verb="plan")
    assert isinstance(config, PlanConfig)
    assert config.format is Format.json
    assert "format" in refusal("format=json")


def test_every_policy_sets_every_key_of_balanced() -> None:
    def keys(node: object, key: str = "") -> set[str]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        return {key}.union(*(keys(value, f"{key}.{name}") for name, value in items))

    balanced = keys(loaded().policy)
    assert len(balanced) > 30
    assert all(balanced <= keys(loaded(f"policy={p}").policy) for p in POLICIES)


def test_policies_grow_bolder() -> None:
    cautious, balanced, bold = (loaded(f"policy={p}").policy for p in POLICIES[1:4])
    for part, key, sign in (
        ("reuse", "min_pull_tokens", -1),
        ("retention", "ttl_s", 1),
        ("retention", "max_pinned_share", 1),
    ):
        values = [sign * p[part][key] for p in (cautious, balanced, bold)]
        assert values == sorted(set(values))
    assert not loaded("policy=off").policy["reuse"]["enabled"]


def test_a_cluster_chooses_its_connector_and_the_command_line_chooses_last() -> None:
    hosts = CLUSTERS["p5en_efa"]
    assert loaded("cluster=p5en_efa", *hosts).connector.backends == ["LIBFABRIC"]
    assert loaded("cluster=p5en_efa", "connector=nixl", *hosts).connector.backends == ["UCX"]


def test_hydra_leaves_no_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded()
    assert list(tmp_path.iterdir()) == []


# Where YAML comes from


def test_user_directories_add_options_and_do_not_shadow_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(first / "policy/mine.yaml", "defaults: [balanced]\nname: mine\nretention: {ttl_s: 77}\n")
    write(first / "policy/balanced.yaml", "name: shadow\n")
    write(second / "policy/mine.yaml", "name: later\n")
    write(second / "cluster/lab.yaml", "defaults: [local]\nname: lab\nprefill: {replicas: 2}\n")
    monkeypatch.setenv("KVFLOW_CONFIG_PATH", os.pathsep.join((str(first), str(second))))
    config = loaded("policy=mine", "cluster=lab")
    assert (config.policy["name"], config.policy["retention"]["ttl_s"]) == ("mine", 77)
    assert config.policy["reuse"]["min_pull_tokens"] == 64
    assert config.cluster.prefill.replicas == 2
    assert loaded().policy["name"] == "balanced"
    assert "mine" in refusal("policy=nope")


def test_a_user_directory_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLOW_CONFIG_PATH", "/nowhere/at/all")
    assert refusal() == "KVFLOW_CONFIG_PATH: there is no directory /nowhere/at/all."


def _conf_dir_of(package_root: Path) -> str:
    code = "import kvflow.config as c; print(c.conf_dir())"
    result = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(package_root)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=package_root,
    )
    return result.stdout.strip()


def test_configuration_is_found_in_a_plain_checkout(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kvflow", tmp_path / "kvflow", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    assert _conf_dir_of(tmp_path) == str(tmp_path / "conf")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel made of it."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, capture_output=True, check=True)
    return folder


def test_the_source_distribution_holds_all_that_the_readme_names(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("kvflow", "conf", "docs", "examples", "tests"):
        sources = {str(f.relative_to(ROOT)) for s in ("py", "yaml", "md") for f in (ROOT / folder).rglob(f"*.{s}")}
        assert sources
        assert sources <= names
    assert {"Makefile", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "kvflow/py.typed"} <= names


def test_configuration_is_packed_into_the_wheel(tmp_path: Path, built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    packed = tmp_path / "site/kvflow/conf"
    assert (packed.parent / "py.typed").is_file()
    assert _conf_dir_of(tmp_path / "site") == str(packed)
    ours = {f.relative_to(conf_dir()) for f in conf_dir().rglob("*.yaml")}
    assert {f.relative_to(packed) for f in packed.rglob("*.yaml")} == ours


# What is refused


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            "policy=foo",
            "policy=foo: no such option; policy is one of adaptive, aggressive, balanced, conservative, off.",
        ),
        (
            "policy=balancd",
            "policy=balancd: no such option; policy is one of adaptive, aggressive, balanced, conservative, off. ",
        ),
        ("polcy=off", "polcy: no such key; the configuration has model, cluster, connector, policy, router, conv"),
        ("router.prt=1", "router.prt: no such key; router has host, port, "),
        ("+router.prt=1", "router.prt: no such key; router has host, port, "),
        (
            "policy.retention.ttl=4",
            "policy.retention.ttl: no such key; policy.retention has ttl_s, max_pinned_share. Did",
        ),
        ("router.port=abc", "router.port: 'abc' is not a whole number."),
        ("router.port=null", "router.port: takes no null."),
        ("router=3", "router: has keys of its own, and 3 is none."),
        ("cluster.start_timeout_s=soon", "cluster.start_timeout_s: 'soon' is not a number."),
        ("cluster.device=tpu", "cluster.device: 'tpu' is not one of auto, cpu, cuda."),
        ("cluster.prefill.prefix_caching=maybe", "cluster.prefill.prefix_caching: 'maybe' is neither true nor false."),
        ("cluster.prefill.urls=3", "cluster.prefill.urls: takes a list, as in [a,b]."),
        (
            "model.engine_args.seed=1",
            "model.engine_args.seed: not set so far; to add it, write +model.engine_args.seed=",
        ),
        ("cluster.env.A=1", "cluster.env.A: not set so far; to add it, write +cluster.env.A=..."),
        (
            "cluster.engine_args.port=1",
            "cluster.engine_args.port: kvflow sets this itself, from cluster.<role>.port.",
        ),
        (
            "cluster.decode.engine_args.port=1",
            "cluster.decode.engine_args.port: kvflow sets this itself, from cluster.decode.port.",
        ),
        (
            "cluster.engine_args.max-num-seqs=1",
            "cluster.engine_args.max-num-seqs: write vLLM's arguments in snake_case.",
        ),
        (
            "policy=off,balanced",
            "policy: one option, please, not off,balanced; kvflow takes one configuration at a time and cannot sweep "
            "over several.",
        ),
        (
            "router.host=a,b",
            "router.host: one value, please, not a,b; a list is written router.host=[a,b], a text with commas "
            "'router.host=\"a,b\"'.",
        ),
        ("+policy=off", "policy has a choice already; write policy=off."),
        ("+router.port=1", "router.port has a value; write it without +."),
        ("~router.port", "router.port: this key cannot be taken out."),
        ("~policy", "policy: a value is missing."),
        ("router", "router: not an override; write key=value or group=option."),
        ("router.host=${nothing}", "router.host: Interpolation key 'nothing' not found."),
    ],
)
def test_unknown_names_and_wrong_types(overrides: str, sentence: str) -> None:
    assert refusal(*overrides.split()).startswith(sentence)


def test_what_the_refusal_of_commas_suggests_is_accepted() -> None:
    assert loaded('model.name="a,b"').model.name == "a,b"
    assert loaded("connector.backends=[a,b]").connector.backends == ["a", "b"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("cluster.prefill.replicas=0", "cluster.prefill.replicas must be at least 1, got 0."),
        ("cluster.decode.replicas=-2", "cluster.decode.replicas must be at least 1, got -2."),
        ("cluster.decode.replicas=null", "cluster.decode.replicas: a cluster of kind local needs a number."),
        ("cluster.prefill.port=null", "cluster.prefill.port: a cluster of kind local needs one."),
        ("router.port=70000", "router.port must be from 0 to 65535, got 70000."),
        ("router.silence_timeout_s=0", "router.silence_timeout_s must be above 0, got 0."),
        ("router.silence_timeout_s=nan", "router.silence_timeout_s must be above 0, got nan."),
        ("connector.lease_s=5", "connector.lease_s must be at least 6, got 5."),
        ("connector.backends=[]", "connector.backends: give at least one"),
        ("cluster.decode.kv_cache_gib=-1", "cluster.decode.kv_cache_gib must be above 0, got -1."),
        ("conversations.max_count=0", "conversations.max_count must be at least 1, got 0."),
        ("router.port=8100", "cluster.prefill.port: port 8100 is already taken by router.port."),
        ("cluster.prefill.replicas=101", "cluster.decode.port: port 8200 is already taken by cluster.prefill.port."),
        ("cluster.decode.side_channel_port=8200", "cluster.decode.side_channel_port: port 8200 is already taken by "),
        (
            "cluster.decode.port=65535 cluster.decode.replicas=2",
            "cluster.decode.port: counts up to 65536, and ports end",
        ),
        (
            "cluster.prefill.hosts=[a]",
            "cluster.prefill.hosts: only clusters of kind remote take any; this one is local.",
        ),
        (
            "cluster.prefill.urls=[http://a]",
            "cluster.prefill.urls: only clusters of kind external take any; this one is",
        ),
        (
            "cluster=external",
            "cluster.prefill.urls: give at least one, as in cluster.prefill.urls=[http://10.0.0.1:8000].",
        ),
        ("cluster=p5en_efa cluster.decode.hosts=[]", "cluster.decode.hosts: give at least one, as in "),
        (
            "cluster=p5en_efa cluster.decode.replicas=2",
            "cluster.decode.replicas is 2, but cluster.decode.hosts names 1;",
        ),
        (
            "cluster=p5en_efa cluster.decode.hosts=[http://a]",
            "cluster.decode.hosts: http://a is not of the form 10.0.0.1.",
        ),
        ("+model.engine_args.port=1", "model.engine_args.port: kvflow sets this itself, from cluster.<role>.port."),
        (
            "+cluster.prefill.engine_args={max-num-seqs: 1}",
            "cluster.prefill.engine_args.max-num-seqs: write vLLM's arg",
        ),
        (
            "cluster=simulated cluster.decode.kv_blocks=3",
            "cluster.decode.kv_blocks: 3 blocks of 16 tokens hold no request",
        ),
        (
            "model.path=/nowhere/at/all",
            "model.path: /nowhere/at/all is neither an existing directory, nor a Hugging Face",
        ),
    ],
)
def test_values_that_cannot_be(overrides: str, sentence: str) -> None:
    assert refusal(*_split(overrides)).startswith(sentence)


def _split(overrides: str) -> list[str]:
    return [overrides] if overrides.startswith("+") else overrides.split()


@pytest.mark.parametrize(
    ("urls", "sentence"),
    [
        ("[http://a:1,http://a:1/]", "cluster.decode.urls: names an engine twice."),
        ("[a:1]", "cluster.decode.urls: a:1 is not of the form http://10.0.0.1:8000."),
        ("[http://a:1/v1]", "cluster.decode.urls: http://a:1/v1 is not of the form http://10.0.0.1:8000."),
    ],
)
def test_urls_that_are_no_engines(urls: str, sentence: str) -> None:
    assert refusal("cluster=external", "cluster.prefill.urls=[http://b:1]", f"cluster.decode.urls={urls}") == sentence


def test_ports_collide_on_one_host_only() -> None:
    config = loaded("cluster=p5en_efa", "cluster.prefill.hosts=[a,b]", "cluster.decode.hosts=[c]", "router.port=8100")
    assert config.cluster.prefill.hosts == ["a", "b"]
    same = refusal(
        "cluster=p5en_efa", "cluster.prefill.hosts=[a]", "cluster.decode.hosts=[a]", "cluster.decode.port=8100"
    )
    assert same == "cluster.decode.port: port 8100 is already taken by cluster.prefill.port."


def test_a_placeholder_host_can_be_planned_and_not_served() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.prefill\.hosts: prefill\.invalid stands for a host of yours"):
        check_servable(loaded("cluster=p5en_efa"))
    check_servable(loaded("cluster=p5en_efa", *CLUSTERS["p5en_efa"]))
    check_servable(loaded())


def test_a_model_directory(tmp_path: Path) -> None:
    assert (
        refusal(f"model.path={tmp_path}") == f"model.path: {tmp_path} holds no model (there is no config.json in it)."
    )
    config_json = write(tmp_path / "config.json", "{}")
    assert loaded(f"model.path={tmp_path}").model.path == str(tmp_path)
    assert "is a file" in refusal(f"model.path={config_json}")


# Classes named in configuration


def test_classes_come_from_allowed_modules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = refusal("policy.routing.decode.picker._target_=os.system")
    assert sentence.startswith("policy.routing.decode.picker._target_: 'os.system' is not allowed; classes come from ")
    assert "not allowed" in refusal("policy.reuse._target_=kvflow.policiesX.Reuse")
    assert "not allowed" in refusal("policy.reuse._target_=3")
    assert "not allowed" in refusal("+model.engine_args.x={_target_: os.system}")
    monkeypatch.setenv("KVFLOW_POLICY_MODULES", "other, mine.parts")
    assert loaded("policy.reuse._target_=mine.parts.Reuse").policy["reuse"]["_target_"] == "mine.parts.Reuse"
    assert "not allowed" in refusal("policy.reuse._target_=mine.partsX.Reuse")


def test_a_configuration_without_our_schema_is_checked_all_the_same() -> None:
    from omegaconf import OmegaConf

    with pytest.raises(ConfigError, match="nonsense: no such key"):
        load(OmegaConf.create({"nonsense": 1}))
