"""The suite in tiers: the order of files, what a change can reach, and which commit passed all tests.

In: the tests' marks, their recorded durations, git.
Read first: `plugin.py`.
"""
