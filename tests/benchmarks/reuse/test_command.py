"""The command as a user runs it."""

import json
from pathlib import Path

import pytest

from benchmarks.reuse.__main__ import main


def test_two_policies_and_their_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = ["--policy", "off,aggressive", "--kinds", "growing", "--each", "1", "--prefix-caching", "off"]
    assert main([*words, "--json", str(out), "cluster.simulated.block_size=32"]) == 0
    off, aggressive = json.loads(out.read_text())["runs"]
    assert (off["name"], off["total"]["share"]) == ("off, no caches", 0)
    assert (aggressive["name"], aggressive["total"]["share"], aggressive["total"]["wrong"]) == (
        "aggressive, no caches",
        1,
        0,
    )
    assert {t["path"] for t in aggressive["turns"]} == {"cold", "pull"}
    printed = capsys.readouterr().out
    assert "growing" in printed
    assert "pull" in printed


def test_a_share_below_the_target_is_a_failure() -> None:
    words = ["--policy", "off", "--kinds", "growing", "--each", "1", "--prefix-caching", "off"]
    assert main([*words, "--at-least", "0.98"]) == 1


def test_what_kvflow_says_when_it_refuses_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--policy", "agressive"]) == 1
    assert "no such option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "other"], "neither simulated, real, nor a URL"),
        (["--nodes", "http://127.0.0.1:1"], "--block-size must be given"),
        (["--prefix-caching", "yes"], "neither on nor off"),
        (["--kinds", "growing,shrinking"], "'shrinking' is none of growing"),
        (["--each", "0"], "no whole number above 0"),
    ],
)
def test_arguments_that_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_a_url_where_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "http://127.0.0.1:1", "--block-size", "16", "--users", "2"]
    assert main(words) == 1
    assert "got no answer" in capsys.readouterr().err
