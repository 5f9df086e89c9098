"""What `/metrics` shows, for Prometheus. One registry per router, so that nothing is shared between two of them."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvflow.connector.wire import DecodeReport, PrefillReport
from kvflow.conversations import Conversations
from kvflow.router.fleet import Fleet
from kvflow.tenants.gate import Gate
from kvflow.types import Path, Reason

_USUAL_TOKENS = 1000
"""Costs are shown for prompts of that length; they are not the same for each token."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)


class Metrics:
    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self._turns = Counter(
            "kvflow_turns", "Turns answered, by path taken and why not more", ["tenant", "path", "reason"], registry=r
        )
        self._tokens = Counter(
            "kvflow_prompt_tokens",
            "Prompt tokens of prefill legs, by where they came from",
            ["tenant", "source"],
            registry=r,
        )
        self._ttft = Histogram(
            "kvflow_time_to_first_token_seconds",
            "From the arrival of a request to the first byte of its streamed answer",
            ["tenant", "path"],
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self._failures = Counter("kvflow_leg_failures", "Legs that a node did not answer", ["node"], registry=r)
        self._fallbacks = Counter(
            "kvflow_load_fallbacks", "Transfers that broke; the tokens were computed instead", ["node"], registry=r
        )
        self._policy_errors = Counter(
            "kvflow_policy_errors", "Turns whose policy failed, and which went cold", ["policy"], registry=r
        )
        self._refused = Counter(
            "kvflow_turns_refused", "Turns refused because their tenant had too many", ["tenant"], registry=r
        )
        self._under_way = Gauge("kvflow_turns_under_way", "Turns under way", ["tenant"], registry=r)
        self._waiting = Gauge("kvflow_turns_waiting", "Turns that wait to begin", ["tenant"], registry=r)
        self._unkeyed = Counter(
            "kvflow_unkeyed_turns", "Turns that no conversation could be derived for", ["tenant"], registry=r
        )
        self._kept = Counter(
            "kvflow_turns_kept", "What became of the KV at the end of turns", ["tenant", "outcome"], registry=r
        )
        self._released = Counter(
            "kvflow_handles_released", "Handles given back before their time, by why", ["why"], registry=r
        )
        self._handles = Gauge("kvflow_handles", "Handles held", registry=r)
        self._handle_bytes = Gauge("kvflow_handle_bytes", "Memory that the handles take, about", registry=r)
        self._pinned = Gauge("kvflow_pinned_share", "Share of a node's block pool that is pinned", ["node"], registry=r)
        self._ready = Gauge("kvflow_node_ready", "1 if the node is ready", ["node"], registry=r)
        self._in_flight = Gauge("kvflow_legs_in_flight", "Legs under way on a node", ["node"], registry=r)
        self._compute = Gauge(
            "kvflow_compute_seconds_per_token", "Of a prompt of 1,000 tokens, as measured", ["node"], registry=r
        )
        self._transfer = Gauge(
            "kvflow_transfer_seconds_per_token",
            "Of moving the KV of 1,000 tokens, as measured",
            ["source", "target"],
            registry=r,
        )

    def turn(self, tenant: str, path: Path, reason: Reason | None) -> None:
        self._turns.labels(tenant, path, reason or "").inc()

    def prefilled(self, tenant: str, node: str, report: PrefillReport) -> None:
        computed = report.prompt_tokens - report.local_tokens - report.pulled_tokens
        self._tokens.labels(tenant, "pulled").inc(report.pulled_tokens)
        self._tokens.labels(tenant, "local").inc(report.local_tokens)
        self._tokens.labels(tenant, "computed").inc(max(0, computed))
        if report.reason == Reason.TRANSFER_FAILED:
            self._fallbacks.labels(node).inc()

    def decoded(self, tenant: str, node: str, report: DecodeReport) -> None:
        self._kept.labels(tenant, "kept" if report.retained else report.refused or "not-kept").inc()
        if report.load_failed:
            self._fallbacks.labels(node).inc()

    def released(self, why: str, count: int) -> None:
        """`pressure`, `share`, `superseded`, `closed`, `expired`, `unused` or `forgotten`."""
        self._released.labels(why).inc(count)

    def first_token(self, tenant: str, path: Path, seconds: float) -> None:
        self._ttft.labels(tenant, path).observe(seconds)

    def leg_failed(self, node: str) -> None:
        self._failures.labels(node).inc()

    def turn_refused(self, tenant: str) -> None:
        self._refused.labels(tenant).inc()

    def policy_failed(self, policy: str) -> None:
        self._policy_errors.labels(policy).inc()

    def unkeyed(self, tenant: str) -> None:
        self._unkeyed.labels(tenant).inc()

    def render(self, fleet: Fleet, conversations: Conversations, gate: Gate, tenants: Iterable[str]) -> bytes:
        """The page, with the gauges set to this moment."""
        for tenant in tenants:
            self._under_way.labels(tenant).set(gate.under_way(tenant))
            self._waiting.labels(tenant).set(gate.waiting(tenant))
        self._handles.set(len(conversations))
        self._handle_bytes.set(conversations.size)
        view = fleet.view()
        for node in (*view.prefill, *view.decode):
            self._ready.labels(node.name).set(node.ready)
            self._in_flight.labels(node.name).set(node.in_flight)
            if node.blocks is not None:
                self._pinned.labels(node.name).set(node.blocks.pinned / max(1, node.blocks.total))
            if node.compute.samples:
                self._compute.labels(node.name).set(node.compute.seconds(_USUAL_TOKENS) / _USUAL_TOKENS)
        for pair, cost in view.transfers.items():
            self._transfer.labels(*pair).set(cost.seconds(_USUAL_TOKENS) / _USUAL_TOKENS)
        return generate_latest(self.registry)
