"""The trainer in this process, as a world of one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import torch

from tests.helpers.reference import PIXELS
from trainer.checkpoint.hf_weights import load_hf_weights
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.layers.decoder import decoder_config
from trainer.layers.module_set import TorchModules
from trainer.layers.modules.choice import choose_modules
from trainer.layers.packed_model import PackedModel
from trainer.libraries.megatron_private import CpuMode, patch_cuda
from trainer.model.registry import read_model
from trainer.parallel.mesh import Mesh, rank_mesh


@contextlib.contextmanager
def single_rank(seed: int = 1) -> Iterator[Mesh]:
    """Run a process group of one rank, on the GPU if there is one, else on the CPU with four functions replaced."""
    mode = contextlib.nullcontext()
    if not torch.cuda.is_available():
        patch_cuda()
        mode = CpuMode()
    with mode, rank_mesh(ParallelConfig(), seed) as mesh:
        yield mesh


def build_tiny(
    hf_dir: Path,
    mesh: Mesh,
    seq_len: int = 128,
    dtype: torch.dtype = torch.float32,
    *,
    modules: str = "exact",
    train: TrainConfig | None = None,
) -> PackedModel:
    """Return athanor's model with the directory's weights and the tests' pixel normalisation.

    Args:
        modules: value of `execution.modules`, or "exact" for the CPU modules on any device.
        train: the training that decides whether there is multi-token prediction.
    """
    family, shape = read_model(hf_dir, train)
    chosen = TorchModules() if modules == "exact" else choose_modules(modules, mesh.device)
    config = decoder_config(shape.language, ParallelConfig(), dtype)
    model = resolve_name(family.model)(shape, ParallelConfig(), config, chosen, mesh, seq_len)
    load_hf_weights(model, hf_dir, family.weight_rules(shape), family.copied)
    model.prepare_pixels(PIXELS)
    return model.to(mesh.device)
