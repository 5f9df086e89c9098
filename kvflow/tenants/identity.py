"""Whose a request is: by its key, or by what a proxy says that is trusted to have checked."""

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from kvflow.errors import RequestError
from kvflow.tenants.keys import Keys

HEADER = "x-kvflow-tenant"
_BEARER = "bearer "


class Unauthorized(RequestError):
    """401; says how to send a key, and never what was sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401, kind="AuthenticationError")


class Identity:
    """`proxies` are addresses and networks from which the tenant's name is believed that stands in `header`."""

    def __init__(self, keys: Keys, proxies: Iterable[str] = (), header: str = HEADER) -> None:
        """Raises `ValueError` for what is no network."""
        self._keys = keys
        self._proxies = [ip_network(p) for p in proxies]
        self._header = header.lower()

    @property
    def keys(self) -> Keys:
        return self._keys

    def name(self, headers: Mapping[str, str], peer: str | None) -> str:
        """A tenant's name, which a proxy may have made up. Raises `Unauthorized`."""
        named = headers.get(self._header)
        if named is not None and self._is_trusted(peer):
            if sum(name == self._header for name in headers) > 1:
                raise Unauthorized(f"{self._header!r} came more than once; a proxy must replace what clients send")
            return named
        key = _key(headers)
        if key is None:
            raise Unauthorized("no API key was given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        tenant = self._keys.tenant_of(key)
        if tenant is None:
            raise Unauthorized("the API key that was given is not known")
        return tenant

    def _is_trusted(self, peer: str | None) -> bool:
        if not self._proxies or peer is None:
            return False
        try:
            address = ip_address(peer)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(_is_in(address, network) for network in self._proxies)


def bearer(headers: Mapping[str, str]) -> str | None:
    """The key of an `Authorization: Bearer` header."""
    given = headers.get("authorization", "")
    return given[len(_BEARER) :].strip() or None if given.lower().startswith(_BEARER) else None


def _key(headers: Mapping[str, str]) -> str | None:
    """Raises `Unauthorized` where two different ones may have been sent: one of them is a mistake."""
    for header in ("authorization", "x-api-key"):
        if sum(name == header for name in headers) > 1:
            raise Unauthorized(f"{header!r} came more than once; send one API key")
    given = bearer(headers), headers.get("x-api-key", "").strip() or None
    if None not in given and given[0] != given[1]:
        raise Unauthorized("'Authorization' and 'x-api-key' carry different API keys; send one of them")
    return given[0] or given[1]


def _is_in(address: object, network: IPv4Network | IPv6Network) -> bool:
    return address in network
