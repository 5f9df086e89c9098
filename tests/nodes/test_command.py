"""Command line and environment of an engine."""

import json
from dataclasses import replace

import pytest

from kvflow.nodes.command import Connector, Engine, argument, command, environment, flag
from kvflow.types import Role

CONNECTOR = Connector(
    name="KvflowConnector",
    module_path="kvflow.connector.connector",
    middleware="kvflow.connector.middleware.HandleMiddleware",
    backends=("UCX",),
    buffer_device="cpu",
    lease_s=30,
    load_failure_policy="recompute",
)
ENGINE = Engine(
    role=Role.PREFILL,
    python="python3",
    model="org/model",
    served_name="model",
    max_model_len=4096,
    dtype="float32",
    listen="127.0.0.1",
    port=8100,
    side_channel_host="127.0.0.1",
    side_channel_port=5600,
    connector=CONNECTOR,
)


def test_an_engine_is_started_by_our_entry_with_the_arguments_of_vllm() -> None:
    words = command(ENGINE)
    assert words[:3] == ("python3", "-m", "kvflow.nodes.engine_entry")
    wanted = {
        "model": "org/model",
        "served_model_name": "model",
        "host": "127.0.0.1",
        "port": "8100",
        "max_model_len": "4096",
        "dtype": "float32",
        "middleware": CONNECTOR.middleware,
    }
    assert {name: argument(words, name) for name in wanted} == wanted


@pytest.mark.parametrize(("role", "kv_role"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")])
def test_the_connector_is_bidirectional_on_both_roles_and_leaves_decisions_to_requests(
    role: Role, kv_role: str
) -> None:
    settings = json.loads(argument(command(replace(ENGINE, role=role)), "kv_transfer_config") or "")
    extra = settings.pop("kv_connector_extra_config")
    assert settings == {
        "kv_connector": "KvflowConnector",
        "kv_connector_module_path": "kvflow.connector.connector",
        "kv_role": kv_role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    assert extra == {
        "backends": ["UCX"],
        "bidirectional_kv_xfer": True,
        "kv_lease_duration": 30,
        "kv_recompute_threshold": 0,
    }


def test_what_is_not_decided_is_not_said() -> None:
    words = command(ENGINE)
    for name in ("max_num_seqs", "kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization"):
        assert argument(words, name) is None
    assert argument(words, "tensor_parallel_size") is None


def test_what_is_decided_is_said() -> None:
    engine = replace(
        ENGINE, max_num_seqs=8, kv_cache_bytes=2**31, kv_blocks=100, gpu_memory_share=0.45, tensor_parallel_size=2
    )
    words = command(engine)
    assert argument(words, "max_num_seqs") == "8"
    assert argument(words, "kv_cache_memory_bytes") == "2147483648"
    assert argument(words, "num_gpu_blocks_override") == "100"
    assert argument(words, "gpu_memory_utilization") == "0.45"
    assert argument(words, "tensor_parallel_size") == "2"


def test_prefix_caching_can_be_switched_off() -> None:
    assert "--enable-prefix-caching" in command(ENGINE)
    words = command(replace(ENGINE, prefix_caching=False))
    assert "--no-enable-prefix-caching" in words
    assert "--enable-prefix-caching" not in words


def test_further_arguments_come_last() -> None:
    words = command(replace(ENGINE, args={"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "seed": None}))
    assert words[-3:] == ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ()),
        (True, ("--some-name",)),
        (False, ("--no-some-name",)),
        (3, ("--some-name", "3")),
        (0.5, ("--some-name", "0.5")),
        ("a b", ("--some-name", "a b")),
        (["a", 1], ("--some-name", "a", "1")),
        ({"a": [1, None]}, ("--some-name", '{"a":[1,null]}')),
    ],
)
def test_arguments(value: object, words: tuple[str, ...]) -> None:
    assert flag("some_name", value) == words


def test_the_environment_says_where_handshakes_are_and_that_nobody_is_told() -> None:
    assert environment(ENGINE) == (
        ("DO_NOT_TRACK", "1"),
        ("PYTHONHASHSEED", "0"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"),
        ("VLLM_NO_USAGE_STATS", "1"),
    )


def test_cpus_by_rank() -> None:
    env = dict(environment(replace(ENGINE, cpus=((0, 1, 2, 3, 8), (5, 7)))))
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0-3,8|5,7"
    assert env["UCX_TLS"] == "tcp,self,sm"


def test_gpus_and_offline_models() -> None:
    env = dict(environment(replace(ENGINE, gpus=("2", "3"), offline=True)))
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "UCX_TLS" not in env


def test_the_users_environment_wins() -> None:
    env = environment(replace(ENGINE, env={"PYTHONHASHSEED": "7", "FI_PROVIDER": "efa"}))
    assert ("PYTHONHASHSEED", "7") in env
    assert ("FI_PROVIDER", "efa") in env
    assert list(env) == sorted(env)
