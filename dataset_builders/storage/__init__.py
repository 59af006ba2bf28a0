"""Paths that may be URLs, files that are written atomically, and a cache of data read over a network.

In: a path or a URL. Out: a StorePath, files written by one rename, copies on this machine.
Read first: `store.py`, then `files.py`.
"""
