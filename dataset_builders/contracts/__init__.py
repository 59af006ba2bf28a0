"""The file formats that the packages exchange: their schemas, and the only functions that read and write them.

In: Samples, tokenized samples, bins. Out: shards, tables and manifest.json, each with a format_version.
Read first: `manifest.py`, then `sample.py`.
"""
