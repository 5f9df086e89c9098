"""All tenants, and which policy each of them has at the moment."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvflow.errors import ConfigError, RequestError
from kvflow.policies.policy import Policy
from kvflow.tenants.identity import Identity
from kvflow.tenants.tenant import DEFAULT, Tenant


class Tenants:
    """One event loop owns an instance.

    `catalogue`: the policies that tenants can be given, by name. Without `identity` there must be one tenant, and every
    request is of it.
    """

    def __init__(
        self, tenants: Iterable[Tenant], catalogue: Mapping[str, Policy], identity: Identity | None = None
    ) -> None:
        self._tenants = {t.name: t for t in tenants}
        self._catalogue = dict(catalogue)
        self._identity = identity
        assert identity is not None or len(self._tenants) == 1

    @classmethod
    def single(cls, policy: Policy, catalogue: Mapping[str, Policy] | None = None) -> "Tenants":
        """Everybody is one tenant and needs no key."""
        tenant = Tenant(name=DEFAULT, policy=policy, isolated=False)
        return cls([tenant], {policy.name: policy, **(catalogue or {})})

    @property
    def names(self) -> list[str]:
        return sorted(self._tenants)

    @property
    def catalogue(self) -> Mapping[str, Policy]:
        return self._catalogue

    @property
    def identified(self) -> bool:
        """Whether requests must say whose they are."""
        return self._identity is not None

    def identify(self, headers: Mapping[str, str], peer: str | None) -> Tenant:
        """Who sends a request with these headers from the address `peer`.

        Raises `RequestError`: 401 without a key that is known, 403 where a proxy names a tenant that is not.
        """
        if self._identity is None:
            return next(iter(self._tenants.values()))
        name = self._identity.name(headers, peer)
        if name not in self._tenants:
            raise RequestError(f"there is no tenant {name[:64]!r}", status=403, kind="PermissionDeniedError")
        return self._tenants[name]

    def admit_by(self, identity: Identity) -> None:
        """From now on requests are told apart by this one. Raises `ConfigError` where all are of one tenant."""
        if self._identity is None:
            raise ConfigError("there are no tenants that could have keys.")
        self._identity = identity

    def get(self, name: str) -> Tenant:
        """Raises `RequestError`, 404."""
        if name not in self._tenants:
            known = ", ".join(self.names)
            raise RequestError(f"there is no tenant {name!r}; there are {known}", status=404, kind="NotFoundError")
        return self._tenants[name]

    def offer(self, catalogue: Mapping[str, Policy]) -> None:
        """From now on tenants can be given these policies and no others; what each has at the moment it keeps."""
        self._catalogue = dict(catalogue)

    def swap(self, name: str, policy: str) -> Tenant:
        """From now on the tenant's turns begin with another policy of the catalogue.

        Raises `RequestError`: 404 for an unknown tenant, 400 for an unknown policy.
        """
        tenant = self.get(name)
        if policy not in self._catalogue:
            known = ", ".join(sorted(self._catalogue))
            raise RequestError(f"there is no policy {policy!r}; there are {known}", param="policy")
        self._tenants[name] = tenant = replace(tenant, policy=self._catalogue[policy])
        return tenant


def check_names(names: Iterable[str]) -> None:
    """Raises `ConfigError` for a name that could not stand in a header, a path and a metric's label."""
    for name in names:
        if not name or len(name) > 64 or not all(c.isascii() and (c.isalnum() or c in "._-") for c in name):
            raise ConfigError(f"tenants.{name}: a tenant's name is 1 to 64 letters, digits, dots, dashes, underscores.")
