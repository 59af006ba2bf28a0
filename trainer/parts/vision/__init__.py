"""The vision encoder of Qwen3-VL and its mergers.

In: `VisionShape`; the patches of a bin's images. Out: the table of its weights; image tokens and deepstack features.
Read first: `part.py`, then `module.py`.
"""
