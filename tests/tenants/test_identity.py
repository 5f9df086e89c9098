import pytest
from starlette.datastructures import Headers

from kvflow.errors import RequestError
from kvflow.tenants import Identity, Keys
from kvflow.tenants.keys import hash_of

KEYS = Keys.parse(f"acme {hash_of('a')}\nglobex {hash_of('g')}", ["acme", "globex"])


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"authorization": "Bearer a"}, "acme"),
        ({"authorization": "bearer  g "}, "globex"),
        ({"x-api-key": "g"}, "globex"),
        ({"authorization": "Bearer a", "x-api-key": "a"}, "acme"),
        ({"authorization": "Basic Zm9v", "x-api-key": "g"}, "globex"),
        ({"authorization": "Bearer a", "x-kvflow-tenant": "globex"}, "acme"),
    ],
)
def test_a_key_says_whose_a_request_is(headers: dict[str, str], name: str) -> None:
    assert Identity(KEYS).name(headers, "203.0.113.9") == name


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({}, "no API key was given"),
        ({"authorization": ""}, "no API key was given"),
        ({"authorization": "Bearer"}, "no API key was given"),
        ({"authorization": "Basic Zm9v"}, "no API key was given"),
        ({"x-api-key": " "}, "no API key was given"),
        ({"x-api-key": "wrong-one"}, "not known"),
        ({"authorization": f"Bearer {hash_of('a')}"}, "not known"),
        ({"authorization": "Bearer a", "x-api-key": "g"}, "different API keys"),
        ({"x-kvflow-tenant": "acme"}, "no API key was given"),
    ],
)
def test_without_a_key_that_is_known_nobody_is_served(headers: dict[str, str], what: str) -> None:
    with pytest.raises(RequestError, match=what) as e:
        Identity(KEYS).name(headers, "203.0.113.9")
    assert e.value.status == 401
    assert "wrong-one" not in str(e.value)


@pytest.mark.parametrize("peer", ["10.1.2.3", "::ffff:10.1.2.3", "fd00::7"])
def test_a_trusted_proxy_names_the_tenant(peer: str) -> None:
    identity = Identity(KEYS, ["10.1.2.0/24", "fd00::/8"])
    assert identity.name({"x-kvflow-tenant": "globex", "authorization": "Bearer a"}, peer) == "globex"
    assert identity.name({"authorization": "Bearer a"}, peer) == "acme"


@pytest.mark.parametrize("peer", ["10.1.3.3", "::1", None, "testclient", ""])
def test_anybody_else_is_not_believed(peer: str | None) -> None:
    identity = Identity(KEYS, ["10.1.2.0/24", "fd00::/8"])
    assert identity.name({"x-kvflow-tenant": "globex", "authorization": "Bearer a"}, peer) == "acme"
    with pytest.raises(RequestError):
        identity.name({"x-kvflow-tenant": "globex"}, peer)


def test_the_header_can_have_another_name() -> None:
    identity = Identity(KEYS, ["10.0.0.1"], "X-Org")
    assert identity.name({"x-org": "acme"}, "10.0.0.1") == "acme"


def test_a_proxy_that_adds_to_what_clients_send_is_not_believed() -> None:
    twice = Headers(raw=[(b"x-kvflow-tenant", b"globex"), (b"x-kvflow-tenant", b"acme")])
    with pytest.raises(RequestError, match="more than once"):
        Identity(KEYS, ["10.0.0.1"]).name(twice, "10.0.0.1")


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_two_keys_under_one_header_are_nobodys(header: str) -> None:
    prefix = b"Bearer " if header == "authorization" else b""
    twice = Headers(raw=[(header.encode(), prefix + key) for key in (b"a", b"b")])
    with pytest.raises(RequestError, match="more than once"):
        Identity(KEYS).name(twice, None)
