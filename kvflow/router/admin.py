"""The admin surface: tenants and their policies, seen and changed over HTTP by whoever has the admin key."""

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvflow.errors import ConfigError, KvflowError, RequestError
from kvflow.router.bodies import parse, read_body
from kvflow.router.changes import Changes, Fresh
from kvflow.router.explaining import Explainer, Question, endpoint
from kvflow.router.shapes import OPENAI, headers_of
from kvflow.tenants import Tenant, Tenants
from kvflow.tenants.catalogue import Catalogue
from kvflow.tenants.identity import Unauthorized, bearer
from kvflow.tenants.keys import hash_of, is_hash, name_of

log = logging.getLogger("kvflow.admin")


@dataclass(frozen=True, slots=True)
class AdminKey:
    hashed: str = field(repr=False)

    @classmethod
    def parse(cls, text: str, source: str) -> "AdminKey":
        """`text` is the key, or its hash. Raises `ConfigError`, which names `source`."""
        if is_hash(text):
            return cls(text)
        if not text.isprintable() or " " in text or text.lower().startswith("sha256:"):
            raise ConfigError(f"{source}: give a key without spaces, or sha256: and 64 lower-case hexadecimal digits.")
        return cls(hash_of(text))

    @property
    def name(self) -> str:
        """What it is called in logs."""
        return name_of(self.hashed)

    def fits(self, key: str) -> bool:
        return hmac.compare_digest(hash_of(key), self.hashed)


@dataclass(frozen=True, slots=True)
class By:
    """Who asks for a change."""

    key: str
    peer: str

    def __str__(self) -> str:
        return f"admin key {self.key} from {self.peer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What can be changed while tenants are served, and by whom."""

    catalogue: Catalogue
    read: Callable[[], Fresh]
    """See `Changes`."""
    key: AdminKey | None = None
    """None: there is no admin surface."""
    apart: bool = False
    """It has an address of its own."""

    @classmethod
    def of(cls, tenants: Tenants) -> "Control":
        """Nothing but what `tenants` has, and nobody."""
        catalogue = Catalogue(policies=tenants.catalogue)
        return cls(catalogue=catalogue, read=lambda: Fresh(catalogue=catalogue))


_Handler = Callable[[Request, By], Awaitable[Response]]


def authorise(key: AdminKey | None, headers: Mapping[str, str]) -> None:
    """Raises `Unauthorized` unless the headers carry the admin key."""
    given = bearer(headers)
    if key is None:
        raise Unauthorized("only the admin key opens this, and kvflow was started without one")
    if given is None:
        raise Unauthorized("no admin key was given; send it as 'Authorization: Bearer KEY'")
    if not key.fits(given):
        raise Unauthorized("this is not the admin key")


