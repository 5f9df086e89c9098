"""Starting a process that is tied to kvflow by a lifeline."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvflow.launchers import lifeline


@dataclass(frozen=True, slots=True)
class Tied:
    """A process that leads a session of its own, so that a terminal's Ctrl-C reaches kvflow and not the process."""

    process: subprocess.Popen[bytes]
    lifeline: int
    """The write end, which nobody else has. Closing it ends the session, if the process called `lifeline.watch`."""


def spawn(command: Sequence[str], env: Mapping[str, str], output: int) -> Tied:
    """Start `command`, with `env` on top of kvflow's own environment and `output` as stdout and stderr.

    Raises OSError where the command cannot be run.
    """
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env, lifeline.VARIABLE: str(theirs)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[theirs],
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return Tied(process, ours)
