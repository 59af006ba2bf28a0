"""Drawn images whose answers are known: raw rows in the formats of six real datasets, for tests.

In: a seed and a number of rows. Out: parquet files that `the_cauldron` or `cord_v2` reads, as a user's source.
Read first: `write.py`, then `suite.py`; `suite.yaml` is a recipe that scores all six.
"""
