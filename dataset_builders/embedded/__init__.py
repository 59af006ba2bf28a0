"""Generators of raw rows that need no download: scanned digits and drawn receipts.

In: a seed and counts. Out: rows in the schema of a published dataset. Read first: `digits.py`.
"""
