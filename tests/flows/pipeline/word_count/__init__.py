"""A stage that nobody but `test_new_stage.py` knows: how many words the samples have.

In: sample shards. Out: words.json, a report.
Read first: `stage.py`.
"""
