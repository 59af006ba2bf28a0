"""Adapters on each set of modules in bf16, beside what bf16 costs PEFT itself."""

import pytest
import torch
from peft import PeftModel

from tests.helpers.adapters import adapted_model
from tests.helpers.bins import MIXED, make_samples
from tests.helpers.hardware import ON_CUDA, requires_gpus
from tests.helpers.reference import load_reference, reference_losses
from tests.helpers.run_dir import model_dir
from tests.helpers.single_rank import build_tiny, single_rank
from tests.parity.test_peft import CASES, EVERYWHERE
from tests.parity.test_qwen3_vl_gpu import YARDSTICKS, relative
from trainer.checkpoint.adapter_files import write_peft_directory
from trainer.checkpoint.hf_weights import hf_tensors
from trainer.contract.adapter import AdapterConfig
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.layers.lora import trained_rules
from trainer.loop.set_up import set_up_adapters
from trainer.model.adapters import adapted_layers
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Twenty steps of LoRA or DoRA equal PEFT with torch's AdamW: losses to 1e-5, adapters to 2e-6."
)

SEQ_LEN = 128


def of_ours(model, mesh, rules, samples) -> torch.Tensor:
    """The gradients of all adapters in the table's order and in PEFT's layout: experts are stacked in another one."""
    model.train()
    model(make_micro_batch(samples, geometry_of(model.shape), SEQ_LEN).to(model.mesh.device)).mean().backward()
    for param in model.parameters():
        if param.grad is not None:
            param.data.copy_(param.grad)
    gradients = dict(hf_tensors([model], mesh, rules))
    return torch.cat([gradients[rule.hf[0]].flatten().double().cpu() for rule in rules])


def of_peft(model, rules, samples) -> torch.Tensor:
    """Return the losses sample by sample."""
    model.train()
    torch.cat([reference_losses(model, sample).float() for sample in samples]).mean().backward()
    names = [f"base_model.model.{rule.hf[0]}" for rule in rules]
    names = [name if name.endswith(".weight") else f"{name}.weight" for name in names]
    grads = {name.replace(".default", ""): param.grad for name, param in model.named_parameters()}
    return torch.cat([grads[name].flatten().double().cpu() for name in names])


@requires_gpus(1)
@pytest.mark.parametrize("modules", ON_CUDA)
@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_gradients_in_bf16_are_as_near_to_float32_as_peft_s(shape, kind, modules, tmp_path):
    adapter = AdapterConfig(kind=kind, rank=4, alpha=8, targets=EVERYWHERE[shape])
    family, read = read_model(model_dir(shape))
    table = family.weight_rules(read)
    rules = trained_rules(table, adapter)
    samples = make_samples(MIXED, geometry_of(read), range(20, 300))
    with single_rank() as mesh:
        run, model = adapted_model(tmp_path, mesh, shape, adapter)
        tensors = dict(hf_tensors([model], mesh, rules))
        write_peft_directory(tmp_path / "start", tensors, adapted_layers(table, adapter), adapter, [])
        model = build_tiny(run.hf_dir, mesh, SEQ_LEN, torch.bfloat16, modules=modules)
        set_up_adapters([model], run, table, tmp_path / "start")
        ours = of_ours(model.cuda(), mesh, rules, samples)
    theirs = {}
    for dtype in (torch.float32, torch.bfloat16):
        reference = load_reference(model_dir(shape)).to(dtype).cuda()
        adapted = PeftModel.from_pretrained(
            reference, tmp_path / "start", is_trainable=True, autocast_adapter_dtype=False
        )
        theirs[dtype] = of_peft(adapted.to(dtype), rules, samples)
    own, yardstick = (relative(x, theirs[torch.float32]) for x in (ours, theirs[torch.bfloat16]))
    print(f"{shape} {kind}: relative distance of gradients {own:.2e} (PEFT in bf16 {yardstick:.2e})")
    assert own <= YARDSTICKS * yardstick
