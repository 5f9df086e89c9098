"""Imports go one way, and what is heavy stays where it belongs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kvflow"

LAYERS = (
    ("types", "errors"),
    ("policies", "conversations", "connector"),
    ("launchers",),
    ("nodes", "embedded"),
    ("tenants",),
    ("router",),
    ("config",),
    ("placement",),
    ("graph",),
    ("supervision", "expected"),
    ("serve", "plan", "bench"),
    ("cli",),
    ("__main__",),
)
"""From the bottom up. A part may import what is below it, and itself."""

HYDRA = ("config", "graph", "cli")
ENGINE_ENTRY = "nodes.engine_entry"


def modules() -> dict[str, Path]:
    """Every module of the package, by its name within it."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, by their names within it."""
    known = modules()
    for name in imports(path):
        within = name.removeprefix("kvflow.")
        if name.startswith("kvflow."):
            yield within if within in known else within.rpartition(".")[0]


def layer(module: str) -> int:
    part = module.partition(".")[0]
    return next(i for i, parts in enumerate(LAYERS) if part in parts)


ALL = sorted(m for m in modules() if m)


@pytest.mark.parametrize("module", ALL)
def test_imports_go_down(module: str) -> None:
    part = module.partition(".")[0]
    for other in ours(modules()[module]):
        if other and other.partition(".")[0] != part:
            assert layer(other) < layer(module), f"kvflow.{module} imports kvflow.{other}"


@pytest.mark.parametrize("module", ALL)
def test_only_configuration_knows_hydra(module: str) -> None:
    if module.partition(".")[0] not in HYDRA:
        assert not [n for n in imports(modules()[module]) if n.startswith(("hydra", "omegaconf"))]


@pytest.mark.parametrize("module", ALL)
def test_only_the_connector_and_the_engines_entry_know_vllm(module: str) -> None:
    if module.partition(".")[0] != "connector" and module != ENGINE_ENTRY:
        assert not [n for n in imports(modules()[module]) if n.partition(".")[0] == "vllm"]


def test_what_others_use_of_the_connector_needs_no_vllm() -> None:
    used = {o for m in ALL if not m.startswith("connector") for o in ours(modules()[m]) if o.startswith("connector.")}
    assert "connector.wire" in used
    for name in used:
        assert not [n for n in imports(modules()[name]) if n.partition(".")[0] == "vllm"], name


def loaded_after(code: str, env: dict[str, str] | None = None) -> set[str]:
    program = f"import sys; from kvflow.cli import main; {code}; print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    return {name.partition(".")[0] for name in result.stderr.split()}


def test_help_and_version_need_next_to_nothing() -> None:
    for verb in ("--help", "version"):
        assert not {"vllm", "torch", "hydra", "omegaconf", "rich", "aiohttp"} & loaded_after(f"main([{verb!r}])")


def test_completion_help_of_a_verb_and_plan_do_without_vllm(tmp_path: Path) -> None:
    env = {"COMP_LINE": "kvflow serve pol", "PATH": "/usr/bin:/bin", "KVFLOW_CACHE": str(tmp_path)}
    for words in (["-sc", "query=bash"], ["serve", "--help"], ["plan", "format=json"]):
        assert not {"vllm", "torch", "transformers", "nixl"} & loaded_after(f"main({words!r})", env)
