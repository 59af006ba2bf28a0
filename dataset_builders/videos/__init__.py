"""Videos: which frames a file has and when, and their pixels, decoded in a process that a file may end without harm.

In: the bytes of a video of a row. Out: times, sizes, RGB frames.
Read first: `decode.py` (what is given and refused), then `decode_process.py` (the one decoder).
"""
