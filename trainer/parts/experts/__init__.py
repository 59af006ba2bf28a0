"""Experts: a feed-forward part in which a router sends each token to a few of many gated MLPs.

In: the hidden states of a bin's tokens. Out: for each token the weighted sum of its experts' outputs, and of a shared
expert if there is one. Read first: `part.py`, then `module.py`.
"""
