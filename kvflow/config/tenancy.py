"""What is refused of tenants, of who is let in, and of who may change that. One sentence each."""

import re
from collections.abc import Iterator
from ipaddress import ip_address, ip_network

from kvflow.config import keys
from kvflow.config.schema import Config
from kvflow.tenants.tenants import check_names

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SECRET = ("authorization", "x-api-key", "cookie")


def check(config: Config) -> Iterator[str]:
    """By the configuration alone."""
    check_names(config.tenants)
    yield from _policies(config)
    yield from _auth(config)
    yield from _open_to_all(config)


def check_secrets(config: Config) -> Iterator[str]:
    """What depends on where keys come from, too; planning needs none of them."""
    auth, source = config.auth, keys.tenants_source(config)
    if config.tenants and not source and not auth.trusted_proxies:
        yield (
            "tenants: nobody could be served, since no tenant has a key; name a file with keys in auth.keys_file or "
            f"{keys.FILE_VARIABLE}, put them into {keys.VARIABLE}, or name a proxy in auth.trusted_proxies."
        )
    if source and not config.tenants:
        yield f"{source}: there are keys, and no tenants that they could be of; name those under tenants."
    yield from _admin(config)


def _policies(config: Config) -> Iterator[str]:
    for name, tenant in config.tenants.items():
        if tenant.policy and "_target_" not in tenant.policy:
            key = f"tenants.{name}.policy"
            yield f"{key}: single keys change an option; choose one, as in +policy@{key}=balanced."


def _auth(config: Config) -> Iterator[str]:
    auth = config.auth
    for proxy in auth.trusted_proxies:
        try:
            ip_network(proxy)
        except ValueError:
            yield f"auth.trusted_proxies: {proxy} is neither an address nor a network such as 10.0.0.0/24."
    if not _HEADER.fullmatch(auth.tenant_header):
        yield f"auth.tenant_header: {auth.tenant_header!r} cannot be the name of a header."
    elif auth.tenant_header.lower() in _SECRET:
        yield f"auth.tenant_header: {auth.tenant_header} carries keys; name another."
    for key, needs in (("anonymous", not config.tenants), ("trusted_proxies", bool(config.tenants))):
        if getattr(auth, key) and not needs:
            yield f"auth.{key}: says something only {'without' if key == 'anonymous' else 'with'} tenants."


def _open_to_all(config: Config) -> Iterator[str]:
    if not (config.tenants or config.auth.anonymous or is_loopback(config.router.host)):
        yield (
            f"router.host: on {config.router.host} everybody who reaches this machine would be served without a key; "
            "name tenants, or set auth.anonymous=true."
        )


def _admin(config: Config) -> Iterator[str]:
    admin = config.admin
    if not keys.admin_source(config):
        if admin.port is not None:
            yield f"admin.port: needs a key, in a file that admin.key_file names or in {keys.ADMIN_VARIABLE}."
        return
    key, host = ("router.host", config.router.host) if admin.port is None else ("admin.host", admin.host)
    if not admin.public and not is_loopback(host):
        instead = "give admin.port a port of its own" if admin.port is None else "set admin.host=127.0.0.1"
        yield (
            f"{key}: on {host} other machines could reach what changes tenants; {instead}, or set admin.public=true."
        )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
