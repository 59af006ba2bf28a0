"""Recognise raw data: which builder reads a source, and with which options.

In: a directory, a file or a URL. Out: the best reading, tried on the first rows, and all problems found.
Read first: `recognise.py`.
"""
