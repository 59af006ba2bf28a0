"""A packed bin of athanor against transformers. A pair has `ours`, `reference`, their `samples` and the `batch`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.testing import assert_close

from tests.helpers.reference import reference_logits, reference_losses
from trainer.model.rules import Rule


def assert_logits_equal(pair: Any) -> None:
    """Assert that the logits of every sample agree to 1e-4. Athanor's model may be on a GPU."""
    ours = (pair.ours.hidden_states(pair.batch)[:, 0] @ pair.ours.language.output_weight.t()).cpu()
    start = 0
    for sample in pair.samples:
        theirs = reference_logits(pair.reference, sample)
        assert_close(ours[start : start + len(theirs)], theirs, atol=1e-4, rtol=0)
        start += len(theirs)


def assert_losses_and_gradients_equal(pair: Any, rules: Sequence[Rule]) -> None:
    """Assert that the loss of every token agrees to 1e-4, and the gradient of every parameter to 1e-4 of its norm."""
    pair.reference.zero_grad()
    theirs = torch.cat([reference_losses(pair.reference, sample) for sample in pair.samples])
    theirs.mean().backward()
    pair.ours.zero_grad()
    ours = pair.ours(pair.batch)
    ours.mean().backward()
    assert_close(ours.cpu(), theirs, atol=1e-4, rtol=0)
    grads = {name: p.grad for name, p in pair.reference.named_parameters()}
    params = dict(pair.ours.named_parameters())
    compared = set()
    for rule in rules:
        for name, grad in zip(rule.hf, rule.packing.split(params[rule.ours].grad.cpu(), len(rule.hf), 1)):
            assert grads[name].norm() > 1e-6, f"{name} shows nothing"
            assert float((grad - grads[name]).norm() / grads[name].norm()) <= 1e-4, name
            compared.add(name)
    assert compared == set(grads)
