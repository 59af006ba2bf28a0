"""Measurements of training steps inside a model: the seconds of its parts, and the numbers that its modules report.

In: the steps between two lines of metrics.jsonl. Out: the numbers of the line. Read first: `part_clock.py`.
"""
