"""Raw rows that athanor makes itself: scans of digits, or the data set easy-VQA out of its package.

In: a seed and sizes. Out: raw rows in a format of `dataset_builders`.
Read first: `digits.py`.
"""
