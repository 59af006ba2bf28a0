"""Readers that several sources share: tables, JSON and CSV files, tars, and images that a row only names.

In: files of a source, on a disk or in a store. Out: parts in a fixed order, rows, conversations.
Read first: `parts.py` (what a builder is), then `conversation.py` (from turns to a Sample).
"""
