"""The trainer in this process, as a world of one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.helpers.reference import PIXELS
from trainer import cpu_runtime
from trainer.contract import ParallelConfig
from trainer.distributed import Mesh, rank_mesh
from trainer.models.hf_weights import load_hf_weights
from trainer.models.module_set import TorchModules
from trainer.models.qwen3_vl.model import Qwen3VLModel, read_config


@contextlib.contextmanager
def single_rank(seed: int = 1) -> Iterator[Mesh]:
    """A process group of one rank on the CPU; leaves the process as it was, but for four functions of torch.cuda."""
    cpu_runtime.patch_cuda()
    with cpu_runtime.CpuMode(), rank_mesh(ParallelConfig(), seed) as mesh:
        yield mesh


def build_tiny(hf_dir: Path, mesh: Mesh, seq_len: int = 128) -> Qwen3VLModel:
    """Our model in float32 with the directory's weights and the tests' pixel normalisation."""
    model = Qwen3VLModel(read_config(hf_dir), ParallelConfig(), torch.float32, TorchModules(), mesh.groups, seq_len)
    load_hf_weights(model, hf_dir)
    model.vision.patch_embed.set_normalisation(PIXELS.image_mean, PIXELS.image_std)
    return model
