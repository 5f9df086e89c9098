"""Where each node of a cluster listens, by its configuration."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvflow.config.schema import ClusterConfig, Kind, Pool
from kvflow.types import Role

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    role: Role
    index: int
    """Among the nodes of its role."""
    host: str
    port: int
    side_channel_port: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def url(self) -> str:
        return base_url(self.host, self.port)


def pool_of(cluster: ClusterConfig, role: Role) -> Pool:
    return cluster.prefill if role is Role.PREFILL else cluster.decode


def addresses(cluster: ClusterConfig) -> Iterator[Address]:
    """Of all nodes but external ones. On each host, the ports of a role count up from the pool's first."""
    for role in Role:
        pool = pool_of(cluster, role)
        on_host: Counter[str] = Counter()
        for index, host in enumerate(_hosts(cluster, pool)):
            yield Address(
                role=role,
                index=index,
                host=host,
                port=(pool.port or 0) + on_host[host],
                side_channel_port=(pool.side_channel_port or 0) + on_host[host],
            )
            on_host[host] += 1


def _hosts(cluster: ClusterConfig, pool: Pool) -> list[str]:
    match cluster.kind:
        case Kind.external:
            return []
        case Kind.remote:
            return pool.hosts
    everywhere = cluster.listen in ("0.0.0.0", "::")
    return [LOOPBACK if everywhere else cluster.listen] * (pool.replicas or 0)


def base_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
