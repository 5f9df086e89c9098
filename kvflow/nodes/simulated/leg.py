"""What a leg's `kv_transfer_params` ask of a simulated engine, and what it answers: the connector, without vLLM.

The decisions are those of the real connector, made by the same code: `Pull`, `Fingerprint` and `decide`.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from kvflow.connector.fingerprint import Fingerprint, Identity, prompt_digest
from kvflow.connector.pull import Pull, cut, decode_order, has_handle, prefill_order
from kvflow.connector.retention import Pool, Refusal, Turns, decide
from kvflow.connector.timing import Timing
from kvflow.connector.wire import KEY, DecodeOrder, DecodeReport
from kvflow.errors import WireError
from kvflow.nodes.simulated.pins import Pins
from kvflow.nodes.simulated.run import Run
from kvflow.nodes.simulated.settings import Settings

STOCK_THRESHOLD = 64
"""The released engine's `kv_recompute_threshold`."""


class Leg:
    """One request's dealings with the connector. Without params there are none."""

    def __init__(self, run: Run, settings: Settings, now: float) -> None:
        self.params = dict(run.job.params)
        self.prefill = bool(self.params.get("do_remote_decode"))
        self.decode = not self.prefill and bool(self.params)
        self.load_failed = False
        self.timing = Timing(now)
        self._other_prompt = False
        self.source = self.params if has_handle(self.params) else None
        """Whom to pull from, where there is somebody."""
        self._run = run
        self._settings = settings
        self._identity = Identity(cache_salt=run.job.cache_salt)
        digest = prompt_digest(run.job.prompt, self._identity)
        self.pull = Pull(prompt=run.prompt_length, digest=digest)
        if self.prefill and self.source:
            self._verify(self.source)

    def wanted(self, local: int) -> int:
        """Tokens to pull beyond the `local` ones of the prefix cache."""
        if self.source is None:
            return 0
        if not self.prefill:
            return (
                self._run.prompt_length - local if self.params.get("do_remote_prefill") and self._same_prompt() else 0
            )
        if self._settings.stock:
            count = min(self.params.get("remote_num_tokens") or 0, self._run.prompt_length) - local
            return count if count >= STOCK_THRESHOLD else 0
        return self.pull.wanted(local)

    def fail(self) -> None:
        self.load_failed = True
        self.pull.fail()

    def prefill_report(self, blocks: dict[str, int]) -> dict[str, Any]:
        if self._settings.stock:
            return {}
        return {KEY: replace(self.pull.report(blocks), **asdict(self.timing.spent())).to_wire()}

    @property
    def order(self) -> DecodeOrder:
        return order_of(self.params, self._settings)

    def verdict(self, pins: Pins, turns: Turns) -> float | Refusal:
        """Seconds to keep the turn that has ended, or why it is not kept."""
        if not self.decode or self._settings.stock or turns.is_abandoned(self.order.turn):
            return Refusal.POLICY
        pool = Pool(total=self._settings.blocks, reserve=self._settings.longest)
        return decide(self.order, cost=pins.cost(self._run.blocks), pinned=pins.pinned, pool=pool)

    def decode_report(self, verdict: float | Refusal, blocks: dict[str, int]) -> dict[str, Any]:
        ended = DecodeReport(
            load_failed=self._computed_itself,
            blocks=blocks,
            prompt_tokens=self._run.prompt_length,
            local_tokens=self.timing.local_tokens,
            pulled_tokens=self.timing.pulled_tokens,
            **asdict(self.timing.spent()),
        )
        if isinstance(verdict, Refusal):
            report = replace(ended, refused=verdict)
            return {KEY: report.to_wire()} if self._spoken_to() else {}
        held = self._run.tokens[: self._run.held]
        fingerprint = Fingerprint.of(held, self._settings.block_size, self._identity)
        report = replace(
            ended,
            retained=True,
            tokens=len(held),
            retain_s=verdict,
            fingerprint=fingerprint.to_wire() if fingerprint else None,
        )
        return {KEY: report.to_wire()}

    @property
    def _computed_itself(self) -> bool:
        return self.load_failed or self._other_prompt

    def _verify(self, params: dict[str, Any]) -> None:
        """Cut the handle to what is proven to be the prompt's. The stock engine believes it."""
        if self._settings.stock:
            return
        self.pull.offered = tokens = params.get("remote_num_tokens") or 0
        try:
            order = prefill_order(params)
            self.pull.minimum = order.min_pull_tokens
            if order.fingerprint is not None:
                self.pull.verified = self._proven(Fingerprint.from_wire(order.fingerprint), tokens)
        except WireError:
            return  # an order that makes no sense proves nothing
        finally:
            params["remote_block_ids"] = cut(params["remote_block_ids"], self.pull.verified, self._settings.block_size)

    def _proven(self, fingerprint: Fingerprint, tokens: int) -> int:
        if fingerprint.block_size != self._settings.block_size or fingerprint.tokens != tokens:
            return 0
        self.pull.provable = fingerprint.provable(self._run.prompt_length)
        verified = fingerprint.common_prefix(self._run.job.prompt, self._identity)
        held = min(len(group) for group in self.params["remote_block_ids"]) * self._settings.block_size
        return verified if verified <= held else 0

    def _same_prompt(self) -> bool:
        """Whether the prefill node computed the prompt that this node was sent."""
        other = self.order.prompt_digest
        self._other_prompt = not self._settings.stock and other is not None and other != self.pull.digest
        return not self._other_prompt

    def _spoken_to(self) -> bool:
        return KEY in self.params and not self._settings.stock


def order_of(params: Mapping[str, Any], settings: Settings) -> DecodeOrder:
    """Of a decode leg with such params; an empty one for all else."""
    try:
        return DecodeOrder() if settings.stock or params.get("do_remote_decode") else decode_order(params)
    except WireError:
        return DecodeOrder()
