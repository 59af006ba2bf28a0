"""Records of tokenized shards.

In: ids, grids and patches of a sample. Out: the bytes of its record, and back.
Read first: `pixel_codecs.py`.
"""
