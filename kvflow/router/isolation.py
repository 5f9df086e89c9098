"""What keeps one tenant's requests from touching another's inside the engines they share.

Engines know nothing of tenants. Their prefix caches are told apart by a cache salt on every leg, and so are
fingerprints, which begin with it; stored responses by ids that only the router makes up; media that a request names
instead of sending them by names that are the tenant's own.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from kvflow.errors import RequestError
from kvflow.router.endpoints import Endpoint
from kvflow.tenants import Tenant

PRIORITY_HEADER = "x-vllm-priority"
_SAID = frozenset({"messages", "input"})
"""Fields in whose parts there can be media."""


def confined(body: Mapping[str, Any], endpoint: Endpoint, tenant: Tenant) -> dict[str, Any]:
    """The body of a tenant's request, such that no engine gives it anything of another tenant's.

    Who goes first is not for a tenant to say, and an id that it chose could be that of another's stored response.
    """
    if not tenant.isolated:
        return dict(body)
    taken_out = {"priority", "request_id"} if endpoint.stores else {"priority"}
    out = {k: v for k, v in body.items() if k not in taken_out}
    salt = out.get("cache_salt")
    if salt is None or (isinstance(salt, str) and salt):  # what else there may be, every engine refuses
        out["cache_salt"] = _salt(tenant.name, salt)
    return with_own_media(out, tenant)


def confined_headers(headers: Mapping[str, str], tenant: Tenant) -> dict[str, str]:
    """Of those that are passed on to engines."""
    return {k: v for k, v in headers.items() if not (tenant.isolated and k == PRIORITY_HEADER)}


def no_such_response(name: str) -> RequestError:
    """In vLLM's words, whether it is another tenant's or nobody's."""
    message = f"Response with id '{name}' not found."
    return RequestError(message, status=404, kind="invalid_request_error", param="response_id")


def with_own_media(body: Mapping[str, Any], tenant: Tenant) -> dict[str, Any]:
    """The same, whose media have names of the tenant's own.

    Engines keep images and the like under the `uuid` that a client gives them, for requests that send nothing else:
    under the same one another tenant would be shown them.
    """
    out = dict(body)
    for field in _SAID & out.keys() if tenant.isolated else ():
        if isinstance(said := out[field], list):
            out[field] = [_with_parts(m, tenant.name) if isinstance(m, Mapping) else m for m in said]
    return out


def _with_parts(message: Mapping[str, Any], tenant: str) -> Mapping[str, Any]:
    """`output` is what a tool of a client's has answered, in the items of `/v1/responses`."""
    out = dict(message)
    for field in ("content", "output"):
        if isinstance(parts := message.get(field), list):
            out[field] = [_with_own_uuid(part, tenant) for part in parts]
    return out


def _with_own_uuid(part: Any, tenant: str) -> Any:
    if not isinstance(part, Mapping) or part.get("uuid") is None:
        return part
    return {**part, "uuid": _salt(tenant, part["uuid"])}


def _salt(tenant: str, own: Any) -> str:
    return blake2b(json.dumps([tenant, own]).encode(), digest_size=16).hexdigest()
