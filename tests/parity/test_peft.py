"""A training of adapters beside PEFT's in transformers, from the same values, in float32."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.equivalence.test_training import reference_training
from tests.helpers.adapters import job_with
from tests.helpers.reference import load_reference
from tests.helpers.run_dir import OPTIM, model_dir, write_job
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import tiered
from tests.helpers.world import run_world
from trainer.checkpoint.adapter_files import write_peft_directory
from trainer.checkpoint.hf_weights import hf_tensors
from trainer.contract.adapter import ROLES, AdapterConfig
from trainer.contract.names import ADAPTER_EXPORT
from trainer.contract.peft import ADAPTER_WEIGHTS
from trainer.layers.lora import trained_rules
from trainer.loop.set_up import set_up_adapters
from trainer.model.adapters import adapted_layers
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Twenty steps of LoRA or DoRA equal PEFT with torch's AdamW: losses to 1e-5, adapters to 2e-6."
)

STEPS = 20
# A gradient that is nothing but rounding would move a weight by a whole step; with this eps it moves it by rounding.
OPTIM_20 = OPTIM.model_copy(update={"adam_eps": 1e-3, "lr": 1e-2})
EVERYWHERE = {
    "first": tuple(role for role in ROLES if role != "delta"),
    "second": tuple(role for role in ROLES if role != "delta"),
    "hybrid-first": ROLES,
    "experts-listed": ROLES,
    "experts-shared": ROLES,
}
RANKS = {"experts-listed": 8, "experts-shared": 8}  # of the others 4

# PEFT has no DoRA of stacked matrices.
CASES = [(shape, kind) for shape in EVERYWHERE for kind in ("lora", "dora") if kind == "lora" or "experts" not in shape]


@pytest.mark.parametrize(("shape", "kind"), tiered(CASES, [("first", "lora")]))
def test_twenty_steps_equal_peft_with_torch_adamw(shape, kind, tmp_path):
    rank = RANKS.get(shape, 4)
    adapter = AdapterConfig(kind=kind, rank=rank, alpha=2 * rank, rslora=shape == "second", targets=EVERYWHERE[shape])
    run = job_with(write_job(tmp_path, num_steps=STEPS, shape=shape, optim=OPTIM_20), adapter)
    family, read = read_model(run.hf_dir)
    rules = family.weight_rules(read)
    with single_rank() as mesh:
        model = build_tiny(run.hf_dir, mesh)
        set_up_adapters([model], run, rules)
        tensors = dict(hf_tensors([model], mesh, trained_rules(rules, adapter)))
        write_peft_directory(tmp_path / "start", tensors, adapted_layers(rules, adapter), adapter, [])
    peft = PeftModel.from_pretrained(load_reference(model_dir(shape)), tmp_path / "start", is_trainable=True)
    expected = reference_training(peft, shape, STEPS, OPTIM_20)
    for row, (loss, grad_norm, _) in zip(run_world(run, 1).rows, expected, strict=True):
        assert row.loss == pytest.approx(loss, rel=1e-5), row.step
        assert row.grad_norm == pytest.approx(grad_norm, rel=1e-4), row.step
    assert expected[-1][0] < 0.9 * expected[0][0], "nothing was learnt"
    adapters = load_file(run.output_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS)
    theirs = {name.replace(".default", ""): param for name, param in peft.named_parameters() if param.requires_grad}
    theirs = {name.removesuffix(".weight") if "magnitude" in name else name: param for name, param in theirs.items()}
    assert adapters.keys() == theirs.keys()
    for name, param in theirs.items():
        torch.testing.assert_close(adapters[name], param.detach(), rtol=0, atol=2e-6, msg=lambda t, n=name: f"{n}: {t}")
