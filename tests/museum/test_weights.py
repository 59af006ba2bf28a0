"""Adapters and weights, in training and on their way to other programs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.helpers.adapters import adapted_model, adapter_of, job_with
from tests.helpers.bins import MIXED, make_samples
from tests.helpers.reference import load_reference
from tests.helpers.run_dir import write_job
from tests.helpers.single_rank import single_rank
from tests.museum.fault import fault_seen
from trainer.checkpoint.hf_weights import HFTensors, save_hf_weights
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.layers.lora import trained_parameters
from trainer.loop.export import write_weights
from trainer.loop.set_up import set_up
from trainer.loop.train import heldout_loss
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "athanor has none of the museum's published faults, and each test fails where the fault is put in."
)

RANK, ALPHA = 4, 6


@pytest.fixture(scope="module")
def mesh():
    with single_rank() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def adapted(mesh, tmp_path_factory):
    """Return Qwen3-VL with changed adapters everywhere, its bin of samples, its export, and its base model's
    directory."""
    run, model = adapted_model(tmp_path_factory.mktemp("adapted"), mesh, "first", adapter_of("first", dropout=0.5))
    write_weights([model], mesh, run)
    samples = make_samples(MIXED, geometry_of(model.shape), range(20, 300))
    batch = make_micro_batch(samples, geometry_of(model.shape), 128)
    return SimpleNamespace(model=model, batch=batch, run=run, hf=run.output_dir / "hf", base=run.hf_dir)


def without_gradient(adapted) -> list[str]:
    """Return the adapters that get no gradient in a step."""
    adapted.model.train().zero_grad()
    adapted.model(adapted.batch).sum().backward()
    names = {id(param): name for name, param in adapted.model.named_parameters()}
    return [names[id(p)] for p in trained_parameters(adapted.model) if p.grad is None or not p.grad.any()]


def test_every_adapter_gets_a_gradient(adapted, monkeypatch):
    """Adapters of the vision encoder never got a gradient, because its inputs needed none, and kept their initial
    values.

    https://github.com/unslothai/unsloth/issues/5039 https://github.com/2U1/Qwen-VL-Series-Finetune/issues/193
    """

    def check() -> None:
        assert without_gradient(adapted) == []

    check()
    forward = adapted.model.vision.forward
    monkeypatch.setattr(adapted.model.vision, "forward", lambda batch: forward(batch).detach())
    with fault_seen():
        check()


def test_no_dropout_while_losses_are_measured(mesh, tmp_path, monkeypatch):
    """Dropout stayed on in evaluation, so that held-out losses were those of a model with dropped units.

    https://github.com/ipolharvard/ethos-ares/issues/20 https://github.com/IBM/pytorch-seq2seq/issues/33
    """

    run = job_with(write_job(tmp_path, num_steps=3, shape="text-first"), adapter_of("second", dropout=0.5))
    trainer = set_up(run, mesh)
    for param in trained_parameters(trainer.chunks[0].module):
        param.data += 0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1))

    def check() -> None:
        losses = [heldout_loss(trainer) for _ in range(2)]
        assert losses[0] == losses[1]

    trainer.chunks[0].train()
    check()
    monkeypatch.setattr(type(trainer.chunks[0]), "eval", torch.nn.Module.train)
    with fault_seen():
        check()


def check_merged(adapted, scaling: float, directory: Path | None = None) -> None:
    """Check that the exported weight of an adapted module is the base's weight plus the scaled product of its
    adapters."""
    module = "model.language_model.layers.0.self_attn.o_proj"
    base, merged = (HFTensors(path).get(f"{module}.weight") for path in (adapted.base, directory or adapted.hf))
    saved = load_file(adapted.run.output_dir / "adapter" / "adapter_model.safetensors")
    a, b = (saved[f"base_model.model.{module}.lora_{name}.weight"] for name in "AB")
    torch.testing.assert_close(merged, base + scaling * b @ a, rtol=0, atol=1e-6)


def test_a_merged_model_has_its_adapters(adapted):
    """The merged model was the base model, because its adapters were left out without an error.

    https://github.com/huggingface/trl/issues/386
    """
    check_merged(adapted, ALPHA / RANK)
    with fault_seen():
        check_merged(adapted, ALPHA / RANK, adapted.base)


def test_rslora_has_its_own_scale():
    """Adapters that are scaled by the root of their rank were merged with the scale of plain ones, or the other way
    round.

    https://github.com/huggingface/peft/pull/3449 https://github.com/NVIDIA/TensorRT-LLM/issues/1668
    """

    def check(config) -> None:
        assert config.scaling == pytest.approx(ALPHA / RANK**0.5)

    check(adapter_of("first", rslora=True))
    with fault_seen():
        check(adapter_of("first"))


@pytest.fixture(scope="module")
def hybrid(mesh, tmp_path_factory):
    """Return Qwen3.5, whose files hold a layer that neither athanor nor transformers computes, exported in several
    files."""
    run, model = adapted_model(tmp_path_factory.mktemp("hybrid"), mesh, "hybrid-first", adapter_of("hybrid-first"))
    rules = list(read_model(run.hf_dir)[0].weight_rules(model.shape))
    base = HFTensors(run.hf_dir)
    out = run.output_dir / "copy"
    tensors = ((name, base.get(name)) for rule in rules for name in rule.hf)
    save_hf_weights([model], mesh, rules, run.hf_dir, out, file_bytes=200_000, tensors=tensors)
    return SimpleNamespace(base=run.hf_dir, out=out)


def check_names(base: Path, exported: Path) -> None:
    """Check that an export has the tensors of its base, each once."""
    assert HFTensors(exported).names() == HFTensors(base).names()


def test_weights_that_are_not_computed_are_kept(hybrid, tmp_path):
    """The layer that predicts a second token was dropped on export, although config.json still named it.

    https://github.com/modelscope/ms-swift/issues/9802 https://github.com/unslothai/unsloth/pull/11042
    """
    check_names(hybrid.base, hybrid.out)
    load_reference(hybrid.base).save_pretrained(tmp_path)  # transformers itself has this fault
    with fault_seen():
        check_names(hybrid.base, tmp_path)


def test_no_file_of_an_export_is_left_out(hybrid, tmp_path):
    """Files with a tensor that was not exported were left out completely, with all their layers, and in the index too.

    https://github.com/areal-project/AReaL/pull/1403
    """
    check_names(hybrid.base, hybrid.out)
    tensors = {name: HFTensors(hybrid.out).get(name) for name in HFTensors(hybrid.out).names()}
    first = load_file(min(hybrid.out.glob("*.safetensors")))
    rest = {name: tensor for name, tensor in tensors.items() if name not in first}
    save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert rest
    with fault_seen():
        check_names(hybrid.base, tmp_path)


def test_tied_embeddings_stay_tied(adapted, tmp_path):
    """A tied model was exported with an output matrix of its own, or loaded with a random one.

    https://github.com/hiyouga/LlamaFactory/issues/10560 https://github.com/huggingface/transformers/pull/43429
    """

    def check(weights: Path) -> None:
        check_names(adapted.base, weights)
        directory = Path(shutil.copytree(adapted.base, tmp_path / "whole"))
        shutil.copy(weights / "model.safetensors", directory)
        model = transformers.AutoModelForImageTextToText.from_pretrained(directory)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    check(adapted.hf)
    untied = Path(shutil.copytree(adapted.hf, tmp_path / "untied"))
    tensors = load_file(untied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, untied / "model.safetensors", metadata={"format": "pt"})
    with fault_seen():
        check(untied)


def test_dtypes_are_those_of_the_base(hybrid, tmp_path):
    """Tensors that a base keeps in float32 were exported in bfloat16, which changed the decay over long texts.

    https://github.com/vllm-project/vllm/pull/51836
    """

    def check(read: Callable[[str], torch.Tensor]) -> None:
        base = HFTensors(hybrid.base)
        assert all(read(name).dtype == base.get(name).dtype for name in base.names())

    check(HFTensors(hybrid.out).get)
    with fault_seen():
        check(lambda name: HFTensors(hybrid.out).get(name).bfloat16())
