"""One prefill leg as the connector sees it, from the arrival of the request to its report. Imports no vLLM."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvflow.connector.wire import KEY, DecodeOrder, PrefillOrder, PrefillReport
from kvflow.types import Reason

_HANDLE_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(slots=True, kw_only=True)
class Pull:
    """Lengths in tokens. The scheduler may ask for the same request many times; only the first pull ever starts."""

    prompt: int
    offered: int = 0
    """What the handle covers; 0 without a handle."""
    verified: int = 0
    minimum: int = 0
    obstacle: Reason | None = None
    """Why nothing can be pulled, whatever was verified."""
    local: int = 0
    pulled: int = 0
    settled: bool = False
    """Blocks were allocated: the pull has been started, or the decode node told that there will be none."""
    failed: bool = False
    provable: int | None = None
    """What `verified` would be if nothing differed; a prompt that ends inside a span cannot be proven to its end."""
    digest: str | None = None
    """Of the whole prompt."""

    def wanted(self, local: int) -> int:
        """Tokens to pull beyond the `local` ones of the prefix cache."""
        if self.settled and not self.failed:
            return 0  # preempted after the pull: vLLM starts no second one, and would wait for it for ever
        self.local = local
        count = self.verified - local
        return count if not self.settled and self._may(count) else 0

    def settle(self, pulled: int) -> None:
        if not self.settled:
            self.settled, self.pulled = True, pulled

    def fail(self) -> None:
        self.failed, self.pulled = True, 0

    def report(self, blocks: dict[str, int] | None) -> PrefillReport:
        return PrefillReport(
            prompt_tokens=self.prompt,
            verified_tokens=self.verified,
            local_tokens=self.local,
            pulled_tokens=self.pulled,
            reason=self.reason(),
            prompt_digest=self.digest,
            blocks=blocks,
        )

    def reason(self) -> Reason | None:
        """Why no more was reused; None for a leg without a handle, and for one that reused all there was."""
        if not self.offered:
            return None
        if self.failed:
            return Reason.TRANSFER_FAILED
        if self.obstacle:
            return self.obstacle
        if self.verified < (min(self.offered, self.prompt) if self.provable is None else self.provable):
            return Reason.DIVERGED
        if self.pulled:
            return None
        return Reason.LOCAL_CACHE if self.local >= self.verified else Reason.BELOW_THRESHOLD

    def _may(self, count: int) -> bool:
        return self.obstacle is None and count > 0 and count >= self.minimum


class Sources:
    """KV of other engines that this one was to read, and whether it has been spoken for. The last `limit`.

    The first to come has it: the leg that reads it, or the word that none will. A router whose client left says so
    without knowing whether the leg has arrived; what a leg is reading must not be let go, and what was let go not read.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._spoken_for: OrderedDict[tuple[str, str], None] = OrderedDict()

    def claim(self, params: Mapping[str, Any]) -> bool:
        """False if somebody has come before."""
        source = str(params.get("remote_engine_id")), str(params.get("remote_request_id"))
        if source in self._spoken_for:
            return False
        self._spoken_for[source] = None
        if len(self._spoken_for) > self._limit:
            self._spoken_for.popitem(last=False)
        return True


def has_handle(params: Mapping[str, Any]) -> bool:
    """Whether a prefill leg's params say where a decode node keeps KV."""
    blocks = params.get("remote_block_ids")
    listed = isinstance(blocks, list) and bool(blocks) and all(isinstance(group, list) for group in blocks)
    return listed and all(params.get(k) is not None for k in _HANDLE_KEYS)


def cut(blocks: list[list[int]], tokens: int, block_size: int) -> list[list[int]]:
    """The part of each cache group's blocks that holds the first `tokens`. vLLM reads a list from its end."""
    count = -(-tokens // block_size)
    return [list(group[:count]) for group in blocks]


def prefill_order(params: Mapping[str, Any]) -> PrefillOrder:
    """A leg without an order of ours pulls nothing. Raises `WireError`."""
    return PrefillOrder.from_wire(params.get(KEY) or {})


def decode_order(params: Mapping[str, Any]) -> DecodeOrder:
    """A leg without an order of ours keeps nothing. Raises `WireError`."""
    return DecodeOrder.from_wire(params.get(KEY) or {})
