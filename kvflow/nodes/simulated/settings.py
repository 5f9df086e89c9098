"""What kind of engine is simulated."""

from dataclasses import dataclass, field

from kvflow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a simulated engine is. Rates are in tokens per second and 0 means instantly; fixed costs in seconds."""

    prefill: float = 0.0
    decode: float = 0.0
    transfer: float = 0.0
    prefill_s: float = 0.0
    """Of each prefill, however short."""
    transfer_s: float = 0.0
    """Of each pull, however short."""
    start_s: float = 0.0
    """From the start of the node until it listens."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ConfigError(f"simulated.speed.{name} must be at least 0, got {getattr(self, name):g}")

    def prefill_time(self, tokens: int) -> float:
        return self.prefill_s + _time(tokens, self.prefill) if tokens else 0.0

    def transfer_time(self, tokens: int) -> float:
        return self.transfer_s + _time(tokens, self.transfer)

    def decode_time(self) -> float:
        return _time(1, self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str = "simulated"
    """The name that clients use."""
    block_size: int = 16
    """Tokens per KV block."""
    blocks: int = 4096
    max_model_len: int = 8192
    prefix_caching: bool = True
    stock: bool = False
    """An engine without kvflow's connector: one-way, and as prefill node it trusts whatever handle it is given."""
    max_running: int = 64
    """Requests that compute at the same time; the others wait."""
    lease_s: float = 30.0
    """How long a prefill node keeps a prompt for a decode node that does not come."""
    min_answer: int = 8
    max_answer: int = 24
    """Words of an answer that no limit cuts short."""
    bytes_per_token: int = 1024
    speed: Speed = field(default_factory=Speed)

    def __post_init__(self) -> None:
        for name in ("block_size", "blocks", "max_model_len", "max_running", "min_answer", "bytes_per_token"):
            if getattr(self, name) < 1:
                raise ConfigError(f"simulated.{name} must be at least 1, got {getattr(self, name)}")
        if self.blocks < self.longest:
            least = f"at least {self.longest} for max_model_len={self.max_model_len}"
            raise ConfigError(f"simulated.blocks must be {least}, got {self.blocks}")
        if self.max_answer < self.min_answer:
            raise ConfigError(f"simulated.max_answer must be at least {self.min_answer}, got {self.max_answer}")
        if self.lease_s <= 0:
            raise ConfigError(f"simulated.lease_s must be above 0, got {self.lease_s:g}")

    @property
    def longest(self) -> int:
        """Blocks of a request of the full length."""
        return -(-self.max_model_len // self.block_size)


def _time(tokens: int, rate: float) -> float:
    return tokens / rate if rate else 0.0
