"""Stands in for an engine: a process with children that is good or bad at ending. Prints the pids of all, then `up`."""

import argparse
import os
import signal
import sys
import time

from kvflow.launchers.lifeline import watch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tied", action="store_true", help="call watch()")
    parser.add_argument("--children", type=int, default=0)
    parser.add_argument("--own-groups", action="store_true", help="each child leads a process group")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--deaf-children", action="store_true")
    parser.add_argument("--say", default="")
    parser.add_argument("--exit", type=int)
    args = parser.parse_args()
    if args.tied:
        watch(grace_s=0.2)
    if args.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(args.children):
        _child(args)
    print(f"pid {os.getpid()}", args.say, "up", sep="\n", flush=True)
    if args.exit is not None:
        sys.exit(args.exit)
    time.sleep(1000)


def _child(args: argparse.Namespace) -> None:
    if pid := os.fork():
        print(f"pid {pid}", flush=True)
        return
    if args.own_groups:
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if args.deaf_children else signal.SIG_DFL)
    time.sleep(1000)


if __name__ == "__main__":
    main()
