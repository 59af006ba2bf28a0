"""Raw rows that installed packages hold: scanned digits and the data set easy-VQA.

In: a seed and counts, or a split. Out: rows in the schema of a published dataset. Read first: `digits.py`.
"""
