"""Triton kernels; each is tested against plain torch.

In and out: tensors on a GPU.
Read first: `rms_norm.py`.
"""
