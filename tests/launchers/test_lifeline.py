import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvflow.launchers import lifeline
from kvflow.launchers.spawn import Tied, spawn
from tests.launchers.processes import alive, engine, pids, wait_gone, wait_until

KVFLOW = """
import os, sys, time
from kvflow.launchers.spawn import spawn
spawn(sys.argv[2:], {}, os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT))
time.sleep(1000)
"""
KINDS = [
    (),
    ("--deaf",),
    ("--children=2",),
    ("--children=2", "--deaf-children"),
    ("--children=2", "--deaf-children", "--own-groups", "--deaf"),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def started() -> Iterator[list[Tied]]:
    """What a test has spawned; ended after it, whatever came of it."""
    all_of_it: list[Tied] = []
    yield all_of_it
    for tied in all_of_it:
        lifeline.signal_session(tied.process.pid, signal.SIGKILL)
        tied.process.wait()
        os.close(tied.lifeline)


def start(log: Path, started: list[Tied], *options: str) -> Tied:
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    started.append(spawn(engine("--tied", *options), {}, output))
    os.close(output)
    return started[-1]


def test_signals_reach_all_of_a_session_but_the_spared(log: Path, started: list[Tied]) -> None:
    session = start(log, started, "--children=2", "--own-groups").process.pid
    *children, leader = pids(log)
    assert set(lifeline.members(session)) > {*children, leader}
    assert lifeline.signal_session(session, signal.SIGKILL, spare=children[0])
    wait_gone(children[1], leader)
    assert alive(children[0])
    assert lifeline.signal_session(session, signal.SIGKILL)
    wait_gone(children[0])
    wait_until(lambda: not lifeline.signal_session(session, signal.SIGKILL), "an empty session")


@pytest.mark.parametrize("options", KINDS, ids=" ".join)
def test_nothing_outlives_a_kvflow_that_is_killed(log: Path, options: tuple[str, ...]) -> None:
    command = engine("--tied", *options)
    with subprocess.Popen([sys.executable, "-c", KVFLOW, str(log), *command]) as kvflow:
        engine_pids = pids(log)
        guarded = lifeline.members(engine_pids[-1])
        kvflow.send_signal(signal.SIGKILL)
    assert len(guarded) == len(engine_pids) + 1
    wait_gone(*guarded)


def test_nothing_outlives_an_engine_that_is_killed_together_with_kvflow(log: Path) -> None:
    command = engine("--tied", "--children=2", "--deaf-children")
    with subprocess.Popen([sys.executable, "-c", KVFLOW, str(log), *command]) as kvflow:
        guarded = lifeline.members(pids(log)[-1])
        os.kill(pids(log)[-1], signal.SIGKILL)
        kvflow.send_signal(signal.SIGKILL)
    wait_gone(*guarded)


def test_a_kvflow_that_died_before_the_engine_looked_counts(log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    tied = spawn(engine("--tied"), {}, output)
    os.close(tied.lifeline)
    os.close(output)
    assert tied.process.wait(30) == -signal.SIGTERM


def test_children_do_not_outlive_their_engine(log: Path, started: list[Tied]) -> None:
    tied = start(log, started, "--children=2", "--deaf-children")
    guarded = lifeline.members(pids(log)[-1])
    tied.process.send_signal(signal.SIGKILL)
    wait_gone(*guarded)


def test_the_guard_is_not_ended_by_what_ends_others(log: Path, started: list[Tied]) -> None:
    tied = start(log, started, "--children=1", "--deaf-children")
    [child, leader] = pids(log)
    [guard] = {*lifeline.members(leader)} - {child, leader}
    arguments = Path(f"/proc/{guard}/cmdline").read_bytes().split(b"\0")[1:]
    assert not any(b"kvflow" in argument for argument in arguments), "pkill -f kvflow would find it"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guard, number)
    tied.process.send_signal(signal.SIGKILL)
    wait_gone(child, guard)


def test_grandchildren_do_not_see_the_lifeline(log: Path) -> None:
    program = """if True:
        import os
        from kvflow.launchers.lifeline import VARIABLE, watch
        fd = int(os.environ[VARIABLE])
        watch()
        print(VARIABLE in os.environ, os.path.exists(f"/proc/self/fd/{fd}"))
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    tied = spawn((sys.executable, "-c", program), {}, output)
    os.close(output)
    assert tied.process.wait(30) == 0
    os.close(tied.lifeline)
    assert log.read_text() == "False False\n"


def test_watch_does_nothing_in_a_process_that_kvflow_did_not_start() -> None:
    program = "import os; from kvflow.launchers import lifeline as l; l.watch(); print(len(l.members(os.getpid())))"
    done = subprocess.run([sys.executable, "-c", program], start_new_session=True, capture_output=True, check=True)
    assert done.stdout == b"1\n"


def test_tied_runs_a_module_as_python_would(log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    tied = spawn((sys.executable, "-m", "kvflow.launchers.tied", "json.tool", "--help"), {}, output)
    os.close(output)
    assert tied.process.wait(30) == 0
    os.close(tied.lifeline)
    assert "--json-lines" in log.read_text()


def test_a_command_that_cannot_be_run_leaves_no_descriptor_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        spawn(("/does/not/exist",), {}, subprocess.DEVNULL)
    assert os.listdir("/proc/self/fd") == before
