"""vLLM's real scheduler around kvflow's connector, with the worker's part played by the test. Starts nothing."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
MAX_LEN = 256
LONGEST = MAX_LEN // BLOCK
TOKEN = 7
"""What the model answers, always."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 50_000,
    "max_position_embeddings": 2 * MAX_LEN,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


class Engines:
    """Makes engines for one model, of which only the configuration exists."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(_LLAMA))
        self._folder = str(folder)
        init_none_hash(sha256)

    def prefill(self, **settings: Any) -> "Engine":
        return Engine(self._config("kv_producer", settings), **settings)

    def decode(self, **settings: Any) -> "Engine":
        return Engine(self._config("kv_consumer", settings), **settings)

    def _config(self, role: str, settings: dict[str, Any]) -> VllmConfig:
        overlapping = settings.pop("overlapping", False)
        config = self._checked(role, settings)
        config.scheduler_config.async_scheduling = overlapping  # vLLM's default, but not on CPUs
        return config

    def _checked(self, role: str, settings: dict[str, Any]) -> VllmConfig:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return VllmConfig(
                model_config=ModelConfig(
                    model=self._folder, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=MAX_LEN
                ),
                cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=settings.pop("caching", False)),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=8,
                    max_num_batched_tokens=settings.pop("batch", 512),
                    max_model_len=MAX_LEN,
                    enable_chunked_prefill=True,
                    is_encoder_decoder=False,
                ),
                kv_transfer_config=KVTransferConfig(
                    kv_connector="KvflowConnector",
                    kv_connector_module_path="kvflow.connector.connector",
                    kv_role=role,
                    kv_load_failure_policy="recompute",
                    kv_connector_extra_config={"bidirectional_kv_xfer": settings.pop("bidirectional", True)},
                ),
                device_config=DeviceConfig("cpu"),
            )


class Engine:
    def __init__(self, config: VllmConfig, *, blocks: int = 60, window: int | None = None) -> None:
        """`blocks` can be had by requests; a `window` in tokens adds a group of sliding-window layers."""
        self.blocks = blocks
        config.cache_config.num_gpu_blocks = blocks + 1
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
        if window:
            groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=window)))
        self.scheduler = (AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        self.meta: Any = None
        """What the last step told the worker."""
        self.prefills: dict[str, Any] = {}
        """What vLLM reports of each request's prompt, by request."""
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def add(
        self, name: str, tokens: Sequence[int] | None, params: dict[str, Any] | None, *, answer: int = 1, **more: Any
    ) -> Request:
        arguments = {"ignore_eos": True, **more.pop("sampling", {})}
        sampling = SamplingParams(max_tokens=answer, extra_args={"kv_transfer_params": params}, **arguments)
        embeds = torch.zeros(40, 64) if tokens is None else None
        ids = None if tokens is None else list(tokens)
        request = Request(name, ids, sampling, None, prompt_embeds=embeds, block_hasher=self._hasher, **more)
        self.scheduler.add_request(request)
        return request

    def step(
        self, *, sent: Sequence[str] = (), received: Sequence[str] = (), failed: Sequence[str] = ()
    ) -> dict[str, dict[str, Any] | None]:
        """One step; `kv_transfer_params` of the requests that ended in it. The worker reports what is given.

        Every failed receive is also a received one, as from vLLM's worker.
        """
        return self.end(self.begin(), sent=sent, received=received, failed=failed)

    def begin(self) -> Any:
        """A step of its own begins, whether or not the one before has ended."""
        planned = self.scheduler.schedule()
        self.meta = planned.kv_connector_metadata
        return planned

    def end(
        self, planned: Any, *, sent: Sequence[str] = (), received: Sequence[str] = (), failed: Sequence[str] = ()
    ) -> dict[str, dict[str, Any] | None]:
        report = KVConnectorOutput(
            finished_sending=set(sent), finished_recving={*received, *failed}, failed_recving=set(failed)
        )
        output = self.scheduler.update_from_output(planned, self._compute(planned, report))
        reported = [o for outputs in output.values() for o in outputs.outputs if o.prefill_stats is not None]
        self.prefills |= {o.request_id: o.prefill_stats for o in reported}
        ended = [o for outputs in output.values() for o in outputs.outputs if o.finish_reason is not None]
        return {o.request_id: o.kv_transfer_params for o in ended}

    def run(self, name: str, most: int = 100) -> dict[str, Any] | None:
        """Steps until the request has ended."""
        for _ in range(most):
            if name in (ended := self.step()):
                return ended[name]
        raise AssertionError(f"{name} did not end within {most} steps")

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def cached(self) -> int:
        """Blocks that the prefix cache can find."""
        return sum(b.block_hash is not None for b in self.scheduler.kv_cache_manager.block_pool.blocks)

    @property
    def idle(self) -> bool:
        """Whether vLLM's engine loop would now sleep until the next request."""
        return not self.scheduler.has_requests()

    def _compute(self, planned: Any, report: KVConnectorOutput) -> ModelRunnerOutput:
        names = list(planned.num_scheduled_tokens)
        requests = [self.scheduler.requests.get(n) for n in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={n: i for i, n in enumerate(names)},
            sampled_token_ids=[[TOKEN] if r and r.num_computed_tokens >= r.num_tokens else [] for r in requests],
            kv_connector_output=report,
        )
