from collections.abc import Callable
from typing import Any

import pytest

from kvflow.connector.versions import HOOKS, Hook, check, find_installed
from kvflow.errors import VersionError

HOOK = Hook("module:Class.method", ("self", "request"), frozenset({"_table"}))


class Expected:
    def method(self, request: object) -> None:
        self._table = request


class Renamed:
    def method(self, new_request: object) -> None:
        self._table = new_request


class Emptied:
    def method(self, request: object) -> None:
        self._other = request


def finder(found: type) -> Callable[[str], Any]:
    return lambda path: getattr(found, path.partition(":")[2].split(".")[-1])


@pytest.mark.usefixtures("vllm")
def test_the_installed_vllm_passes() -> None:
    check()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.1+cpu", "0.32"])
def test_patch_releases_pass(version: str) -> None:
    check(version, finder(Expected), (HOOK,))


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.32.0", "dev"])
def test_other_releases_are_named_with_what_is_supported(version: str) -> None:
    with pytest.raises(VersionError, match=rf"needs vLLM 0\.32\.x, and {version} is installed\.$"):
        check(version, finder(Expected), (HOOK,))


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (Renamed, r"takes \(self, new_request\) instead of \(self, request\)"),
        (Emptied, "no longer uses _table"),
        (object, "is missing"),
    ],
)
def test_a_changed_hook_is_named(found: type, fault: str) -> None:
    with pytest.raises(VersionError, match=rf"in this 0\.32\.0 module:Class\.method {fault}\.$"):
        check("0.32.0", finder(found), (HOOK,))


@pytest.mark.usefixtures("vllm")
def test_one_changed_hook_among_the_real_ones_is_found() -> None:
    changed = HOOKS[-1].path

    def find(path: str) -> Any:
        return Renamed.method if path == changed else find_installed(path)

    with pytest.raises(VersionError, match=changed.rpartition(".")[2]):
        check("0.32.0", find)


def test_what_cannot_be_imported_is_missing() -> None:
    hooks = (Hook("kvflow.no_such_module:f", ()), Hook("kvflow.errors:no_such_name", ()))
    for hook in hooks:
        with pytest.raises(VersionError, match="is missing"):
            check("0.32.0", hooks=(hook,))
