"""Raw rows that athanor makes itself: scans of digits, the data set easy-VQA out of its package, drawn shapes,
or drawn clips.

In: a seed and sizes. Out: raw rows in a format of `dataset_builders`.
Read first: `digits.py`.
"""
