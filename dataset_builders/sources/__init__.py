"""One file per kind of raw dataset, and the registry that names them.

In: the files of a dataset. Out: one Sample per row, or a SkippedRow with the reason why there is none.
Read first: `registry.py`, then `the_cauldron.py`, the example for a source of your own.
"""
