"""Our models with experts against transformers': float32, CPU, random weights, every kind of sample."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from tests.helpers.parity import (
    SEQ_LEN,
    Pair,
    assert_logits_equal,
    assert_losses_and_gradients_equal,
    assert_nothing_to_learn_gives_gradients_of_zero,
    assert_weights_leave_as_they_came,
)
from tests.helpers.reference import load_reference, reference_inputs, reference_losses
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import full, tiered
from tests.helpers.tiny_experts_model import SHAPES, experts_hf_dir, zero_routers
from trainer.contract.result import LAYERS
from trainer.contract.run import ExpertsConfig
from trainer.data.micro_batch import make_micro_batch

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)


@pytest.fixture(scope="module")
def mesh():
    with single_rank() as mesh:
        yield mesh


@pytest.fixture(scope="module", params=tiered(SHAPES, ("listed", "shared")))
def pair(request, mesh):
    return Pair(experts_hf_dir(request.param), mesh)


def prepare(model, **settings) -> None:
    """Set the training of the routers."""
    model.reports.__init__()
    model.prepare_training(SimpleNamespace(experts=ExpertsConfig(**settings)))


def read_reports(model) -> dict[str, float]:
    """Return the metrics of a model's reports, and forget the reports."""
    numbers = torch.cat(model.reports.sums()).tolist()
    model.reports.forget()
    return {f"{LAYERS}{name}": value for name, value in model.reports.metrics(numbers).items()}


def routers(model) -> list[torch.nn.Module]:
    return [layer.mlp for layer in model.language.decoder.layers if layer.routes_tokens]


def test_logits_of_a_packed_bin(pair):
    assert_logits_equal(pair)


def test_loss_and_the_gradient_of_every_parameter(pair):
    prepare(pair.ours)
    assert_losses_and_gradients_equal(pair)


@pytest.mark.parametrize("shape", tiered(SHAPES, ("listed", "shared")))
def test_equal_logits_choose_the_experts_that_transformers_chooses(shape, mesh, tmp_path):
    """Every token has equal logits for all experts in every layer."""
    model = load_reference(experts_hf_dir(shape))
    zero_routers(model)
    shutil.copytree(experts_hf_dir(shape), tmp_path / "hf")
    model.save_pretrained(tmp_path / "hf")
    tied = Pair(tmp_path / "hf", mesh)
    assert_logits_equal(tied)
    prepare(tied.ours)
    assert_losses_and_gradients_equal(tied)


