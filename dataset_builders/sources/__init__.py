"""One file per kind of raw dataset, the registry that names them, and raw rows that installed packages hold.

In: the files of a dataset. Out: one Sample per row, or a SkippedRow with the reason why there is none.
Read first: `registry.py`, then an example for a source of your own: `the_cauldron.py` (parquet) or `conversations.py`
(JSON lines).
"""
