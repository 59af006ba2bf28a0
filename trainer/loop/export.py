"""The export of a checkpoint as an HF directory, and of its adapters as a PEFT directory."""

from collections.abc import Sequence

import torch

from dataset_builders.contracts.manifest import FileEntry
from trainer.checkpoint import save_and_load as checkpoint
from trainer.checkpoint.adapter_files import with_adapters, write_peft_directory
from trainer.checkpoint.directory import read_step
from trainer.checkpoint.hf_weights import HFTensors, hf_tensors, save_hf_weights
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT
from trainer.contract.result import TrainResult
from trainer.contract.run import RunConfig
from trainer.layers.lora import trained_rules
from trainer.loop.set_up import DTYPES, build_chunks, log, set_up_adapters, weights_dtype
from trainer.model.adapters import adapted_layers, modules_to_save
from trainer.model.registry import read_model
from trainer.model.rules import stored_rules
from trainer.parallel.mesh import Mesh


def export(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Write the weights of `run.checkpoint_dir`, saved by any layout, as `hf/` and return the result."""
    step = read_step(run.checkpoint_dir, run)
    family, shape = read_model(run.hf_dir, run.train)
    chunks = build_chunks(run, family, shape, mesh, weights_dtype(run))
    set_up_adapters(chunks, run, family.weight_rules(shape))
    checkpoint.load_model(chunks, run.checkpoint_dir)
    files = write_weights(chunks, mesh, run)
    log.info("exported %s: %.1f MB", run.output_dir / HF_EXPORT, sum(file.size_bytes for file in files) / 1e6)
    return TrainResult(status="finished", step=step, checkpoint=str(run.checkpoint_dir.name), files=files)


def write_weights(chunks: Sequence[torch.nn.Module], mesh: Mesh, run: RunConfig) -> list[FileEntry]:
    """Write the model's weights as an HF directory. Adapters are merged into it, and also written as a PEFT directory.

    Adapters are written in the dtype of the training's arithmetic, because these are the numbers that were measured;
    PEFT computes with them in float32.
    """
    family, shape = read_model(run.hf_dir, run.train)
    rules, config, out_dir = family.weight_rules(shape), run.train.adapter, run.output_dir / HF_EXPORT
    if config is None:
        return save_hf_weights(chunks, mesh, rules, run.hf_dir, out_dir)
    trained = dict(hf_tensors(chunks, mesh, trained_rules(rules, config)))
    if not mesh.is_main:
        return []
    trained = {name: tensor.to("cpu", DTYPES[run.train.precision]) for name, tensor in trained.items()}
    layers, source = adapted_layers(rules, config), HFTensors(run.hf_dir)
    write_peft_directory(run.output_dir / ADAPTER_EXPORT, trained, layers, config, modules_to_save(rules, config))
    merged = with_adapters(source, stored_rules(rules, source.names()), layers, trained, config)
    return save_hf_weights(chunks, mesh, rules, run.hf_dir, out_dir, tensors=merged)
