"""What the documentation says exists: pages, sections, keys, commands, reasons, metrics, numbers."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvflow import cli
from kvflow.config import check_servable, compose, load
from kvflow.router.metrics import Metrics
from kvflow.types import Reason

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
USERS_OWN = ("--config-dir", "model=llama")
"""Words of commands that only make sense with the files that the page tells to write."""


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def anchors(text: str) -> set[str]:
    """As GitHub derives them from headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def commands() -> Iterator[list[str]]:
    """Words of every `kvflow serve` and `kvflow plan` in an indented block."""
    for file in PAGES:
        text = file.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ {4,}kvflow ((?:serve|plan)\b.*)$", text, re.MULTILINE):
            yield shlex.split(line.partition(" | ")[0], comments=True)


COMMANDS = [c for c in commands() if not any(w in c for w in USERS_OWN) and not any(w.startswith("-") for w in c)]


@pytest.mark.parametrize("file", PAGES, ids=lambda f: f.name)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            linked = file.parent / path if path else file
            assert linked.is_file(), target
            assert not anchor or anchor in anchors(linked.read_text()), target


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_are_accepted(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    verb, overrides = words[0], words[1:]
    if verb == "plan":
        assert cli.main(words) == 0, capsys.readouterr().err
    else:
        check_servable(load(compose(verb, overrides)))


def test_keys_exist() -> None:
    config = compose("plan", ["policy=adaptive"])  # which has the keys of all
    text = "\n".join(file.read_text() for file in PAGES)
    groups = "model|cluster|connector|policy|router|conversations|auth|admin"
    keys = set(re.findall(rf"[`+~']((?:{groups})(?:\.\w+)+)\b(?!\.)", text))
    assert len(keys) > 40
    for key in keys:
        known = re.sub(r"\.(engine_args|env)\..*", r".\1", key)
        assert OmegaConf.select(config, known, default=config) is not config, key


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained(reason: Reason) -> None:
    assert f"| `{reason}` |" in page("operate.md")


def test_every_metric_is_explained_and_no_other() -> None:
    families = Metrics().registry.collect()
    shown = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    assert set(re.findall(r"\bkvflow_\w+", page("operate.md"))) == shown


@pytest.mark.parametrize("policy", ["off", "conservative", "balanced", "aggressive", "adaptive"])
def test_the_table_of_policies_has_their_numbers(policy: str) -> None:
    row = next(line for line in page("policies.md").splitlines() if line.startswith(f"| `{policy}`"))
    config = compose("plan", [f"policy={policy}"]).policy
    if config.reuse.enabled:
        numbers = (config.reuse.min_pull_tokens, config.retention.ttl_s / 60, 100 * config.retention.max_pinned_share)
        shown = [n for n in numbers if n]  # a threshold of 0 is none
        assert [float(n) for n in re.findall(r"\d+", row)[: len(shown)]] == shown
    else:
        assert not re.search(r"\d", row)
