"""What the router knows about its nodes, and how it learns it: from probes, from legs, from the engines' reports."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvflow.connector.wire import NODE_PATH, VERSION, DecodeReport, NodeReport, PrefillReport
from kvflow.errors import WireError
from kvflow.nodes.base import NodeSpec
from kvflow.router.estimates import Estimates
from kvflow.router.measure import TimedLeg, learn_from_decode, learn_from_prefill
from kvflow.router.upstream import EngineError, Upstream
from kvflow.types import Blocks, NodeState, Role, View

log = logging.getLogger("kvflow.router")

PROBE_TIMEOUT_S = 5.0
FAILURE_HALF_LIFE_S = 60.0
_FORGOTTEN = 0.01
"""A failure that counts for less is none."""


@dataclass(slots=True)
class _Member:
    spec: NodeSpec
    state: NodeState
    why: str = "has not answered yet"
    """Why the node is not ready, for people."""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the node is ready."""
    deaths: int = 0
    """That the router was told of; what was asked before one says nothing about what comes after it."""
    computing: int = 0
    """Legs whose prompts the node has not done with, as far as it will be known."""
    work_s: float = 0.0
    """Of those, what they are expected to take."""
    untold: int = 0
    """Of those, the ones that will not say when the node is done with their prompts."""
    untold_until: float = 0.0
    """When they were expected to be computed."""
    failed: float = 0.0
    """As `NodeState.recent_failures`, at the moment `failed_at`."""
    failed_at: float = 0.0

    def failing(self, now: float) -> float:
        rest = self.failed * 0.5 ** ((now - self.failed_at) / FAILURE_HALF_LIFE_S) if self.failed else 0.0
        return rest if rest > _FORGOTTEN else 0.0


