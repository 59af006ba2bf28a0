"""Turn somebody's dataset into Samples. CPU only, knows no tokens, no Prefect, no MLflow.

In: a raw dataset. Out: Samples, and the contracts that every package reads and writes.
Read first: `docs/data-formats.md`, then `sources/the_cauldron.py`.
"""
