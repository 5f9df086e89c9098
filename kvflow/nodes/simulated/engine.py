"""A simulated engine without its API server: schedule, pull, compute, answer, keep."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from kvflow.connector.pull import has_handle
from kvflow.connector.retention import Refusal, Turns
from kvflow.connector.wire import VERSION, DecodeOrder, NodeReport
from kvflow.nodes.simulated.answer import Answer
from kvflow.nodes.simulated.blocks import BlockPool
from kvflow.nodes.simulated.clock import Clock, RealClock, Signal
from kvflow.nodes.simulated.fabric import Fabric, Peer, TransferError
from kvflow.nodes.simulated.faults import Faults
from kvflow.nodes.simulated.leg import Leg, order_of
from kvflow.nodes.simulated.pins import Pins
from kvflow.nodes.simulated.run import Job, Run, Step
from kvflow.nodes.simulated.settings import Settings
from kvflow.types import Role

VLLM = "0.32.0"
"""The version of vLLM that is imitated."""
EXPIRY_MARGIN_S = 5.0
"""A prefill engine does not begin to pull what a decode engine may let go within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Blocks and requests of an engine at one moment."""

    total: int
    free: int
    """Those that only the prefix cache knows included."""
    cached: int
    """Of the free ones, those that the prefix cache can still find."""
    pinned: int
    """Of turns that have ended and are kept for their next one."""
    leased: int
    """Requests whose blocks wait for their reader, of either kind."""
    running: int
    waiting: int


class Engine:
    """One life of an engine: its epoch and its memory end with it. Reachable for others between `join` and `leave`."""

    def __init__(
        self,
        *,
        role: Role,
        fabric: Fabric,
        settings: Settings | None = None,
        clock: Clock | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.role = role
        self.settings = settings or Settings()
        self.speed = self.settings.speed
        self.clock = clock or RealClock()
        self.faults = faults or Faults()
        self.epoch = uuid4().hex
        self.pulled_tokens = 0
        self.transfers = 0
        self._fabric = fabric
        self._pool = BlockPool(
            total=self.settings.blocks,
            block_size=self.settings.block_size,
            prefix_caching=self.settings.prefix_caching,
        )
        self._pins = Pins(self._pool)
        self._turns = Turns()
        self._running: list[Run] = []
        self._waiting: list[Run] = []
        self._changed = Signal(self.clock)
        self._computing = asyncio.Lock()

    @property
    def pulled_bytes(self) -> int:
        return self.pulled_tokens * self.settings.bytes_per_token

    def join(self) -> None:
        self._fabric.join(self.epoch, self)

    def leave(self) -> None:
        self._fabric.leave(self.epoch)

    def report(self) -> NodeReport:
        return NodeReport(
            version=VERSION,
            epoch=self.epoch,
            role=self.role.value,
            vllm=VLLM,
            block_size=self.settings.block_size,
            max_model_len=self.settings.max_model_len,
            prefix_caching=self.settings.prefix_caching,
        )

    async def generate(self, job: Job) -> AsyncGenerator[Step]:
        """Leaving early aborts the request and frees what it used."""
        run = Run(job, self.settings.block_size)
        leg = Leg(run, self.settings, self.clock.now())
        self._give_up(leg.order)
        try:
            await self._admit(run, leg)
            await self._fill(run, leg)
            async for step in self._answer(run, leg):
                yield step
        finally:
            self._leave(run, leg)

    def reject(self, params: dict[str, Any]) -> None:
        """A request was refused before it got here, or will not come: let its source go, and what it gives up.

        The stock engine does so for decode legs only.
        """
        self._give_up(order_of(params, self.settings))
        peer = self._fabric.find(params.get("remote_engine_id")) if has_handle(params) else None
        pulls = params.get("do_remote_prefill") or (params.get("do_remote_decode") and not self.settings.stock)
        if peer and pulls:
            peer.finished(str(params.get("remote_request_id")))

    def drop_pins(self) -> None:
        """Let go of everything that is kept; the handles stay with the router and mean nothing any more."""
        self._pins.clear()
        self._changed.send()

    def occupancy(self) -> Occupancy:
        self._expire()
        return Occupancy(
            total=self._pool.total,
            free=self._pool.free,
            cached=self._pool.cached,
            pinned=self._pins.pinned,
            leased=len(self._pins),
            running=len(self._running),
            waiting=len(self._waiting),
        )

    def check(self) -> list[str]:
        """What is wrong with the books; nothing if every block is accounted for."""
        found = self._pool.faults()
        used, users = self._pool.users(), self._pins.users() + sum(len(r.blocks) for r in self._running)
        return found if used == users else [*found, f"blocks have {used} users, requests and pins use {users}"]

    # What other engines see

    def now(self) -> float:
        return self.clock.now()

    def read(self, blocks: Sequence[int]) -> list[tuple[int, ...]]:
        return self._pool.read(blocks)

    def announce(self, request_id: str) -> None:
        self._expire()
        self._pins.renew(request_id)

    def finished(self, request_id: str) -> None:
        self._pins.end(request_id)
        self._changed.send()

    # The life of a request

    async def _admit(self, run: Run, leg: Leg) -> None:
        """Wait for blocks, first come first served.

        The whole answer is reserved, where a real engine would take blocks as it goes and preempt somebody when they
        run out: the wait is the same, and nobody is preempted.
        """
        if leg.decode and (peer := self._source(leg)):
            peer.announce(str(leg.params["remote_request_id"]))
        self._waiting.append(run)
        try:
            while not self._start(run):
                await self._changed.wait(self._pins.next_deadline())
        finally:
            self._waiting.remove(run)
            self._changed.send()

    def _start(self, run: Run) -> bool:
        self._expire()
        if self._waiting[0] is not run or len(self._running) >= self.settings.max_running:
            return False
        found = self._pool.find(run.block_keys(run.prompt_length - 1))
        new = -(-self._longest(run) // self.settings.block_size) - len(found)
        if not self._pool.fits(found, new):
            return False
        self._pool.share(found)
        run.blocks = found + self._pool.take(new)
        run.local = len(found) * self.settings.block_size
        self._running.append(run)
        return True

    def _longest(self, run: Run) -> int:
        job = run.job
        natural = max(self.settings.max_answer + 1, job.min_tokens + 1)
        return run.prompt_length + (job.max_tokens if job.ignore_eos else min(job.max_tokens, natural))

    async def _fill(self, run: Run, leg: Leg) -> None:
        """Bring the prompt's KV into the blocks: from the prefix cache, from another engine, and computed."""
        count = leg.wanted(run.local)
        leg.timing.found(run.local)
        if count:
            count = await self._load(run, leg, count)
        leg.pull.settle(count)
        self._let_go_of_source(leg)
        start = min(run.local + count, run.prompt_length - 1)
        async with self._computing:
            leg.timing.started(self.clock.now(), 0)
            await self.clock.sleep(self.speed.prefill_time(run.prompt_length - start))
        run.compute(start)
        self._remember(run)

    async def _load(self, run: Run, leg: Leg, count: int) -> int:
        """Tokens that came; all of them or none."""
        leg.timing.started(self.clock.now(), count)
        arrived = await self._pull(run, leg, count)
        leg.timing.loaded(self.clock.now(), failed=not arrived)
        if not arrived:
            leg.fail()
        return count if arrived else 0

    async def _pull(self, run: Run, leg: Leg, count: int) -> bool:
        """Move the KV of `count` tokens behind the local ones. False if that failed."""
        first = run.local // self.settings.block_size
        last = -(-(run.local + count) // self.settings.block_size)
        await self.clock.sleep(self.speed.transfer_time(count))
        try:
            # As the real engine does: of the blocks that are offered, the last ones.
            run.write_blocks(first, self._read(leg)[first - last :])
        except (TransferError, IndexError, TypeError):
            return False
        self.transfers += 1
        self.pulled_tokens += count
        return True

    def _read(self, leg: Leg) -> list[tuple[int, ...]]:
        peer = self._source(leg)
        if peer is None or self.faults.transfer_fails():
            raise TransferError
        expiry = leg.params.get("remote_blocks_expiry_time")
        if expiry is not None and expiry - peer.now() < EXPIRY_MARGIN_S:
            raise TransferError
        contents = peer.read(leg.params["remote_block_ids"][0])
        if any(len(block) != self.settings.block_size for block in contents):
            raise TransferError
        return contents

    async def _answer(self, run: Run, leg: Leg) -> AsyncGenerator[Step]:
        answer = Answer(run, self.settings)
        cached = leg.params.get("remote_prefill_cached_tokens") if leg.decode else None
        cached = run.local + leg.pull.pulled if cached is None else cached
        for piece in answer.pieces():
            await self.clock.sleep(self.speed.decode_time())
            leg.timing.answered(self.clock.now())
            yield Step(
                text=piece.text,
                token=piece.token,
                prompt_tokens=run.prompt_length,
                cached_tokens=cached,
                finish=piece.finish,
                stop_reason=piece.stop_reason,
                params=self._finish(run, leg, cached) if piece.finish else None,
            )

    def _finish(self, run: Run, leg: Leg, cached: int) -> dict[str, Any] | None:
        """The turn has come to its end: keep its KV or let it go, and say so."""
        self._remember(run)
        surplus = run.blocks[-(-run.held // self.settings.block_size) :]
        self._pool.release(surplus)
        del run.blocks[len(run.blocks) - len(surplus) :]
        if leg.prefill:
            handle = self._keep(run, self.settings.lease_s, leg)
            return {**handle, "remote_prefill_cached_tokens": cached, **leg.prefill_report(self._blocks())}
        verdict = leg.verdict(self._pins, self._turns)
        handle = {} if isinstance(verdict, Refusal) else self._keep(run, verdict, leg)
        self._leave(run, leg)
        return {**handle, **leg.decode_report(verdict, self._blocks())} or None

    def _keep(self, run: Run, seconds: float, leg: Leg) -> dict[str, Any]:
        request_id = f"{run.job.request_id}-{uuid4().hex[:8]}"
        deadline = self.clock.now() + seconds
        handle = {
            "do_remote_prefill": leg.prefill,
            "do_remote_decode": leg.decode,
            "remote_block_ids": [[b.id for b in run.blocks]],
            "remote_engine_id": self.epoch,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": run.held,
            "remote_blocks_expiry_time": deadline if leg.decode else None,
            "transfer_mode": "pull",
        }
        self._pins.hold(request_id, run.blocks, deadline, retained=leg.decode)
        self._turns.keep(leg.order.turn, request_id)
        run.blocks = []
        return {} if self.faults.drop_handles else handle

    def _leave(self, run: Run, leg: Leg) -> None:
        """Give back what the request still has; after its end, and where it was aborted."""
        self._let_go_of_source(leg)
        self._pool.release(run.blocks)
        run.blocks = []
        if run in self._running:
            self._running.remove(run)
        self._changed.send()

    def _let_go_of_source(self, leg: Leg) -> None:
        """Once. A pull that failed says nothing to its source, whose pin then ends by itself."""
        if not leg.load_failed and (peer := self._source(leg)):
            peer.finished(str(leg.params["remote_request_id"]))
        leg.source = None

    def _source(self, leg: Leg) -> Peer | None:
        return self._fabric.find(leg.source["remote_engine_id"]) if leg.source else None

    def _remember(self, run: Run) -> None:
        for block, key in zip(run.blocks, run.block_keys(run.held), strict=False):
            self._pool.remember(block, key)

    def _give_up(self, order: DecodeOrder) -> None:
        abandoned = [kept for turn in order.abandon or () if (kept := self._turns.abandon(turn))]
        if self._pins.release([*(order.release or ()), *abandoned]):
            self._changed.send()

    def _expire(self) -> None:
        if self._pins.expire(self.clock.now()):
            self._changed.send()

    def _blocks(self) -> dict[str, int]:
        reserve = self.settings.longest
        return {"free": self._pool.free, "pinned": self._pins.pinned, "total": self._pool.total, "reserve": reserve}
