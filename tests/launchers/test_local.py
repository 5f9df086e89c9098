import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvflow.errors import StartError
from kvflow.launchers import lifeline
from kvflow.launchers.local import LocalLauncher, LocalProcess
from tests.launchers.processes import alive, engine, pids

Start = Callable[..., LocalProcess]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start the engine program with a launcher of little patience."""
    launcher = LocalLauncher(log_dir=tmp_path / "logs", term_s=0.2, rest_s=0.2)
    started: list[LocalProcess] = []

    def start(*options: str, command: tuple[str, ...] | None = None, env: dict[str, str] | None = None) -> LocalProcess:
        started.append(launcher.start("decode-0", command or engine(*options), env or {}))
        return started[-1]

    yield start
    for process in started:
        lifeline.signal_session(process.pid, signal.SIGKILL)
        await process.wait()


async def up(process: LocalProcess) -> list[int]:
    return await asyncio.to_thread(pids, process.log)


async def test_output_goes_to_the_log_of_the_node(start: Start, tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['A'], sys.stdin.read(), flush=True); sys.exit('to stderr')"
    process = start(command=(sys.executable, "-c", program), env={"A": "set"})
    assert await process.wait() == 1
    assert process.log == tmp_path / "logs" / "decode-0.log"
    assert process.log.read_text() == "set \nto stderr\n"


async def test_engines_do_not_get_the_keys(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFLOW_ADMIN_KEY", "KVFLOW_KEYS", "KVFLOW_CACHE"):
        monkeypatch.setenv(name, "mine")
    program = "import os; print(sorted(k for k in os.environ if k.startswith('KVFLOW_') and os.environ[k] == 'mine'))"
    process = start(command=(sys.executable, "-c", program))
    assert await process.wait() == 0
    assert process.log.read_text() == "['KVFLOW_CACHE']\n"


async def test_the_log_of_the_previous_life_is_kept(start: Start) -> None:
    for life in ("first", "second", "third"):
        process = start("--exit=0", f"--say={life}")
        await process.wait()
    assert "third" in process.log.read_text()
    assert "second" in process.log.with_name("decode-0.log.1").read_text()
    assert len(list(process.log.parent.iterdir())) == 2


async def test_the_process_is_out_of_reach_of_the_terminal(start: Start) -> None:
    process = start()
    assert os.getsid(process.pid) == process.pid != os.getsid(0)


@pytest.mark.parametrize("tied", [(), ("--tied",)], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("options", "status"),
    [
        ((), -signal.SIGTERM),
        (("--deaf",), -signal.SIGKILL),
        (("--children=2",), -signal.SIGTERM),
        (("--children=2", "--deaf-children", "--own-groups"), -signal.SIGTERM),
        (("--children=2", "--deaf-children", "--deaf"), -signal.SIGKILL),
    ],
)
async def test_stop_leaves_nothing(start: Start, options: tuple[str, ...], tied: tuple[str, ...], status: int) -> None:
    process = start(*options, *tied)
    engine_pids = await up(process)
    await process.stop()
    assert not any(map(alive, engine_pids))
    assert lifeline.members(process.pid) == []
    assert await process.wait() == status


async def test_stop_does_not_wait_for_a_stopped_process(start: Start) -> None:
    process = start("--children=1")
    [child, leader] = await up(process)
    os.kill(leader, signal.SIGSTOP)
    await process.stop()
    assert not alive(child)
    assert not alive(leader)


async def test_stop_before_the_process_has_begun(start: Start) -> None:
    process = start("--tied", "--children=2")
    await process.stop()
    assert lifeline.members(process.pid) == []


async def test_stop_more_than_once(start: Start) -> None:
    process = start("--children=1")
    await up(process)
    await asyncio.gather(process.stop(), process.stop())
    await process.stop()
    assert await process.wait() == -signal.SIGTERM


@pytest.mark.parametrize("tied", [(), ("--tied",)], ids=["untied", "tied"])
async def test_what_a_dead_process_leaves_is_ended(start: Start, tied: tuple[str, ...]) -> None:
    process = start("--children=2", "--deaf-children", "--exit=7", *tied)
    assert await process.wait() == 7
    assert not any(map(alive, await up(process)))
    assert lifeline.members(process.pid) == []


async def test_a_waiter_that_is_cancelled_disturbs_no_other(start: Start) -> None:
    process = start()
    await up(process)
    first, second = asyncio.create_task(process.wait()), asyncio.create_task(process.wait())
    await asyncio.sleep(0)
    first.cancel()
    await process.stop()
    assert await second == -signal.SIGTERM


async def test_no_descriptor_stays_open(start: Start) -> None:
    before = os.listdir("/proc/self/fd")
    await start("--exit=0").wait()
    assert os.listdir("/proc/self/fd") == before


async def test_a_command_that_cannot_be_run(start: Start) -> None:
    with pytest.raises(StartError, match=r"^decode-0 cannot be started: cannot run /does/not/exist: No such file.*\.$"):
        start(command=("/does/not/exist", "--flag"))


async def test_a_log_that_cannot_be_written(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    with pytest.raises(StartError, match=r"^decode-0 cannot be started: cannot write its log .*logs.*\.$"):
        start()
