"""The private parts of torch, and what the shim for CPUs replaces in torch.cuda, are as `trainer/libraries/` wants."""

from collections.abc import Iterator

import pytest

from tests.helpers.private_parts import changed, fail_if_changed

RECORDED = {
    **dict.fromkeys([f"torch:_foreach_{name}_" for name in ("add", "copy", "mul", "zero")]),
    "torch:ops.aten._flash_attention_forward": [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "return_debug_mask", "scale="),
    ],
    "torch:ops.aten._efficient_attention_forward": [
        *("query", "key", "value", "bias", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("dropout_p", "custom_mask_type", "compute_log_sumexp=", "scale="),
    ],
    "torch.cuda:current_device": [],
    "torch.cuda:synchronize": ["device=None"],
    "torch.cuda:get_rng_state": ["device='cuda'"],
    "torch.cuda:manual_seed": ["seed"],
    "torch._utils:_flatten_dense_tensors": ["tensors"],
    "torch._utils:_unflatten_dense_tensors": ["flat", "tensors"],
    "torch._C._autograd:_top_saved_tensors_default_hooks": ["arg0"],
    "torch.nn:Module._apply": ["self", "fn", "recurse=True"],
    "torch.distributed:ProcessGroup._register_backend": ["self", "device", "backend_type", "backend"],
    "torch.distributed:ProcessGroup._set_default_backend": ["self", "backend_type"],
    "torch.distributed.checkpoint._nested_dict:set_element": ["root_dict", "path", "value"],
    "torch.distributed.checkpoint.filesystem:FileSystemReader._slice_file": ["self", "file", "sinfo"],
    "torch.distributed.checkpoint.filesystem:_StorageInfo": ["relative_path", "offset", "length"],
    "torch.distributed.checkpoint.filesystem:_write_item": [
        *("transforms", "stream", "data", "write_item", "storage_key", "serialization_format"),
    ],
    "torch.distributed.tensor._utils:compute_local_shape_and_global_offset": ["global_shape", "mesh", "placements"],
}


def changes() -> Iterator[str]:
    yield from changed(RECORDED, may_gain=True)
    import torch

    if not isinstance(vars(torch.nn.Linear(1, 1)).get("_parameters"), dict):
        yield "torch.nn.Module holds no dictionary _parameters"


@pytest.mark.full
def test_torchs_private_parts():
    fail_if_changed("torch", __name__)
