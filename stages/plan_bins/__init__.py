"""The packing of samples into bins.

In: the index of tokenized shards. Out: `bins.json` with `bins/*.arrow`, and a report of the padding.
Read first: `stage.py`, then `pack.py`.
"""
