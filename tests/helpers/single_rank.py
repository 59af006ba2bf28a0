"""The trainer in this process, as a world of one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.helpers.reference import PIXELS
from trainer.contract import ParallelConfig
from trainer.distributed import Mesh, rank_mesh
from trainer.models.hf_weights import load_hf_weights
from trainer.models.module_set import TorchModules, transformer_engine_modules
from trainer.models.qwen3_vl.model import Qwen3VLModel, read_config
from trainer.runtime import cpu_runtime


@contextlib.contextmanager
def single_rank(seed: int = 1) -> Iterator[Mesh]:
    """A process group of one rank: the GPU where there is one; else the CPU, as it was but for four functions."""
    mode = contextlib.nullcontext()
    if cpu_runtime is not None:
        cpu_runtime.patch_cuda()
        mode = cpu_runtime.CpuMode()
    with mode, rank_mesh(ParallelConfig(), seed) as mesh:
        yield mesh


def build_tiny(
    hf_dir: Path, mesh: Mesh, seq_len: int = 128, dtype: torch.dtype = torch.float32, *, fused: bool = False
) -> Qwen3VLModel:
    """Our model with the directory's weights and the tests' pixel normalisation; `fused`: by Transformer Engine."""
    modules = transformer_engine_modules() if fused else TorchModules()
    model = Qwen3VLModel(read_config(hf_dir), ParallelConfig(), dtype, modules, mesh, seq_len)
    load_hf_weights(model, hf_dir)
    model.vision.patch_embed.set_normalisation(PIXELS.image_mean, PIXELS.image_std)
    return model.to(mesh.device)
