"""A model directory with random weights and a tokenizer trained on the samples.

In: sizes, a seed, samples. Out: an HF directory.
Read first: `stage.py`.
"""
