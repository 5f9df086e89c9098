"""Starting a process that is tied to kvflow by a lifeline."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvflow.launchers import lifeline

_OURS_ALONE = ("KVFLOW_ADMIN_KEY", "KVFLOW_KEYS")
"""What engines, which run a model's code and log their surroundings, need not know."""


@dataclass(frozen=True, slots=True)
class Tied:
    """A process that leads a session of its own, so that a terminal's Ctrl-C reaches kvflow and not the process."""

    process: subprocess.Popen[bytes]
    lifeline: int
    """The write end, which nobody else has. Closing it ends the session, if the process called `lifeline.watch`."""


def spawn(command: Sequence[str], env: Mapping[str, str], output: int) -> Tied:
    """Start `command`, with `env` on top of kvflow's own environment (without keys) and `output` as stdout and stderr.

    Raises OSError where the command cannot be run.
    """
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            env={**_inherited(), **env, lifeline.VARIABLE: str(theirs)},
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


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OURS_ALONE}
