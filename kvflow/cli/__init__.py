"""`kvflow <verb> [flags] [overrides]`."""

from kvflow.cli.command import main

__all__ = ["main"]
