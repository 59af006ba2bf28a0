"""Our Qwen3 against transformers': float32, CPU, random weights, two shapes, several samples in one bin."""

from pkgutil import resolve_name

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.bins import TEXT_ONLY, Kind, make_samples
from tests.helpers.reference import reference_logits, reference_losses
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_text_model import text_hf_dir
from trainer.checkpoint.hf_weights import HFTensors, save_hf_weights
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)

SEQ_LEN = 128


@pytest.fixture(scope="module", params=["first", "second"])
def hf_dir(request):
    return text_hf_dir(request.param)


@pytest.fixture(scope="module")
def family(hf_dir):
    return read_model(hf_dir)[0]


@pytest.fixture(scope="module")
def reference(hf_dir, family):
    return resolve_name(family.reference).from_pretrained(hf_dir, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture(scope="module")
def mesh():
    with single_rank() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def ours(hf_dir, mesh):
    return build_tiny(hf_dir, mesh, SEQ_LEN)


@pytest.fixture(scope="module")
def samples(ours):
    return make_samples([TEXT_ONLY, Kind(60), TEXT_ONLY, Kind(21)], geometry_of(ours.shape), range(20, 300))


@pytest.fixture(scope="module")
def batch(ours, samples):
    return make_micro_batch(samples, geometry_of(ours.shape), SEQ_LEN)


def test_logits_of_a_packed_bin(ours, reference, samples, batch):
    logits = ours.hidden_states(batch)[:, 0] @ ours.language.output_weight.t()
    start = 0
    for sample in samples:
        theirs = reference_logits(reference, sample)
        assert_close(logits[start : start + len(theirs)], theirs, atol=1e-4, rtol=0)
        start += len(theirs)


def test_loss_and_the_gradient_of_every_parameter(ours, reference, family, samples, batch):
    theirs = torch.cat([reference_losses(reference, sample) for sample in samples])
    theirs.mean().backward()
    losses = ours(batch)
    losses.mean().backward()
    assert_close(losses, theirs, atol=1e-4, rtol=0)
    grads = {name: p.grad for name, p in reference.named_parameters()}
    params = dict(ours.named_parameters())
    compared = set()
    for rule in family.weight_rules(ours.shape):
        for name, grad in zip(rule.hf, rule.packing.split(params[rule.ours].grad, len(rule.hf), 1)):
            assert float((grad - grads[name]).norm() / grads[name].norm().clamp(min=1e-6)) <= 1e-4, name
            compared.add(name)
    assert compared == set(grads)


@pytest.mark.promise(
    "Weights that were not trained leave in the Hugging Face format with the bits and in the form in which they came."
)
def test_weights_in_and_out_are_bit_equal(ours, family, mesh, hf_dir, tmp_path):
    save_hf_weights([ours], mesh, family.weight_rules(ours.shape), hf_dir, tmp_path)
    before, after = HFTensors(hf_dir), HFTensors(tmp_path)
    assert before.names() == after.names()
    assert all(torch.equal(before.get(name), after.get(name)) for name in before.names())
