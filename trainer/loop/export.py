"""A checkpoint as an HF directory."""

import functools
from collections.abc import Sequence

import torch

from dataset_builders.contracts.manifest import FileEntry
from trainer.checkpoint import save_and_load as checkpoint
from trainer.checkpoint.adapter_files import merged, write_peft_directory
from trainer.checkpoint.directory import read_step
from trainer.checkpoint.hf_write import hf_tensors, save_hf_weights
from trainer.contract.answer import TrainResult
from trainer.contract.model_shape import ModelShape
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT
from trainer.contract.run import RunConfig
from trainer.families.family import Family
from trainer.families.registry import read_model
from trainer.families.targets import Adapted
from trainer.layers.lora.convert import adapter_rules
from trainer.loop.set_up import build_chunks, give_adapters, log
from trainer.loop.share_model import weights_dtype
from trainer.parallel.mesh import Mesh


def export(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Write the weights of `run.checkpoint_dir` as HF safetensors into `output_dir/hf`."""
    step = read_step(run.checkpoint_dir, run)
    family, shape = read_model(run.hf_dir)
    chunks = build_chunks(run, family, shape, mesh, weights_dtype(run))
    layers = give_adapters(chunks, run, family, shape)
    checkpoint.load_model(chunks, run.checkpoint_dir)
    files = write_weights(chunks, mesh, run, family, shape, layers)
    log.info("exported %s: %.1f MB", run.output_dir / HF_EXPORT, sum(file.size_bytes for file in files) / 1e6)
    return TrainResult(status="finished", step=step, checkpoint=str(run.checkpoint_dir.name), files=files)


def write_weights(
    chunks: Sequence[torch.nn.Module],
    mesh: Mesh,
    run: RunConfig,
    family: Family,
    shape: ModelShape,
    layers: Sequence[Adapted],
) -> list[FileEntry]:
    """Write the model's weights as an HF directory; where it has adapters, with them in it, and as PEFT's directory."""
    rules, out_dir = family.weight_rules(shape), run.output_dir / HF_EXPORT
    config = run.train.adapter
    if config is None:
        return save_hf_weights(chunks, mesh, rules, run.hf_dir, out_dir)
    adapters = dict(hf_tensors(chunks, mesh, adapter_rules(layers, config)))
    if mesh.is_main:
        write_peft_directory(run.output_dir / ADAPTER_EXPORT, adapters, config)
    into = functools.partial(merged, adapters=adapters, config=config)
    return save_hf_weights(chunks, mesh, rules, run.hf_dir, out_dir, changed=into)
