"""Triton kernels, each beside the plain torch that it is tested against.

In and out: tensors on a GPU.
Read first: `qkv.py`.
"""
