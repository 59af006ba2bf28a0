"""The ranks and their process groups: how they share a model, and how they watch each other.

In: the environment of torchrun. Out: a Mesh of process groups.
Read first: `docs/layouts.md`, with its drawings, then `mesh.py`.
"""
