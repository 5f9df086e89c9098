import pytest

from kvflow.errors import ConfigError
from kvflow.tenants.keys import Keys, hash_of, is_hash, new_key

ONE, TWO = "kvf_one-of-them", "kvf_another-one"


def parse(*lines: str) -> Keys:
    return Keys.parse("\n".join(lines), ["acme", "globex"], "keys.txt")


def test_a_tenant_may_have_several_keys_and_lines_may_have_comments() -> None:
    keys = parse("# ours", f"acme {hash_of(ONE)}  # the old one", "", f"acme {hash_of(TWO)}")
    assert (keys.tenant_of(ONE), keys.tenant_of(TWO), keys.tenant_of("kvf_third")) == ("acme", "acme", None)
    assert len(keys) == 2


def test_a_variable_may_hold_them_between_commas() -> None:
    keys = Keys.parse(f"acme {hash_of(ONE)}, globex {hash_of(TWO)}", ["acme", "globex"])
    assert (keys.tenant_of(ONE), keys.tenant_of(TWO)) == ("acme", "globex")


def test_the_hash_of_a_key_is_no_key() -> None:
    assert parse(f"acme {hash_of(ONE)}").tenant_of(hash_of(ONE)) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"initech {hash_of(ONE)}", "keys.txt, line 2: there is no tenant 'initech'; there are acme, globex."),
        (f"globex {hash_of(TWO)}", "keys.txt, line 2: globex has the same key as acme."),
        ("acme", "keys.txt, line 2: write a tenant's name and the hash of its key, as in acme sha256:0123…."),
        (f"acme {ONE}", "keys.txt, line 2: what follows the name is no hash;"),
        (f"acme {hash_of(ONE).upper()}", "keys.txt, line 2: what follows the name is no hash;"),
        (f"acme {hash_of(ONE)}0", "keys.txt, line 2: what follows the name is no hash;"),
    ],
)
def test_what_makes_no_sense_is_refused_by_line(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse(f"acme {hash_of(TWO)}", line)
    assert str(e.value).startswith(message)


@pytest.mark.parametrize(
    "line", [f"acme {ONE}", f"{ONE} acme", ONE, f"{ONE} {hash_of(TWO)}", f"{'x' * 40} {hash_of(TWO)}"]
)
def test_what_may_be_a_key_is_never_shown(line: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse(line)
    assert ONE not in str(e.value)
    assert "x" * 40 not in str(e.value)


def test_new_keys_are_new_and_long() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("kvf_") and len(key) > 40 for key in made)
    assert all(is_hash(hash_of(key)) and not is_hash(key) for key in made)


def test_keys_do_not_show_themselves() -> None:
    assert ONE not in repr(parse(f"acme {hash_of(ONE)}"))
