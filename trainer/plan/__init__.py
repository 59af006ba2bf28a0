"""What a training needs, computed before anything starts: a layout that fits, the pieces of its pipeline, its memory.

In: a `ModelShape` and a `RunConfig`. Out: refusals, layers of each piece, bytes of the fullest process.
Read first: `checks.py`, then `layout.py`, `pieces.py`, `estimate.py` and `placement.py`.
"""
