"""`python -m kvflow.launchers.tied MODULE ARGUMENT...` is `python -m MODULE ARGUMENT...`, tied to kvflow's life."""

import runpy
import sys

from kvflow.launchers import lifeline

if __name__ == "__main__":
    lifeline.watch()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
