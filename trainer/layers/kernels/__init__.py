"""Triton kernels, and an embedding of torch's operations; each is tested against plain torch.

In and out: tensors on a GPU.
Read first: `rms_norm.py`.
"""
