"""How long to wait before a process that died is started again."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Each short life doubles the wait, up to `max_s`; a life of `healthy_s` and more makes up for all before it."""

    first_s: float = 1.0
    max_s: float = 60.0
    healthy_s: float = 300.0
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def after(self, lived_s: float) -> float:
        """Seconds to wait after a life of `lived_s` seconds."""
        wait_s = self.first_s if lived_s >= self.healthy_s else self._next_s
        self._next_s = min(2 * wait_s, self.max_s)
        return wait_s
