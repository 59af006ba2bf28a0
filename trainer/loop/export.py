"""A checkpoint as an HF directory."""

from trainer.checkpoint import save_and_load as checkpoint
from trainer.checkpoint.directory import read_step
from trainer.checkpoint.hf_write import save_hf_weights
from trainer.contract.answer import TrainResult
from trainer.contract.names import HF_EXPORT
from trainer.contract.run import RunConfig
from trainer.families.registry import read_model
from trainer.loop.set_up import build_chunks, log
from trainer.loop.share_model import weights_dtype
from trainer.parallel.mesh import Mesh


def export(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Write the weights of `run.checkpoint_dir` as HF safetensors into `output_dir/hf`."""
    step = read_step(run.checkpoint_dir, run)
    family, shape = read_model(run.hf_dir)
    chunks = build_chunks(run, family, shape, mesh, weights_dtype(run))
    checkpoint.load_model(chunks, run.checkpoint_dir)
    files = save_hf_weights(chunks, mesh, family.weight_rules(shape), run.hf_dir, run.output_dir / HF_EXPORT)
    log.info("exported %s: %.1f MB", run.output_dir / HF_EXPORT, sum(file.size_bytes for file in files) / 1e6)
    return TrainResult(status="finished", step=step, checkpoint=str(run.checkpoint_dir.name), files=files)
