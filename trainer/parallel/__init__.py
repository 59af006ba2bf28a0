"""The ranks and their process groups, and the preparation of torch and megatron-core for them.

In: the environment of torchrun. Out: a Mesh of process groups.
Read first: `docs/layouts.md`, with its drawings, then `mesh.py`.
"""
