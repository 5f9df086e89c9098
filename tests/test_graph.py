"""From a configuration to nodes and a policy, without starting anything."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvflow.config import compose, load
from kvflow.errors import ConfigError
from kvflow.graph import Graph, build
from kvflow.launchers.machine import Machine
from kvflow.nodes.base import NodeSpec
from kvflow.nodes.command import argument
from kvflow.policies import Policy
from kvflow.types import Role
from tests.test_config import CLUSTERS, MODELS, POLICIES

LAPTOP = Machine(cores=((0,), (1,), (2,), (3,)), vllm_for_cpus=True)
SERVER = Machine(cores=tuple((i,) for i in range(64)), gpus=tuple(map(str, range(8))))


def graph(*overrides: str, machine: Machine = LAPTOP) -> Graph:
    return build(load(compose("serve", overrides)), machine)


def value(spec: NodeSpec, name: str) -> str | None:
    return argument(spec.command, name)


def env(spec: NodeSpec) -> Mapping[str, str]:
    return dict(spec.env)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVFLOW_POLICY_MODULES", raising=False)


def test_one_of_each_on_a_laptop(tmp_path: Path) -> None:
    g = graph()
    assert [(s.name, s.role, s.url) for s in g.specs] == [
        ("prefill-0", Role.PREFILL, "http://127.0.0.1:8100"),
        ("decode-0", Role.DECODE, "http://127.0.0.1:8200"),
    ]
    assert (g.prefill, g.decode) == (g.specs[:1], g.specs[1:])
    assert isinstance(g.policy, Policy)
    assert g.starts_nodes
    assert g.needs_embedded_model
    assert g.log_dir == tmp_path / "cache/logs"
    assert not (tmp_path / "cache").exists()


def test_a_laptop_has_cpus() -> None:
    for spec, cpus in zip(graph().specs, ("0-1", "2-3"), strict=True):
        assert value(spec, "dtype") == "float32"
        assert value(spec, "kv_cache_memory_bytes") == str(2 * 2**30)
        assert value(spec, "host") == "127.0.0.1"
        assert env(spec)["VLLM_CPU_OMP_THREADS_BIND"] == cpus
        assert env(spec)["HF_HUB_OFFLINE"] == "1"
        assert "CUDA_VISIBLE_DEVICES" not in env(spec)
        assert json.loads(value(spec, "kv_transfer_config") or "")["kv_buffer_device"] == "cpu"


def test_a_server_has_gpus() -> None:
    first, second = graph(machine=SERVER).specs
    assert (env(first)["CUDA_VISIBLE_DEVICES"], env(second)["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    for spec in (first, second):
        assert value(spec, "dtype") == "auto"
        assert value(spec, "kv_cache_memory_bytes") is None
        assert value(spec, "gpu_memory_utilization") is None
        assert "VLLM_CPU_OMP_THREADS_BIND" not in env(spec)
        assert json.loads(value(spec, "kv_transfer_config") or "")["kv_buffer_device"] == "cuda"


def test_tensor_parallel_engines_stand_side_by_side() -> None:
    sizes = ("cluster.prefill.tensor_parallel_size=2", "cluster.decode.tensor_parallel_size=4")
    on_gpus = graph(*sizes, machine=SERVER)
    assert [env(s)["CUDA_VISIBLE_DEVICES"] for s in on_gpus.specs] == ["0,1", "2,3,4,5"]
    on_cpus = graph(*sizes[:1], "cluster.device=cpu", machine=SERVER)
    assert [env(s)["VLLM_CPU_OMP_THREADS_BIND"] for s in on_cpus.specs] == ["0-19|21-40", "42-61"]


def test_engines_that_share_a_gpu_share_its_memory() -> None:
    g = graph("cluster.prefill.replicas=2", machine=Machine(cores=((0,),), gpus=("0",)))
    assert [env(s)["CUDA_VISIBLE_DEVICES"] for s in g.specs] == ["0"] * 3
    assert {value(s, "gpu_memory_utilization") for s in g.specs} == {"0.3"}


@pytest.mark.parametrize(
    ("overrides", "machine", "sentence"),
    [
        (["cluster.device=cuda"], LAPTOP, "cluster.device=cuda: this machine shows no NVIDIA GPU; take cpu or auto."),
        (
            ["cluster.device=cuda"],
            Machine(cores=((0,),), gpus=("0",), vllm_for_cpus=True),
            "cluster.device=cuda: the installed vLLM is the build for CPUs; take cpu or auto.",
        ),
        (
            ["cluster.decode.tensor_parallel_size=16"],
            SERVER,
            "cluster.decode.tensor_parallel_size is 16, and this machine has 8 GPUs.",
        ),
    ],
)
def test_what_the_machine_does_not_have(overrides: list[str], machine: Machine, sentence: str) -> None:
    with pytest.raises(ConfigError) as e:
        graph(*overrides, machine=machine)
    assert str(e.value) == sentence


def test_gpus_are_left_alone_where_vllm_cannot_use_them() -> None:
    spec = graph(machine=Machine(cores=((0,), (1,)), gpus=("0",), vllm_for_cpus=True)).specs[0]
    assert "VLLM_CPU_OMP_THREADS_BIND" in env(spec)


def test_replicas_count_their_ports_up() -> None:
    g = graph("cluster.prefill.replicas=3", "cluster.decode.replicas=2")
    assert [(s.name, s.url[-4:], env(s)["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for s in g.specs] == [
        ("prefill-0", "8100", "5600"),
        ("prefill-1", "8101", "5601"),
        ("prefill-2", "8102", "5602"),
        ("decode-0", "8200", "5700"),
        ("decode-1", "8201", "5701"),
    ]


def test_pools_are_set_apart() -> None:
    prefill, decode = graph(
        "cluster.prefill.prefix_caching=false", "cluster.decode.kv_blocks=200", "cluster.decode.kv_cache_gib=0.5"
    ).specs
    assert "--no-enable-prefix-caching" in prefill.command
    assert "--enable-prefix-caching" in decode.command
    assert (value(prefill, "num_gpu_blocks_override"), value(decode, "num_gpu_blocks_override")) == (None, "200")
    assert value(decode, "kv_cache_memory_bytes") == str(2**29)


def test_arguments_and_environment_of_the_pool_win_over_those_of_the_cluster_and_the_model() -> None:
    prefill, decode = graph(
        "model=qwen3_32b",
        "+cluster.engine_args.seed=1",
        "+cluster.decode.engine_args.seed=2",
        "+cluster.decode.engine_args.reasoning_parser=null",
        "+cluster.env.A=all",
        "+cluster.decode.env.A=mine",
    ).specs
    assert (value(prefill, "seed"), value(decode, "seed")) == ("1", "2")
    assert (value(prefill, "reasoning_parser"), value(decode, "reasoning_parser")) == ("qwen3", None)
    assert (env(prefill)["A"], env(decode)["A"]) == ("all", "mine")


def test_a_model_from_the_hub_may_be_asked_for_there_and_one_on_the_disk_is_not(tmp_path: Path) -> None:
    hub = graph("model=qwen3_32b")
    assert value(hub.specs[0], "model") == "Qwen/Qwen3-32B"
    assert "HF_HUB_OFFLINE" not in env(hub.specs[0])
    assert not hub.needs_embedded_model
    (tmp_path / "config.json").write_text("{}")
    disk = graph(f"model.path={tmp_path}", "model.name=mine").specs[0]
    assert (value(disk, "model"), value(disk, "served_model_name")) == (str(tmp_path), "mine")
    assert env(disk)["HF_HUB_OFFLINE"] == "1"


def test_the_published_deployment() -> None:
    g = graph("cluster=p5en_efa", "model=glm5", *CLUSTERS["p5en_efa"])
    assert not g.starts_nodes
    assert [s.url for s in g.specs] == ["http://10.0.0.1:8100", "http://10.0.0.2:8200"]
    for spec, host in zip(g.specs, ("10.0.0.1", "10.0.0.2"), strict=True):
        wanted = {
            "model": "zai-org/GLM-5-FP8",
            "tensor_parallel_size": "8",
            "max_model_len": "32768",
            "max_num_seqs": "8",
            "dtype": "bfloat16",
            "host": "0.0.0.0",
        }
        assert {name: value(spec, name) for name in wanted} == wanted
        assert env(spec)["FI_PROVIDER"] == "efa"
        assert env(spec)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == host
        settings = json.loads(value(spec, "kv_transfer_config") or "")
        assert settings["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]
        assert settings["kv_buffer_device"] == "cuda"
        assert spec.command[0] == "python3"


def test_other_hosts_are_not_given_what_only_this_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen/Qwen3-32B").mkdir(parents=True)
    for override, model in (
        ("model=smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("model=qwen3_32b", "Qwen/Qwen3-32B"),
        (f"model.path={tmp_path}", str(tmp_path)),
    ):
        g = graph("cluster=p5en_efa", override, *CLUSTERS["p5en_efa"])
        assert {value(s, "model") for s in g.specs} == {model}
        assert not any("HF_HUB_OFFLINE" in env(s) for s in g.specs)
        assert not g.needs_embedded_model


def test_several_engines_on_one_host_stand_side_by_side() -> None:
    g = graph(
        "cluster=p5en_efa",
        "cluster.prefill.hosts=[a,a]",
        "cluster.decode.hosts=[b]",
        "cluster.prefill.tensor_parallel_size=4",
    )
    assert [(s.url, env(s).get("CUDA_VISIBLE_DEVICES")) for s in g.specs] == [
        ("http://a:8100", "0,1,2,3"),
        ("http://a:8101", "4,5,6,7"),
        ("http://b:8200", None),
    ]


def test_engines_that_already_run_have_no_command() -> None:
    g = graph("cluster=external", "cluster.prefill.urls=[http://a:1/,https://b]", "cluster.decode.urls=[http://c:2]")
    assert [(s.name, s.url, s.command, s.env) for s in g.specs] == [
        ("prefill-0", "http://a:1", (), ()),
        ("prefill-1", "https://b", (), ()),
        ("decode-0", "http://c:2", (), ()),
    ]
    assert not g.starts_nodes
    assert not g.needs_embedded_model


def test_simulated_nodes_are_kvflows_own() -> None:
    g = graph("cluster=simulated", "cluster.decode.replicas=2", "cluster.decode.kv_blocks=700", "connector.lease_s=9")
    assert g.simulates_nodes
    assert [(s.model, s.blocks, s.lease_s) for s in map(g.simulated, Role)] == [(g.model, 4096, 9), (g.model, 700, 9)]
    assert [s.url for s in g.decode] == ["http://127.0.0.1:8200", "http://127.0.0.1:8201"]
    assert g.starts_nodes
    assert not g.needs_embedded_model


def test_the_routers_settings() -> None:
    settings = graph("router.max_body_mb=1", "router.silence_timeout_s=7", "conversations.max_count=5").settings
    assert (settings.max_body_bytes, settings.silence_timeout_s, settings.max_conversations) == (1_000_000, 7, 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_built_with_the_values_that_are_configured(policy: str) -> None:
    g = graph(f"policy={policy}", "policy.retention.max_pinned_share=0.125")
    assert g.policy.name == policy
    assert getattr(g.policy.retention, "max_pinned_share", None) == 0.125


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("policy.retention.ttl_s=-1", "policy.retention.ttl_s must be"),
        ("policy.retention.max_pinned_share=1.5", "policy.retention.max_pinned_share must be from 0 to 1, got 1.5"),
        ("policy.retention.ttl_s=soon", "policy.retention.ttl_s must be a number, got 'soon'"),
        ("policy.reuse.min_pull_tokens=-1", "policy.reuse.min_pull_tokens must be at least 0, got -1"),
        ("policy.reuse.enabled=7", "policy.reuse.enabled must be true or false, got 7"),
        ("+policy.reuse.colour=red", "policy"),
        ("policy.reuse._target_=kvflow.policies.reuse.Nothing", "policy"),
        ("policy._target_=kvflow.policies.retention.Fixed", "policy"),
        ("policy.retention=3", "policy.retention must be a Retention, got int"),
    ],
)
def test_policies_that_cannot_be(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as e:
        graph(override)
    assert str(e.value).startswith(sentence)
    assert "\n" not in str(e.value)


def test_a_policy_part_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_parts.py").write_text(
        "from kvflow.policies import Keep\n"
        "class Never:\n"
        "    def __init__(self, reason): self.reason = reason\n"
        "    def keep(self, turn, decode): return Keep(seconds=0, max_pinned_share=0)\n"
        "    def describe(self): return self.reason\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KVFLOW_POLICY_MODULES", "users_parts")
    g = graph("~policy.retention", "+policy.retention={_target_: users_parts.Never, reason: because}")
    assert g.policy.retention.describe() == "because"


# vLLM's own parser


@pytest.fixture(scope="module")
def accepted() -> Iterator[Any]:
    """A question to vLLM, in a process of its own: importing it takes seconds and leaves traces."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.parse_with_vllm"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout

        def ask(words: tuple[str, ...]) -> dict[str, Any]:
            assert process.stdin
            assert process.stdout
            process.stdin.write(json.dumps(words) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer

        yield ask
        process.stdin.close()


@pytest.mark.parametrize(("cluster", "model", "policy"), list(product(("p5en_efa", "local"), MODELS, POLICIES)))
def test_vllm_accepts_every_argument(accepted: Any, cluster: str, model: str, policy: str) -> None:
    g = graph(f"cluster={cluster}", f"model={model}", f"policy={policy}", *CLUSTERS[cluster])
    for spec in g.specs:
        answer = accepted(spec.command[3:])
        assert answer.get("error") is None
        assert answer["model"] == value(spec, "model")
        assert answer["kv_transfer_config"] == json.loads(value(spec, "kv_transfer_config") or "")
        assert answer["middleware"] == ["kvflow.connector.middleware.HandleMiddleware"]
        assert answer["enable_prefix_caching"] is True


def test_vllm_would_say_so_if_it_did_not(accepted: Any) -> None:
    words = graph().specs[0].command[3:]
    assert "unrecognized" in accepted((*words, "--no-such-argument"))["error"]
    assert (
        "tool call parser" in accepted((*words, "--tool-call-parser", "hermez", "--enable-auto-tool-choice"))["error"]
    )
    assert "reasoning" in accepted((*words, "--reasoning-parser", "glm4500"))["error"]
