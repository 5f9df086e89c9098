"""What one tenant that floods the service costs another.

    python -m benchmarks.fairness
    python -m benchmarks.fairness --max-turns 8 --json out.json

`kvflow serve` on simulated nodes, with two tenants. Users of `victim` hold conversations all the time; clients of
`flooder` send long new prompts as fast as they are answered, and soon again where they are refused. The flood comes and
goes within one run, so that whatever else the machine does falls on both kinds of phases. Times to first token are
those that the victim's users see, by the real clock: other work on the machine is in them.
"""