class Admin:
    def __init__(self, key: AdminKey, changes: Changes, explainer: Explainer, max_body_bytes: int) -> None:
        self._key = key
        self._changes = changes
        self._explainer = explainer
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        handlers: dict[str, dict[str, _Handler]] = {
            "/admin/tenants": {"GET": self._tenants},
            "/admin/tenants/{tenant}": {"GET": self._tenant},
            "/admin/tenants/{tenant}/policy": {"GET": self._policy, "PUT": self._give},
            "/admin/policies": {"GET": self._policies},
            "/admin/reload": {"POST": self._reload},
            "/admin/explain": {"POST": self._explain},
        }
        return [Route(path, _Resource(self._authorise, by_method)) for path, by_method in handlers.items()]

    def _authorise(self, request: Request) -> By:
        peer = request.client.host if request.client else "an unknown address"
        try:
            authorise(self._key, request.headers)
        except Unauthorized:
            log.warning("%s was refused: it has not the admin key", peer)
            raise
        return By(self._key.name, peer)

    async def _tenants(self, _: Request, __: By) -> Response:
        tenants = map(self._changes.tenants.get, self._changes.tenants.names)
        return JSONResponse({"tenants": [{"tenant": t.name, "policy": t.policy.name} for t in tenants]})

    async def _tenant(self, request: Request, _: By) -> Response:
        tenant = self._changes.tenants.get(request.path_params["tenant"])
        return JSONResponse({**_policy(tenant), "limits": asdict(tenant.limits), "isolated": tenant.isolated})

    async def _policy(self, request: Request, _: By) -> Response:
        return JSONResponse(_policy(self._changes.tenants.get(request.path_params["tenant"])))

    async def _give(self, request: Request, by: By) -> Response:
        name = request.path_params["tenant"]
        wanted = _wanted(await read_body(request, self._max_body_bytes))
        return JSONResponse(_policy(self._changes.give(by, name, wanted)))

    async def _policies(self, _: Request, __: By) -> Response:
        catalogue = self._changes.catalogue
        good = [{"policy": n, "words": p.describe()} for n, p in sorted(catalogue.policies.items())]
        bad = [{"policy": n, "broken": why} for n, why in sorted(catalogue.broken.items())]
        return JSONResponse({"policies": [*good, *bad]})

    async def _reload(self, _: Request, by: By) -> Response:
        await self._changes.reload(by)
        catalogue = self._changes.catalogue
        return JSONResponse({"policies": sorted(catalogue.policies), "broken": dict(catalogue.broken)})

    async def _explain(self, request: Request, _: By) -> Response:
        asked = request.query_params
        if unknown := sorted(set(asked) - {"tenant", "policy", "endpoint"}):
            what = f"{unknown[0][:64]!r} is no parameter; there are tenant, policy, endpoint"
            raise RequestError(what, param=unknown[0][:64])
        raw = await read_body(request, self._max_body_bytes)
        body = parse(raw, "application/json")
        tenant = self._named(asked.get("tenant"))
        policy = self._changes.policy(asked["policy"]) if "policy" in asked else tenant.policy
        question = Question(
            tenant=tenant,
            policy=policy,
            endpoint=endpoint(asked.get("endpoint"), body),
            body=body,
            length=len(raw),
            headers=request.headers,
        )
        # Escaped, since a request can carry half a surrogate pair, which UTF-8 cannot.
        return Response(json.dumps(self._explainer.answer(question)), media_type="application/json")

    def _named(self, name: str | None) -> Tenant:
        names = self._changes.tenants.names
        if name is None and len(names) > 1:
            raise RequestError(f"tenant must be one of {', '.join(names)}", param="tenant")
        return self._changes.tenants.get(names[0] if name is None else name)


@dataclass(frozen=True, slots=True)
class _Resource:
    """One path. Whoever has no key learns nothing but that."""

    authorise: Callable[[Request], By] = field(repr=False)
    by_method: Mapping[str, _Handler] = field(repr=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return
        except KvflowError as e:
            response = Response(OPENAI.body(e), e.status, dict(headers_of(e)), media_type="application/json")
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        by = self.authorise(request)
        handler = self.by_method.get(request.method)
        if handler is not None:
            return await handler(request, by)
        known = ", ".join(self.by_method)
        error = RequestError(f"{request.url.path} takes {known}", status=405, kind="Method Not Allowed")
        return Response(OPENAI.body(error), error.status, {"allow": known}, media_type="application/json")


def _policy(tenant: Tenant) -> dict[str, Any]:
    return {"tenant": tenant.name, "policy": tenant.policy.name, "words": tenant.policy.describe()}


def _wanted(raw: bytes) -> str:
    """The name of a policy, of a body `{"policy": "conservative"}`."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RequestError('the body must be JSON, as in {"policy": "conservative"}')
    if unknown := sorted(set(body) - {"policy"}):
        raise RequestError(f"{unknown[0][:64]!r} is no field; there is policy", param=unknown[0][:64])
    name = body.get("policy")
    if not isinstance(name, str) or not name:
        raise RequestError("policy must be the name of a policy", param="policy")
    return name
