"""Videos: which frames a file has and when, which of them a model reads, and their pixels, decoded in a process that a
file may end without harm.

In: the bytes of a video of a row. Out: times, sizes, the frames to read, RGB frames.
Read first: `decode.py` (what is given and refused), `decode_process.py` (the one decoder), then `sampling.py` (the
frames, sizes and times of a model).
"""