def stored_as(form: str, hf_dir: Path, directory: Path) -> Path:
    """Write a model in a form in which directories hold experts: transposed matrices, one tensor for the matrices of
    all experts of a layer as in memory ("stacked"), or a tensor for each matrix ("single")."""
    shutil.copytree(hf_dir, directory)
    tensors = {name: t for name, t in load_file(hf_dir / "model.safetensors").items() if ".mlp.experts." not in name}
    for name, param in load_reference(hf_dir).named_parameters():
        if ".mlp.experts." not in name:
            continue
        whole, matrix = param.detach(), name.removesuffix("_proj").rpartition(".")[2]
        if form == "single":
            parts = ("gate_proj", "up_proj") if matrix == "gate_up" else ("down_proj",)
            for number, matrices in enumerate(whole):
                prefix = f"{name.rpartition('.')[0]}.{number}"
                tensors |= {f"{prefix}.{n}.weight": m.clone() for n, m in zip(parts, matrices.chunk(len(parts)))}
        else:
            tensors[name] = (whole.transpose(1, 2) if form == "transposed" else whole).clone().contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.promise(
    "Weights that were not trained leave in the Hugging Face format with the bits and in the form in which they came."
)
@pytest.mark.parametrize(
    ("shape", "form"),
    tiered(
        [("listed", "transposed"), *((shape, form) for shape in SHAPES for form in ("stacked", "single"))],
        [("listed", "transposed"), ("shared", "stacked"), ("listed", "single")],
    ),
)
def test_weights_in_and_out_are_bit_equal_in_every_form_on_disk(shape, form, mesh, tmp_path):
    """The published Qwen3-VL is transposed, Qwen3.5 stacked; transformers writes them stacked and single."""
    hf_dir = stored_as(form, experts_hf_dir(shape), tmp_path / "hf")
    wanted, ours = build_tiny(experts_hf_dir(shape), mesh, SEQ_LEN), build_tiny(hf_dir, mesh, SEQ_LEN)
    for (name, param), other in zip(ours.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(param, other), name
    assert_weights_leave_as_they_came(ours, mesh, hf_dir, tmp_path / "out")


def reference_routers(pair) -> list[torch.Tensor]:
    """Return the (tokens, E) router logits of each layer with experts, for all samples in order."""
    logits, hooks = {}, []
    for name, module in pair.reference.named_modules():
        if name.endswith("mlp.gate"):
            own = logits.setdefault(name, [])
            hooks.append(module.register_forward_hook(lambda _, __, out, own=own: own.append(out[0])))
    for sample in pair.samples:
        inputs = reference_inputs(sample, pair.reference.config)
        pair.reference(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in logits.values()]


def test_loads_count_every_token_of_every_layer_and_no_padding(pair):
    """Also the last layer, which continues with the rows of the loss tokens only."""
    prepare(pair.ours)
    pair.ours.train()
    pair.ours(pair.batch)
    top_k = routers(pair.ours)[0].part.top_k
    chosen = [logits.topk(top_k).indices.flatten() for logits in reference_routers(pair)]
    wanted = [layer.bincount(minlength=routers(pair.ours)[0].part.num_experts) for layer in chosen]
    counts = [values for (reduce, _), values in sorted(pair.ours.reports._sums.items())]
    assert [c.tolist() for c in counts] == [w.tolist() for w in wanted]
    loads = [max(c) * len(c) / sum(c) for c in (w.tolist() for w in wanted)]
    row = read_reports(pair.ours)
    assert row["layers_expert_load_max"] == max(loads)
    assert row["layers_expert_load"] == pytest.approx(sum(loads) / len(loads))
    assert read_reports(pair.ours) == {}


@pytest.mark.parametrize(
    ("kind", "recompute"), [("pooled", False), ("layer", True), full("pooled", True), full("layer", False)]
)
def test_the_auxiliary_loss_and_its_gradient(pair, kind, recompute):
    """Pooled is transformers' own function; per layer it is the same function of one layer, divided by k."""
    prepare(pair.ours, auxiliary_loss=kind, coefficient=0.3)
    pair.ours.train()
    pair.ours.language.decoder.recompute = recompute
    pair.ours.zero_grad()
    pair.ours(pair.batch).sum().backward()
    pair.ours.language.decoder.recompute = False
    pair.reference.zero_grad()
    part = routers(pair.ours)[0].part
    logits = reference_routers(pair)
    groups = [tuple(logits)] if kind == "pooled" else [(one,) for one in logits]
    auxiliary = [load_balancing_loss_func(group, part.num_experts, part.top_k) for group in groups]
    if kind == "layer":
        auxiliary = [loss / part.top_k for loss in auxiliary]
    losses = torch.cat([reference_losses(pair.reference, sample) for sample in pair.samples])
    (losses.sum() + 0.3 * len(losses) * sum(auxiliary)).backward()
    reported = read_reports(pair.ours)["layers_auxiliary_loss"]
    assert reported == pytest.approx(float(sum(auxiliary).detach()) / len(auxiliary), rel=1e-5)
    theirs = [param.grad for name, param in pair.reference.named_parameters() if name.endswith("mlp.gate.weight")]
    for router, wanted in zip(routers(pair.ours), theirs, strict=True):
        assert_close(router.router.grad, wanted, atol=1e-5 * float(wanted.norm()), rtol=1e-4)


def test_a_bin_with_nothing_to_learn_gives_gradients_of_zero(pair):
    prepare(pair.ours, coefficient=0.3)
    pair.ours.train()
    assert_nothing_to_learn_gives_gradients_of_zero(pair)


def test_padding_changes_no_bit_of_the_tokens(pair):
    """Padding follows the last expert's rows; the loss of every token is the same with more of it."""
    with torch.no_grad():
        short = pair.ours(pair.batch)
        longer = pair.ours(make_micro_batch(pair.samples, pair.geometry, SEQ_LEN + 40))
    assert_close(short, longer, atol=1e-6, rtol=0)
