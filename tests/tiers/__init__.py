"""The suite in tiers: order and durations (`plugin.py`), what a change can reach (`changed.py`), who passed (`passed.py`).

In: the tests' marks, their recorded durations, git.
Read first: `plugin.py`.
"""
