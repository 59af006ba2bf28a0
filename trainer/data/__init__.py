"""The micro batches of a training: which bins, in which order, in which layout.

In: a plan of bins and tokenized shards. Out: one MicroBatch per rank and bin, read ahead by threads.
Read first: `order.py` (which bins), then `micro_batch.py` (a rank's part of a bin).
"""
