"""What pages of other sites may ask: engines, as of vLLM itself by default, and nothing that is kvflow's own."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvflow.router.unrouted import ROUTED

_STORED = "/v1/responses/"


class ForBrowsers:
    def __init__(self, app: ASGIApp) -> None:
        self._closed = app
        self._open = CORSMiddleware(app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        app = self._open if path in ROUTED or path.startswith(_STORED) else self._closed
        await app(scope, receive, send)
