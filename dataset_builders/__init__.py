"""Convert raw datasets to Samples. Runs on the CPU and imports no tokenizer, no Prefect and no MLflow.

In: a raw dataset. Out: Samples, and the contracts that every package reads and writes.
Read first: `docs/data-formats.md`, then `sources/the_cauldron.py`.
"""
