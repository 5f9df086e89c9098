"""`kvflow policy`: which policy a running server's tenants have, and another one for one of them."""

import http.client
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from kvflow.cli.words import HELP, plain
from kvflow.errors import ConfigError, KvflowError

KEYS = {"tenant": "the name of a tenant", "policy": "the name of a policy", "url": "the address of the admin surface"}
VARIABLE = "KVFLOW_ADMIN_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0

USAGE = f"""\
kvflow policy [tenant=NAME [policy=NAME]] [url={DEFAULT_URL}]

Shows which policies the tenants of a running server have, or that of one tenant in words, or gives a tenant another.
url is the router's address, or that of admin.port where the server has one. The admin key comes from {VARIABLE}.
"""


class RefusedError(KvflowError):
    """The server says no."""

    exit_code = 2


def run(words: Sequence[str]) -> int:
    if any(w in HELP for w in words):
        print(USAGE, end="")
        return 0
    given = plain("policy", words, KEYS)
    tenant, policy = given.get("tenant"), given.get("policy")
    if policy and not tenant:
        raise ConfigError("tenant: say whose policy it is to be, as in tenant=acme.")
    server = _Server(url=given.get("url", DEFAULT_URL), key=_key())
    if tenant is None:
        for entry in server.ask("GET", "/admin/tenants", "tenants")["tenants"]:
            print(f"{entry['tenant']}: {entry['policy']}")
        return 0
    path = f"/admin/tenants/{quote(tenant, safe='', errors='surrogateescape')}/policy"
    answer = server.ask("PUT", path, "words", {"policy": policy}) if policy else server.ask("GET", path, "words")
    print(f"{answer['tenant']}: {answer['policy']}", *(f"  {line}" for line in answer["words"]), sep="\n")
    return 0


def _key() -> str:
    key = os.environ.get(VARIABLE, "").strip()
    if not key:
        raise ConfigError(f"{VARIABLE}: put the server's admin key there.")
    if key.startswith("sha256:"):
        raise ConfigError(f"{VARIABLE}: holds the hash of a key; the server wants the key itself.")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{VARIABLE}: holds no key.")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """Follows no redirection and asks no proxy: the key goes to the address that was named, and nowhere else."""

    url: str
    key: str

    def ask(self, method: str, path: str, wanted: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON, which has the field `wanted`. Raises `KvflowError`."""
        connection = self._connection()
        data = None if body is None else json.dumps(body)
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        try:
            connection.request(method, self._prefix() + path, data, headers)
            response = connection.getresponse()
            return self._checked(response.status, response.read(), wanted)
        except UnicodeError:
            raise self._no_url() from None
        except (OSError, http.client.HTTPException) as e:
            why = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
            raise KvflowError(f"{self.url} cannot be asked: {why.lower()}.") from None
        finally:
            connection.close()

    def _prefix(self) -> str:
        return urlsplit(self.url).path.rstrip("/")

    def _connection(self) -> http.client.HTTPConnection:
        kinds: dict[str, type[http.client.HTTPConnection]] = {
            "http": http.client.HTTPConnection,
            "https": http.client.HTTPSConnection,
        }
        try:
            parts = urlsplit(self.url)
            host, port, kind = parts.hostname, parts.port, kinds.get(parts.scheme)
        except ValueError:
            host, port, kind = None, None, None
        if host is None or kind is None or " " in self.url or not (self.url.isascii() and self.url.isprintable()):
            raise self._no_url()
        return kind(host, port, timeout=TIMEOUT_S)

    def _no_url(self) -> ConfigError:
        return ConfigError(f"url: {self.url} is not of the form {DEFAULT_URL}.")

    def _checked(self, status: int, raw: bytes, wanted: str) -> Any:
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        if status == http.client.OK and isinstance(answer, dict) and wanted in answer:
            return answer
        error = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(error, dict) and isinstance(said := error.get("message"), str):
            raise (RefusedError if status < http.client.INTERNAL_SERVER_ERROR else KvflowError)(f"{said}.")
        if status == http.client.NOT_FOUND:
            raise KvflowError(
                f"{self.url} has no admin surface: the server has no admin key, or an admin.port of its own for that."
            )
        raise KvflowError(f"{self.url} answered with status {status}, as no kvflow does.")
