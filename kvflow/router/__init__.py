"""The router: an ASGI application that serves the OpenAI API from two pools of engines."""

from kvflow.router.app import Router, Settings

__all__ = ["Router", "Settings"]
