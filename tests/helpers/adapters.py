"""Models with adapters whose weights differ from their initial values, and the same models in PEFT."""

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.helpers.run_dir import write_job
from tests.helpers.single_rank import build_tiny
from trainer.contract.adapter import AdapterConfig
from trainer.contract.run import RunConfig
from trainer.layers.lora import trained_parameters
from trainer.layers.packed_model import PackedModel
from trainer.loop.set_up import set_up_adapters
from trainer.model.registry import read_model
from trainer.parallel.mesh import Mesh

LANGUAGE = ("attention", "mlp")
PLACES = {"first": (*LANGUAGE, "merger", "vision"), "second": LANGUAGE, "hybrid-first": (*LANGUAGE, "delta", "merger")}


def adapter_of(shape: str, **settings: object) -> AdapterConfig:
    return AdapterConfig(**{"rank": 4, "alpha": 6, "targets": PLACES[shape], **settings})


def job_with(run: RunConfig, adapter: AdapterConfig | None, **changes: object) -> RunConfig:
    return run.model_copy(update={"train": run.train.model_copy(update={"adapter": adapter}), **changes})


def adapted_model(
    root: Path, mesh: Mesh, shape: str, adapter: AdapterConfig, start: Path | None = None
) -> tuple[RunConfig, PackedModel]:
    """Return a job and its model. All trained parameters have changed, unless they are those of `start`."""
    run = job_with(write_job(root, num_steps=3, shape=shape), adapter)
    model = build_tiny(run.hf_dir, mesh)
    family, model_shape = read_model(run.hf_dir)
    set_up_adapters([model], run, family.weight_rules(model_shape), start)
    if start is None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in trained_parameters(model):
                param += 0.05 * torch.randn(param.shape, generator=generator).to(param)
    return run, model


def in_peft(reference: PreTrainedModel, directory: Path) -> PeftModel:
    """Return the reference model with the adapters of a directory."""
    return PeftModel.from_pretrained(reference, directory).eval()


def fresh_in_peft(
    reference: PreTrainedModel, adapter: AdapterConfig, modules: Sequence[str], whole: Sequence[str] = ()
) -> PeftModel:
    """Return the reference model with new adapters of PEFT, all of whose weights are changed."""
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(modules),
        use_dora=adapter.kind == "dora",
        use_rslora=adapter.rslora,
        modules_to_save=list(whole) or None,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(reference, config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param += 0.05 * torch.randn(param.shape, generator=generator).to(param)
    return model.eval()
