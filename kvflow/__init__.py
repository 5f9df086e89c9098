"""kvflow serves large language models with prefill and decode apart, and the KV cache travelling both ways.

`kvflow serve` is the usual way in. A program that embeds kvflow uses the same parts, each from its own module, so that
it pays for no more than it imports:

    from kvflow import config, graph, serve

    loaded = config.load(config.compose("serve", ["cluster=simulated", "router.port=0"]))
    serve.run(graph.build(loaded))

`config.compose`, `config.load`   from overrides to a typed, checked `config.Config`
`graph.build`                     from there to a `graph.Graph` of nodes and a policy; starts nothing
`serve.run`                       that graph, until a signal comes; in the main thread
`router.Router`                   the router alone: an ASGI application, `Router(...).app`
`policies`                        the parts of policies, and the protocols that parts of your own follow
`types`                           the values that those are given and return
`nodes.simulated`                 engines without a model, for tests
`errors`                          everything that is raised on purpose, under `KvflowError`

Other modules, and names that begin with an underscore, may change without notice.
"""

from typing import TYPE_CHECKING

from kvflow.errors import KvflowError

__all__ = ["KvflowError", "__version__"]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """`__version__`, read when it is asked for, because the metadata of distributions is slow to find."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(__name__)
        except PackageNotFoundError:
            return "0+unknown"  # a plain checkout
