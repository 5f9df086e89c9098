"""`kvflow plan`: what `kvflow serve` would run, for people and for programs."""

import json
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from kvflow import embedded
from kvflow.config import Format, Kind, keys
from kvflow.config.addresses import base_url
from kvflow.expected import Expected, expected
from kvflow.graph import Graph
from kvflow.nodes.base import NodeSpec
from kvflow.nodes.command import argument
from kvflow.tenants import DEFAULT, Tenant

_GUESSED = "tokens, path, first token; guesses until measured"

_ENDLESS = 10_000
"""Columns of an output that is no terminal: nothing is wrapped there."""


def show(graph: Graph, form: Format) -> None:
    if form is Format.json:
        print(json.dumps(as_json(graph), indent=2))
    else:
        write(_Console(width=None if sys.stdout.isatty() else _ENDLESS, highlight=False), graph)


def write(console: Console, graph: Graph) -> None:
    """The plan for people."""
    _Page(console).write(graph)


def as_json(graph: Graph) -> dict[str, Any]:
    config = graph.config
    return {
        "model": {"name": graph.model, "path": config.model.path},
        "cluster": {"name": config.cluster.name, "kind": config.cluster.kind},
        "router": {"url": router_url(graph), "host": graph.router.host, "port": graph.router.port},
        "policy": {"name": graph.policy.name, "words": graph.policy.describe()},
        "tenants": [_tenant(graph, tenant) for tenant in _served(graph)],
        "keys": keys.tenants_source(config) or None,
        "admin": _admin(graph) or None,
        "nodes": [_node(spec) for spec in graph.specs],
    }


def _served(graph: Graph) -> tuple[Tenant, ...]:
    return graph.tenants or (Tenant(name=DEFAULT, policy=graph.policy, isolated=False),)


def _tenant(graph: Graph, tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "policy": {"name": tenant.policy.name, "words": tenant.policy.describe()},
        "limits": asdict(tenant.limits),
        "turns": [asdict(turn) for turn in expected(graph, tenant.policy)],
    }


def _admin(graph: Graph) -> str:
    """Where the admin surface is, and where its key comes from; empty if it has none."""
    config, source = graph.config, keys.admin_source(graph.config)
    port = config.admin.port
    address = router_url(graph) if port is None else base_url(config.admin.host, port)
    return f"{address}/admin, with the key from {source}" if source else ""


def _node(spec: NodeSpec) -> dict[str, Any]:
    url = urlsplit(spec.url)
    return {
        "name": spec.name,
        "role": spec.role,
        "url": spec.url,
        "host": url.hostname,
        "port": url.port,
        "side_channel": side_channel(spec),
        "command": list(spec.command),
        "command_line": " ".join(command_line(spec)),
        "env": dict(spec.env),
        "connector": connector(spec),
    }


def connector(spec: NodeSpec) -> dict[str, Any] | None:
    """vLLM's `KVTransferConfig` of a node, read from its command line; None where kvflow does not set it."""
    text = argument(spec.command, "kv_transfer_config")
    settings: dict[str, Any] | None = None if text is None else json.loads(text)
    return settings


def side_channel(spec: NodeSpec) -> dict[str, Any] | None:
    env = dict(spec.env)
    host, port = env.get("VLLM_NIXL_SIDE_CHANNEL_HOST"), env.get("VLLM_NIXL_SIDE_CHANNEL_PORT")
    return None if host is None or port is None else {"host": host, "port": int(port)}


def router_url(graph: Graph) -> str:
    return base_url(graph.router.host, graph.router.port)


def command_line(spec: NodeSpec) -> list[str]:
    """Environment and command for a shell, in pieces that belong on one line each; empty for a node known by URL."""
    if not spec.command:
        return []
    pieces = [f"{name}={shlex.quote(value)}" for name, value in spec.env]
    piece: list[str] = []
    for word in spec.command:
        if word.startswith("--"):
            pieces.append(shlex.join(piece))
            piece = []
        piece.append(word)
    return [*pieces, shlex.join(piece)]


