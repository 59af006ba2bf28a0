"""The needs of a training, computed before it starts: a layout that fits, the pieces of its pipeline, memory.

In: a `ModelShape` and a `RunConfig`. Out: errors, layers of each piece, bytes of the fullest process.
Read first: `checks.py`, then `layout.py`, `pieces.py`, `estimate.py` and `placement.py`.
"""
