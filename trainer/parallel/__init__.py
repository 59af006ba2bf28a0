"""The ranks and their groups, and how torch and megatron-core are prepared for them.

In: the environment of torchrun. Out: a Mesh of process groups.
Read first: `docs/layouts.md`, with its drawings, then `mesh.py`.
"""
