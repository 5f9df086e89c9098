"""No process of a node outlives kvflow, however kvflow dies.

kvflow alone holds the write end of a pipe, the lifeline; it never writes to it. A node's process is started as leader
of a session of its own and hands the read end to a guard, a small process of that session. The lifeline ends when
kvflow does, by SIGKILL too, and then the guard ends the session; it does the same when only the leader is gone, so
that an engine's worker processes do not outlive its API server.

The guard is a process and not a thread because a thread does not run while native code holds the interpreter lock, and
because it has to outlive the leader. It runs this file as a script, read from standard input: keep the imports to the
standard library.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path

VARIABLE = "KVFLOW_LIFELINE_FD"
"""Names the read end of the lifeline to the process that kvflow starts."""
POLL_S = 0.05


def watch(grace_s: float = 5.0) -> None:
    """Tie the life of this process's session to kvflow's. First thing to call in a process that kvflow starts.

    When the lifeline ends, the session gets SIGTERM and, `grace_s` later, SIGKILL. A lifeline that has ended before the
    call counts all the same. Does nothing in a process that kvflow did not start.
    """
    number = os.environ.pop(VARIABLE, None)
    if number is None:
        return
    lifeline, leader = int(number), os.pidfd_open(os.getsid(0))
    os.set_inheritable(leader, True)
    _spawn_guard(str(lifeline), str(leader), str(grace_s))
    os.close(lifeline)
    os.close(leader)


def members(session: int) -> list[int]:
    """Process ids of a session, without the dead ones that nobody has reaped yet."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in pids if _lives_in(pid, session)]


def signal_session(session: int, number: signal.Signals, *, spare: int | None = None) -> bool:
    """Signal every process of a session but `spare`; False if there was none.

    The caller sees to it that the session's id is not given to somebody else meanwhile: the kernel holds it back as
    long as a process of the session lives or its leader is not reaped.
    """
    pids = [pid for pid in members(session) if pid != spare]
    for pid in pids:
        _signal_member(pid, session, number)
    return bool(pids)


def _spawn_guard(*arguments: str) -> None:
    """Neither command line nor name contain "kvflow": a guard must survive `pkill -9 -f kvflow` to do its work."""
    python = os.path.realpath(sys.executable)
    script = (os.POSIX_SPAWN_OPEN, 0, __file__, os.O_RDONLY, 0)
    deaf_to = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    command = [python, "-I", "-S", "-", *arguments]
    os.posix_spawn(python, command, os.environ, file_actions=[script], setsigmask=deaf_to)


def _lives_in(pid: int, session: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    state, _parent, _group, its_session = stat[stat.rindex(b")") + 2 :].split()[:4]
    return int(its_session) == session and state not in b"ZX"


def _signal_member(pid: int, session: int, number: signal.Signals) -> None:
    """A process id may be given to another process between look and signal; a pidfd cannot."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _lives_in(pid, session):
            signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(process)


def _wait_for_either(*descriptors: int) -> None:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll()


def _end(session: int, grace_s: float) -> None:
    me = os.getpid()
    deadline = time.monotonic() + grace_s
    left = signal_session(session, signal.SIGTERM, spare=me)
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = any(pid != me for pid in members(session))
    while signal_session(session, signal.SIGKILL, spare=me):
        time.sleep(POLL_S)


def _guard(lifeline: str, leader: str, grace_s: str) -> None:
    _wait_for_either(int(lifeline), int(leader))
    _end(os.getsid(0), float(grace_s))


if __name__ == "__main__":
    _guard(*sys.argv[1:])
