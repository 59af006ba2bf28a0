"""A stage that only `test_new_stage.py` uses: it counts the words of the samples.

In: sample shards. Out: words.json, a report.
Read first: `stage.py`.
"""
