"""The connector's half inside the engine's scheduler: reuse that is verified, retention that is bounded.

Prefill side: `on_new_request` verifies the handle against the prompt and cuts it, `get_num_new_matched_tokens` applies
the threshold, `request_finished` reports. Decode side: `request_finished` keeps the turn or lets it go.

A turn is kept by references to its blocks, and the request itself ends at once. vLLM's own way, a request whose end is
delayed, keeps the engine stepping as long as there is one: measured on CPUs, 1.7 cores for an idle decode node.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import RequestStatus

from kvflow.connector.fingerprint import Fingerprint, prompt_digest
from kvflow.connector.identity import identity_of
from kvflow.connector.pull import Pull, Sources, cut, decode_order, has_handle, prefill_order
from kvflow.connector.retention import Ledger, Pool, Refusal, Turns, decide
from kvflow.connector.timing import Timing, Timings
from kvflow.connector.wire import KEY, DecodeOrder, DecodeReport, PrefillOrder
from kvflow.errors import WireError
from kvflow.types import Reason

logger = init_logger(__name__)

BlockIds = Sequence[list[int]]
"""Block ids of one request, a list for each KV cache group."""

_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class KvflowScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Lives in the engine-core process, one per data-parallel rank. What its hooks raise ends the engine."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._pulls: dict[str, Pull] = {}
        """Prefill legs from arrival to end."""
        self._decodes: dict[str, bool] = {}
        """Decode legs from arrival to end, and whether what the prefill node offers is lost or of another prompt."""
        self._timings = Timings(time.perf_counter)
        self._awaited: dict[str, Any] = {}
        """Decode legs, vLLM's requests, until their first token."""
        self._ledger = Ledger()
        self._turns = Turns()
        self._sources = Sources()
        self._at_worker: set[str] = set()
        """Requests that the worker will report as sent, when they have been pulled, released, or have expired."""
        self._released: set[str] = set()
        """Of those, the ones that the worker has not been told of yet that nobody will pull them."""
        self._pool: Any = None
        self._splittable = _splittable(kv_cache_config)
        self._reserve = _blocks_of_longest_request(vllm_config, kv_cache_config)

    def bind_block_pool(self, pool: Any) -> None:
        self._pool = pool

    def on_new_request(self, request: Any) -> None:
        # An engine without work sleeps and sees no deadline pass; what has expired must be free before it is needed.
        self._release_expired()
        params = request.kv_transfer_params
        if not params:
            return
        prompt, digest = request.num_prompt_tokens, _digest(request)
        self._timings.arrived(request.request_id)
        late = self._comes_late(request, params)
        super().on_new_request(request)  # may shorten the prompt
        if params.get("do_remote_decode"):
            self._pulls[request.request_id] = self._admit(request, params, Pull(prompt=prompt, digest=digest))
        elif KEY in params:
            order = self._decode_order(request)
            self._give_up(order)
            self._awaited[request.request_id] = request
            self._decodes[request.request_id] = late or self._is_for_another_prompt(request, order, digest)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._timings.found(request.request_id, num_computed_tokens)
        pull = self._pulls.get(request.request_id)
        if self._decodes.get(request.request_id):
            return 0, False  # vLLM then only tells the prefill node that it need not keep the KV
        if pull is None:
            matched: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return matched
        count = pull.wanted(num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._timings.started(request.request_id, num_external_tokens)
        if pull := self._pulls.get(request.request_id):
            pull.settle(num_external_tokens)
        elif request.request_id in self._decodes:
            # vLLM registers a request with its worker only for a transfer that it knows of; a turn without a prefill
            # leg would then be pinned for good, because the worker ignores the deadline of a request it has not seen.
            if self.is_bidirectional_kv_xfer_enabled:
                self._reqs_in_batch.add(request.request_id)
            _count_as_one_engine(request)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        failed = connector_output.failed_recving or ()
        for request_id in connector_output.finished_recving or ():
            self._timings.loaded(request_id, failed=request_id in failed)
        for request_id in failed:
            self._load_failed(request_id)
        if kept := self._at_worker & (connector_output.finished_sending or set()):
            # The scheduler has forgotten these requests, and takes being told of a request it does not know for a bug.
            connector_output.finished_sending -= kept
            self._at_worker -= kept
            for request_id in kept:
                self._release(request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._release_expired()
        self._note_first_tokens()
        meta = super().build_connector_meta(scheduler_output)
        meta.released, self._released = self._released, set()
        return meta

    def request_finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        pull = self._pulls.pop(request.request_id, None)
        load_failed = self._decodes.pop(request.request_id, False)
        self._awaited.pop(request.request_id, None)
        timing = self._timings.ended(request.request_id)
        params = request.kv_transfer_params or {}
        if pull is None and self._may_be_kept(request, params):
            return self._end_of_turn(request, block_ids, _decoded(request, load_failed, timing))
        if pull is not None and not pull.settled:
            self._decline(request, params)
        delay, handle = super().request_finished(request, block_ids)
        if pull is not None and handle is not None:
            handle[KEY] = replace(pull.report(self._blocks()), **_spent(timing)).to_wire()
        return delay, handle

    def _note_first_tokens(self) -> None:
        """Of the requests without one only; those that generate cost nothing here."""
        for request_id in [i for i, request in self._awaited.items() if request.num_output_tokens]:
            del self._awaited[request_id]
            self._timings.answered(request_id)

    # Prefill side

    def _admit(self, request: Any, params: dict[str, Any], pull: Pull) -> Pull:
        if not has_handle(params):
            params.pop("remote_block_ids", None)  # half a handle would reach the worker
            return pull
        try:
            pull.offered = int(params.get("remote_num_tokens") or 0)
            order = prefill_order(params)
            pull.minimum = order.min_pull_tokens
            pull.verified = self._verify(request, params, order, pull)
        except (WireError, TypeError, ValueError, OverflowError) as e:
            logger.warning("Request %s pulls nothing: %s", request.request_id, e)
        pull.obstacle = self._obstacle(request)
        # The list stays, however short: it makes vLLM tell the decode node that its pin may end.
        params["remote_num_tokens"] = pull.verified
        params["remote_block_ids"] = cut(params["remote_block_ids"], pull.verified, self.block_size)
        return pull

    def _verify(self, request: Any, params: dict[str, Any], order: PrefillOrder, pull: Pull) -> int:
        """Tokens of the handle that are proven to be the prompt's. Raises `WireError`."""
        identity = identity_of(request)
        if order.fingerprint is None or identity is None:
            return 0
        fingerprint = Fingerprint.from_wire(order.fingerprint)
        if fingerprint.block_size != self.block_size or fingerprint.tokens != params.get("remote_num_tokens"):
            return 0
        pull.provable = fingerprint.provable(pull.prompt)
        verified = fingerprint.common_prefix(request.prompt_token_ids, identity)
        if self._splittable:
            held = min(len(group) for group in params["remote_block_ids"])
            return verified if verified <= held * self.block_size else 0
        return verified if verified == fingerprint.tokens else 0

    def _obstacle(self, request: Any) -> Reason | None:
        """What vLLM would answer a pull with by waiting for ever, or by ignoring it."""
        if not self.is_bidirectional_kv_xfer_enabled or self.use_host_buffer:
            return Reason.ONE_WAY
        return Reason.UNSPLITTABLE if request.skip_reading_prefix_cache else None

    def _decline(self, request: Any, params: dict[str, Any]) -> None:
        """Tell the decode node of a request that ended before it was scheduled that its pin may end."""
        if has_handle(params) and self.is_bidirectional_kv_xfer_enabled:
            self._reqs_need_recv[request.request_id] = (request, [], (), False)

    def _load_failed(self, request_id: str) -> None:
        if pull := self._pulls.get(request_id):
            pull.fail()
        elif request_id in self._decodes:
            self._decodes[request_id] = True

    # Decode side

    def _give_up(self, order: DecodeOrder) -> None:
        """Free what nobody will read any more. Of a turn that is not kept (any longer) there is nothing to free."""
        abandoned = [kept for turn in order.abandon or () if (kept := self._turns.abandon(turn))]
        for request_id in (*(order.release or ()), *abandoned):
            if request_id in self._ledger:
                self._release(request_id)
                self._released.add(request_id)

    def _comes_late(self, request: Any, params: dict[str, Any]) -> bool:
        """Whether the prefill node's KV has been spoken for, by another leg or as not wanted."""
        if KEY not in params or not params.get("do_remote_prefill") or self._sources.claim(params):
            return False
        if request.abort_immediately:
            params["do_remote_prefill"] = False  # the leg that reads it tells the prefill node when it is done
        return True

    def _is_for_another_prompt(self, request: Any, order: DecodeOrder, digest: str | None) -> bool:
        """Whether the two nodes made different prompts of one request, so that the prefill node's KV is of no use."""
        theirs = order.prompt_digest
        # A request that vLLM aborts at once stands for one that will not come, and has no prompt of its own.
        if theirs is None or theirs == digest or request.abort_immediately:
            return False
        logger.warning("Request %s: the prefill node computed another prompt; nothing is pulled", request.request_id)
        return True

    def _may_be_kept(self, request: Any, params: dict[str, Any]) -> bool:
        """Whether this is a decode leg that came to its end; vLLM handles all others as they are to be handled."""
        never_started = params.get("do_remote_prefill")
        return bool(
            params
            and not params.get("do_remote_decode")
            and not never_started
            and self.is_bidirectional_kv_xfer_enabled
            and request.status in _COMPLETE
        )

    def _end_of_turn(
        self, request: Any, block_ids: BlockIds, ended: DecodeReport
    ) -> tuple[bool, dict[str, Any] | None]:
        order = self._decode_order(request)
        blocks = self._real_blocks(block_ids)
        pool = Pool(total=self._pool.num_gpu_blocks - 1, reserve=self._reserve)
        verdict = decide(order, cost=self._ledger.cost(blocks), pinned=self._ledger.pinned, pool=pool)
        if self._turns.is_abandoned(order.turn):
            verdict = Refusal.POLICY
        if isinstance(verdict, Refusal):
            return self._let_go(request, verdict, ended)
        fingerprint = self._fingerprint(request)
        if fingerprint is None:
            return self._let_go(request, Refusal.UNHASHABLE, ended)
        _, handle = super().request_finished(request, block_ids)
        deadline = time.perf_counter() + verdict
        self._pin(request.request_id, blocks, deadline)
        self._turns.keep(order.turn, request.request_id)
        report = replace(
            ended,
            retained=True,
            tokens=fingerprint.tokens,
            retain_s=verdict,
            fingerprint=fingerprint.to_wire(),
            blocks=self._blocks(),
        )
        kept = {"remote_num_tokens": fingerprint.tokens, "remote_blocks_expiry_time": deadline}
        return False, {**(handle or {}), **kept, KEY: report.to_wire()}

    def _pin(self, request_id: str, blocks: tuple[int, ...], deadline: float) -> None:
        self._pool.touch([self._pool.blocks[b] for b in blocks])
        self._ledger.pin(request_id, blocks, deadline)
        self._at_worker.add(request_id)
        self._reqs_need_send[request_id] = deadline

    def _release(self, request_id: str) -> None:
        blocks = self._ledger.release(request_id)
        # From the end, as vLLM does it: a prefix is worth more than what follows it.
        self._pool.free_blocks([self._pool.blocks[b] for b in reversed(blocks)])

    def _release_expired(self) -> None:
        for request_id in self._ledger.expired(time.perf_counter()):
            self._release(request_id)

    def _let_go(self, request: Any, refusal: Refusal, ended: DecodeReport) -> tuple[bool, dict[str, Any] | None]:
        """Free the blocks at once. The worker has the request on its list and is told to strike it, as for an abort."""
        self._stop_heartbeat(request.request_id)
        self._reqs_not_processed.add(request.request_id)
        if KEY not in request.kv_transfer_params:
            return False, None
        report = replace(ended, refused=refusal, blocks=self._blocks())
        return False, {KEY: report.to_wire()}

    def _decode_order(self, request: Any) -> DecodeOrder:
        try:
            return decode_order(request.kv_transfer_params)
        except WireError as e:
            logger.warning("Request %s is not kept, and releases nothing: %s", request.request_id, e)
            return DecodeOrder()

    def _fingerprint(self, request: Any) -> Fingerprint | None:
        identity = identity_of(request)
        if identity is None:
            return None
        # num_computed_tokens counts steps that are still under way, and the last token has been sampled but not read.
        held = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        tokens = list(request.all_token_ids[:held])
        return Fingerprint.of(tokens, self.block_size, identity) if tokens else None

    def _real_blocks(self, block_ids: BlockIds) -> tuple[int, ...]:
        """Without vLLM's placeholder for blocks that a sliding window has left behind."""
        placeholder = self._pool.null_block.block_id
        return tuple(dict.fromkeys(b for group in block_ids for b in group if b != placeholder))

    def _blocks(self) -> dict[str, int]:
        free, total = self._pool.get_num_free_blocks(), self._pool.num_gpu_blocks - 1
        return {"free": free, "pinned": self._ledger.pinned, "total": total, "reserve": self._reserve}


def _count_as_one_engine(request: Any) -> None:
    """What the prefill node computed was computed, though this node only moved it.

    vLLM reports as cached what was cached there, but works out from its own count what was added to a prefix cache; of
    Anthropic's `input_tokens` it takes off both.
    """
    cached = request.kv_transfer_params.get("remote_prefill_cached_tokens")
    if request.prefill_stats is not None and type(cached) is int:
        request.prefill_stats.num_cached_tokens = cached


def _spent(timing: Timing | None) -> dict[str, Any]:
    return asdict(timing.spent()) if timing else {}


def _decoded(request: Any, load_failed: bool, timing: Timing | None) -> DecodeReport:
    """What there is to say of a decode leg that came to its end, whatever becomes of its KV."""
    return DecodeReport(
        load_failed=load_failed,
        prompt_tokens=request.num_prompt_tokens,
        local_tokens=timing.local_tokens if timing else None,
        pulled_tokens=timing.pulled_tokens if timing else None,
        **_spent(timing),
    )


def _digest(request: Any) -> str | None:
    identity = identity_of(request)
    return None if identity is None else prompt_digest(request.prompt_token_ids, identity)


def _splittable(kv_cache_config: Any) -> bool:
    """Whether any prefix of a request's blocks is the KV of a prefix of its tokens."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return False
    spec = groups[0].kv_cache_spec
    layers = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    return all(_full_and_causal(layer) for layer in layers)


def _full_and_causal(spec: Any) -> bool:
    """By exact type: vLLM's other subclasses keep a window, a hidden state, or several tokens in one entry."""
    return type(spec) in (FullAttentionSpec, MLAAttentionSpec) and not spec.non_causal and spec.tokens_per_state == 1


def _blocks_of_longest_request(vllm_config: Any, kv_cache_config: Any) -> int:
    """With what the scheduler holds back on top: its watermark, and room for a step ahead in each group."""
    specs = [g.kv_cache_spec for g in kv_cache_config.kv_cache_groups]
    longest: int = sum(cdiv(s.max_memory_usage_bytes(vllm_config), s.page_size_bytes) for s in specs)
    watermark = int(vllm_config.scheduler_config.watermark * kv_cache_config.num_blocks)
    return longest + watermark + len(specs)
