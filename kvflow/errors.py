"""Every error that kvflow raises on purpose. One tree, one sentence per error.

A user sees the message, never a traceback: the CLI prints it and exits with `exit_code`, the router turns it into an
OpenAI-shaped body with `status`.
"""


class KvflowError(Exception):
    """Base of the tree."""

    exit_code = 1
    status = 500
    kind = "internal_server_error"


class ConfigError(KvflowError):
    """A configuration that is refused before anything starts. The message names the key and what it takes."""

    exit_code = 2


class ModelError(KvflowError):
    """A model that cannot be fetched, checked, converted or found."""


class StartError(KvflowError):
    """A node, or the router's own port, that did not come up."""


class VersionError(KvflowError):
    """An engine whose internals are not the ones the connector was written for."""


class WireError(KvflowError):
    """Something another process sent that does not follow the contract in `kvflow.connector.wire`."""

    status = 502
    kind = "bad_gateway"


class RequestError(KvflowError):
    """A request that is answered with `status` and an OpenAI-shaped body.

    `param` names the offending field or header, where there is one; `retry_after` is in seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after = retry_after


class NoNodeError(RequestError):
    """No node of a role is left that could take the turn."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, kind="ServiceUnavailableError", retry_after=1)