class _Console(Console):
    """Leaves it to the caller what becomes of a reader that has gone; rich's own ends the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Page:
    """Words wrap at the edge of a terminal, between words; command lines never do."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, graph: Graph) -> None:
        self._section("Plan", _columns(_choices(graph)))
        self._words(_what_serve_does(graph))
        self._console.print()
        self._section("Nodes", _columns(_nodes(graph)))
        self._section("Policy", graph.policy.describe(), wrap=True)
        if graph.tenants:
            self._tenants(graph)
        self._section("Turns on idle nodes", _turns(graph), f" ({_GUESSED})")
        settings = next(filter(None, map(connector, graph.specs)), None)
        if settings:
            self._section("Connector", _columns(_settings(settings)))
        for spec in graph.specs:
            if spec.command:
                self._command(spec, _runs_on(graph, spec))

    def _tenants(self, graph: Graph) -> None:
        self._section("Tenants", _columns(_limits(graph)))
        for tenant in graph.tenants:
            if tenant.policy is not graph.policy:
                self._section(f"Policy of {tenant.name}", tenant.policy.describe(), wrap=True)

    def _section(self, title: str, lines: Iterable[str], more: str = "", *, wrap: bool = False) -> None:
        self._title(title, more)
        for line in lines:
            if wrap:
                self._words(line, indent="  ")
            else:
                self._line(Text("  " + line))
        self._console.print()

    def _command(self, spec: NodeSpec, place: str) -> None:
        self._title(spec.name, f" ({place})")
        first, *others = command_line(spec)
        self._line(Text(" \\\n  ".join([first, *others])))
        self._console.print()

    def _title(self, title: str, more: str = "") -> None:
        self._line(Text.assemble((title, "bold"), more))

    def _words(self, sentence: str, indent: str = "") -> None:
        width = self._console.width
        for line in textwrap.wrap(sentence, width, initial_indent=indent, subsequent_indent=indent * 2):
            self._line(Text(line))

    def _line(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def _choices(graph: Graph) -> Iterator[tuple[str, str]]:
    yield "model", graph.model
    yield "cluster", graph.config.cluster.name
    yield "policy", graph.policy.name
    if graph.tenants:
        yield "keys", keys.tenants_source(graph.config) or "none yet: kvflow serve needs some"
    if admin := _admin(graph):
        yield "admin", admin


def _limits(graph: Graph) -> Iterator[tuple[str, ...]]:
    yield "name", "policy", "turns at once", "waiting", "for at most", "share of blocks"
    for tenant in graph.tenants:
        limits = tenant.limits
        yield (
            tenant.name,
            tenant.policy.name,
            "any number" if limits.max_turns is None else str(limits.max_turns),
            str(limits.max_waiting),
            f"{limits.max_wait_s:g} s",
            "by policy" if limits.max_pinned_share is None else f"{limits.max_pinned_share:.0%}",
        )


def _turns(graph: Graph) -> list[str]:
    """One column for each policy that somebody begins with."""
    found = {id(t.policy): t for t in _served(graph)}
    names = [t.policy.name for t in found.values()]
    shown = [n if names.count(n) == 1 else f"{n} ({t.name})" for n, t in zip(names, found.values(), strict=True)]
    rows = [("kept", "new", *shown)]
    for turns in zip(*(expected(graph, t.policy) for t in found.values()), strict=True):
        one = turns[0]
        rows.append((str(one.history or "-"), str(one.new), *map(_turn, turns)))
    return _columns(rows)


def _turn(turn: Expected) -> str:
    if turn.path is None:
        return "no node"
    return turn.path if turn.first_token_s is None else f"{turn.path} {turn.first_token_s:.3g} s"


def _what_serve_does(graph: Graph) -> str:
    match graph.config.cluster.kind:
        case Kind.local:
            fetch = ""
            if graph.needs_embedded_model and not embedded.model_dir().is_dir():
                fetch = "fetches the model, "
            return f"`kvflow serve` {fetch}starts these nodes and stops them at its end; logs: {graph.log_dir}"
        case Kind.remote:
            return "Start each node on its host with its command line below; `kvflow serve` waits until they are ready."
        case Kind.external:
            return "These engines are not kvflow's to start; `kvflow serve` waits until they are ready."
        case Kind.simulated:
            return "`kvflow serve` simulates these nodes within its own process."


def _nodes(graph: Graph) -> Iterator[tuple[str, ...]]:
    yield "name", "role", "API", "handshakes", "runs on"
    yield "router", "router", f"{router_url(graph)}/v1", "", "this machine"
    for spec in graph.specs:
        channel = side_channel(spec)
        handshakes = f"{channel['host']}:{channel['port']}" if channel else ""
        yield spec.name, spec.role, spec.url, handshakes, _runs_on(graph, spec)


def _runs_on(graph: Graph, spec: NodeSpec) -> str:
    env = dict(spec.env)
    host = (urlsplit(spec.url).hostname or "") if graph.config.cluster.kind in (Kind.remote, Kind.external) else ""
    gpus, cpus = env.get("CUDA_VISIBLE_DEVICES"), env.get("VLLM_CPU_OMP_THREADS_BIND")
    part = f"GPU {gpus}" if gpus else f"CPU {cpus}" if cpus else ""
    return ", ".join(filter(None, (host, part))) or "this machine"


def _settings(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in {**settings, **settings.get("kv_connector_extra_config", {})}.items():
        if name == "kv_role":
            yield name, "kv_producer on prefill, kv_consumer on decode nodes"
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value))
        elif not isinstance(value, dict):
            yield name, value if isinstance(value, str) else json.dumps(value)


def _columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with the cells of each column below one another."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
