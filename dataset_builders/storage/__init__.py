"""Paths that may be URLs, files that appear whole or not at all, and a cache of what came over a network.

In: a path or a URL. Out: a StorePath, files written by one rename, copies on this machine.
Read first: `store.py`, then `files.py`.
"""
