"""Time to first token by path: every fixed path against the policy that chooses, on real engines, in one run.

For each length of history, number of new tokens and load, turns that differ in nothing but their policy are played one
after the other, in an order that rotates. The policies are those of four tenants of one `kvflow serve`: `off` (always
cold), `pull` and `direct` (always that), and `adaptive`. They share engines, and so what `adaptive` has learned comes
from the turns of all.

Loads: `idle`; `prefill`, where another prompt was just sent to the prefill node; `decode`, where the decode node is
giving four other answers.
"""