class Fleet:
    """Both pools. `on_epoch_end` is called with the epoch of an engine process that is found to be gone."""

    def __init__(
        self,
        specs: Sequence[NodeSpec],
        upstream: Upstream,
        on_epoch_end: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = {
            s.name: _Member(s, NodeState(name=s.name, role=s.role, ready=False, bidirectional=False)) for s in specs
        }
        self._estimates = Estimates({s.name: s.role for s in specs})
        self._upstream = upstream
        self._on_epoch_end = on_epoch_end
        self._clock = clock

    def now(self) -> float:
        """On the clock of `Handle.deadline`."""
        return self._clock()

    def view(self) -> View:
        now = self._clock()
        states = [self._state(m, now) for m in self._members.values()]
        prefill = tuple(s for s in states if s.role is Role.PREFILL)
        decode = tuple(s for s in states if s.role is Role.DECODE)
        return View(now=now, prefill=prefill, decode=decode, transfers=self._estimates.transfers())

    def state(self, name: str) -> NodeState:
        return self._state(self._members[name], self._clock())

    def _state(self, member: _Member, now: float) -> NodeState:
        if not member.failed:
            return member.state
        return replace(member.state, recent_failures=member.failing(now))

    def url(self, name: str) -> str:
        return self._members[name].spec.url

    def missing(self) -> list[str]:
        """One sentence for each role that has no ready node; empty when turns can be served."""
        out = []
        for role in Role:
            members = [m for m in self._members.values() if m.spec.role is role]
            if not any(m.state.ready for m in members):
                out.append(f"no {role} node is ready: " + "; ".join(f"{m.spec.name} {m.why}" for m in members))
        return out

    def why(self, name: str) -> str:
        """Why a node is not ready, as a predicate without its subject."""
        return self._members[name].why

    async def ready(self, name: str) -> None:
        """Wait until a node is ready."""
        await self._members[name].up.wait()

    @contextmanager
    def leg(self, name: str, tokens: int, work_s: float = 0.0, *, tells: bool = True) -> Iterator[TimedLeg]:
        """Count one leg as under way on a node for as long as the context lasts.

        The node is expected to be taken up for `work_s`, behind the legs before it, until the leg says that its prompt
        has been computed. One that does not tell, because its answer comes as a whole, is expected to be through when
        its time is: it must not stand in the queue for as long as its answer is written.
        """
        member, now = self._members[name], self._clock()
        wait_s = max(0.0, member.state.free_at - now)
        self._stands(member, now + wait_s + work_s, work_s if tells else None)
        self._add(name, 1, tokens, free_at=now + wait_s + work_s)
        if member.spec.role is Role.PREFILL:
            self._worked(member, work_s)
        leg = TimedLeg(
            node=name,
            began=now,
            wait_s=wait_s,
            now=self._clock,
            on_computed=lambda: self._computed(member, work_s if tells else None),
        )
        try:
            yield leg
        finally:
            leg.computed()
            if member.spec.role is Role.DECODE:
                self._worked(member, self._clock() - now)
            self._add(name, -1, -tokens)

    def _worked(self, member: _Member, seconds: float) -> None:
        member.state = replace(member.state, worked=member.state.worked.plus(seconds, self._clock()))

    def _stands(self, member: _Member, until: float, work_s: float | None) -> None:
        """In the queue of a node. `work_s` is None of a leg that does not tell when it is through."""
        if work_s is None:
            member.untold += 1
            member.untold_until = until
        else:
            member.computing += 1
            member.work_s += work_s

    def _computed(self, member: _Member, work_s: float | None) -> None:
        if work_s is None:
            member.untold -= 1
        else:
            member.computing -= 1
            member.work_s = member.work_s - work_s if member.computing else 0.0
        now = self._clock()
        untold = member.untold_until if member.untold else now
        self._set(member.spec.name, replace(member.state, free_at=max(now + member.work_s, untold)))

    def prefilled(self, leg: TimedLeg, source: str | None, prompt_tokens: int, report: PrefillReport | None) -> None:
        """What a prefill leg that succeeded teaches. `source` is the decode node that it was to pull from."""
        learn_from_prefill(self._estimates, leg, source, prompt_tokens, report)
        self._take_estimates()

    def decoded(self, leg: TimedLeg, prefill: str | None, report: DecodeReport) -> None:
        """What a decode leg that came to its end teaches. `prefill` is the node of the leg before it."""
        learn_from_decode(self._estimates, leg, prefill, report)
        self._take_estimates()

    def _take_estimates(self) -> None:
        """Into the states, so that a view costs nothing. One measurement may change all nodes that have none."""
        for name, member in self._members.items():
            compute, overhead = self._estimates.compute(name), self._estimates.overhead(name)
            if compute is not member.state.compute or overhead is not member.state.overhead:
                member.state = replace(member.state, compute=compute, overhead=overhead)

    def _add(self, name: str, legs: int, tokens: int, *, free_at: float | None = None) -> None:
        s = self._members[name].state
        free_at = s.free_at if free_at is None else free_at
        counted = replace(s, in_flight=s.in_flight + legs, queued_tokens=s.queued_tokens + tokens, free_at=free_at)
        self._set(name, counted)

    def succeeded(self, name: str) -> None:
        self._set(name, replace(self._members[name].state, failures=0))

    def failed(self, name: str, *, reached: bool) -> None:
        """A leg broke. A node that could not be reached is out of the pools until a probe gets through."""
        member, now = self._members[name], self._clock()
        if not reached:
            member.why = "cannot be reached"
        member.failed, member.failed_at = member.failing(now) + 1, now
        state = member.state
        self._set(name, replace(state, failures=state.failures + 1, ready=state.ready and reached))

    def report_blocks(self, name: str, blocks: Blocks | None) -> None:
        """What an engine said about its block pool beside a leg's answer."""
        if blocks is not None:
            self._set(name, replace(self._members[name].state, blocks=blocks))

    async def watch(self, interval_s: float) -> None:
        """Probe every node for ever, each on its own."""
        async with asyncio.TaskGroup() as group:
            for name in self._members:
                group.create_task(self._watch(name, interval_s), name=f"probe {name}")

    async def _watch(self, name: str, interval_s: float) -> None:
        while True:
            await self.probe(name)
            await asyncio.sleep(interval_s)

    async def probe(self, name: str) -> None:
        """Ask a node who it is; update its state."""
        member = self._members[name]
        deaths = member.deaths
        try:
            report = await self._ask(member.spec)
        except EngineError as e:
            self._unready(member, e.what)
        except WireError as e:
            self._unready(member, str(e))
        except Exception:
            # One node's nonsense must not end the watch over the others.
            log.exception("%s was probed in vain", name)
            self._unready(member, "gave an answer that nobody understands")
        else:
            if deaths == member.deaths:
                self._answered(member, report)

    async def _ask(self, spec: NodeSpec) -> NodeReport | None:
        """None for a stock engine that is healthy."""
        status, body = await self._upstream.get(spec.name, spec.url + NODE_PATH, PROBE_TIMEOUT_S)
        if status == 200:
            return _parse(body, spec)
        if status not in (404, 405):
            raise WireError(f"answered a probe with {status}")
        status, _ = await self._upstream.get(spec.name, spec.url + "/health", PROBE_TIMEOUT_S)
        if status != 200:
            raise WireError(f"answered its health check with {status}")
        return None

    def _answered(self, member: _Member, report: NodeReport | None) -> None:
        epoch = report.epoch if report else ""
        if epoch != member.state.epoch:
            self._end_epoch(member)
        state = replace(member.state, ready=True, bidirectional=report is not None, epoch=epoch)
        if report is not None:
            state = replace(state, block_size=report.block_size, prefix_caching=report.prefix_caching)
        self._set(member.spec.name, state)

    def _unready(self, member: _Member, why: str) -> None:
        member.why = why
        self._set(member.spec.name, replace(member.state, ready=False))

    def _end_epoch(self, member: _Member) -> None:
        old = member.state.epoch
        member.state = replace(member.state, blocks=None, failures=0)
        if old:
            self._estimates.restarted(member.spec.name)
            log.warning("the engine behind %s is no longer the same; what it kept is gone", member.spec.name)
            self._on_epoch_end(old)

    def gone(self, name: str) -> None:
        """The process behind a node has ended: forget what it held without waiting for a probe."""
        member = self._members[name]
        member.deaths += 1
        self._end_epoch(member)
        self._unready(member, "has ended")
        member.state = replace(member.state, epoch="")

    def _set(self, name: str, state: NodeState) -> None:
        member = self._members[name]
        turned = state.ready != member.state.ready
        member.state = state
        if turned:
            log.info("%s is %s", name, "ready" if state.ready else f"not ready: it {member.why}")
            (member.up.set if state.ready else member.up.clear)()


def _parse(body: bytes, spec: NodeSpec) -> NodeReport:
    try:
        report = NodeReport.from_wire(json.loads(body))
    except (ValueError, RecursionError):
        raise WireError("answered a probe with something else than JSON") from None
    if report.role != spec.role:
        raise WireError(f"is a {report.role} engine but is configured as a {spec.role} node")
    if report.version != VERSION:
        raise WireError(f"speaks version {report.version} of kvflow's protocol, and this router version {VERSION}")
    return report
