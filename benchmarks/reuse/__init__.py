"""How much of what could be reused kvflow reuses, and whether any token is wrong.

    python -m benchmarks.reuse
    python -m benchmarks.reuse --policy off,balanced,aggressive --prefix-caching on,off --json out.json
    python -m benchmarks.reuse --nodes real --each 2
    python -m benchmarks.reuse --nodes http://127.0.0.1:8000 --block-size 16

plays a seeded corpus of conversations (`corpus`: growing, with reasoning stripped, branching, edited, regenerated,
truncated, tool-calling) against `kvflow serve`, in mixed order, without ids, as plain OpenAI clients do. For each
policy `kvflow serve` is started anew, with simulated nodes or with real engines; what it accepts may follow
(`cluster.prefill.replicas=2`). Or the URL of a running kvflow is given.

**Reused** is what the answer says: `usage.prompt_tokens_details.cached_tokens`, pulled or found in an engine's own
prefix cache.

**Reusable** is what an all-knowing cache would have had (`ideal`): one that still holds the KV of every prompt and
answer of every turn of this run that ended before this one began, of any conversation (system prompts are shared, and
engines find them in their prefix caches). The last token of an answer has no KV; the last token of a prompt has to be
computed. What a prompt has in common with a turn counts in whole blocks of the engine, but to the token where the
prompt begins with all that the turn holds: a pull can end there. It is computed from the engine's own token ids.
With prefix caches off on both roles the same counts as reusable, but only pulls can bring it back.

**Wrong** are tokens of an answer that differ from those of a cold run: afterwards the same request goes to an engine
alone (of a kvflow at a URL: to its router), under a cache salt that nobody has used.

Memory is no matter here: simulated pools hold the whole corpus, and real ones should (`cluster.decode.kv_cache_gib`).
`trace` and `capacity` are about the rest.
"""
