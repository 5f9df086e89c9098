"""What is changed of tenants while they are served: checked first, all or nothing, and logged with who and what."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvflow.errors import ConfigError, RequestError
from kvflow.policies import honour
from kvflow.policies.policy import Policy
from kvflow.tenants import Tenant, Tenants
from kvflow.tenants.catalogue import Catalogue
from kvflow.tenants.identity import Identity
from kvflow.types import View

log = logging.getLogger("kvflow.admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """What files and the environment say at the moment."""

    catalogue: Catalogue
    identity: Identity | None = None
    """None: everybody is one tenant."""


class Changes:
    """One event loop owns an instance. `read` may block; it raises `ConfigError` for what is not fit to be used."""

    def __init__(
        self, tenants: Tenants, catalogue: Catalogue, view: Callable[[], View], read: Callable[[], Fresh]
    ) -> None:
        self.tenants = tenants
        self._catalogue = catalogue
        self._view = view
        self._read = read
        self._reading = asyncio.Lock()

    @property
    def catalogue(self) -> Catalogue:
        return self._catalogue

    def policy(self, name: str) -> Policy:
        """One that tenants can be given. Raises `RequestError`: 400 if there is none of that name, 409 if broken."""
        catalogue = self._catalogue
        if name in catalogue.broken:
            raise _conflict(f"the policy {name!r} is broken: {catalogue.broken[name]}", "policy")
        if name not in catalogue.policies:
            known = ", ".join(sorted(catalogue.policies))
            raise RequestError(f"there is no policy {name[:64]!r}; there are {known}", param="policy")
        return catalogue.policies[name]

    def give(self, by: object, tenant: str, policy: str) -> Tenant:
        """Give a tenant another policy; turns under way keep theirs.

        Raises `RequestError`: 404 for an unknown tenant, 400 for an unknown policy, 409 for one that cannot be had.
        """
        before = self.tenants.get(tenant).policy.name
        try:
            if why := honour.obstacle(self.policy(policy), self._view()):
                raise _conflict(f"the policy {policy!r} {why}", "policy")
            after = self.tenants.swap(tenant, policy)
        except RequestError as e:
            log.warning("%s: the policy of tenant %s stays %s: %s", by, tenant, before, e)
            raise
        log.info("%s: the policy of tenant %s: %s -> %s", by, tenant, before, policy)
        return after

    async def reload(self, by: object) -> None:
        """Read keys and policies anew. Raises `RequestError`, 409, and changes nothing, where one is not fit."""
        async with self._reading:
            try:
                fresh = await asyncio.to_thread(self._read)
                self._take(fresh)
            except ConfigError as e:
                log.warning("%s: keys and policies stay as they were: %s", by, e)
                raise _conflict(f"keys and policies stay as they were: {e}") from None
        keys = "" if fresh.identity is None else f"{len(fresh.identity.keys)} keys, "
        log.info("%s: read anew: %spolicies %s", by, keys, ", ".join(sorted(fresh.catalogue.policies)))

    def _take(self, fresh: Fresh) -> None:
        for name, why in sorted(fresh.catalogue.broken.items()):
            if name not in self._catalogue.broken:
                raise ConfigError(f"the policy {name} is broken: {why}")
        if fresh.identity is not None:
            self.tenants.admit_by(fresh.identity)
        self.tenants.offer(fresh.catalogue.policies)
        self._catalogue = fresh.catalogue


def _conflict(message: str, param: str | None = None) -> RequestError:
    return RequestError(message, status=409, kind="ConflictError", param=param)
