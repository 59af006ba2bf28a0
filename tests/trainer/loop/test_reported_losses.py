"""Reporting the losses themselves changes nothing of a step: same loss, same gradient norms, same totals."""

from unittest.mock import patch

import pytest
import torch

from tests.helpers.run_dir import write_job
from tests.helpers.single_rank import single_rank
from trainer.data.reader import prefetch
from trainer.loop import step as loop_step
from trainer.loop.set_up import set_up

pytestmark = pytest.mark.promise(
    "Another order in a bin moves losses by at most 2e-6, another image changes only its sample's, and "
    "reporting losses changes no bit."
)

BINS = 3


def step(root, *, reports_losses: bool):
    """The totals of one update, its squared gradient norms, and what was reported of its micro batches."""
    reports, run_micro_batches = [], loop_step.run_micro_batches

    def reporting(*args):
        reports.extend(run_micro_batches(*args, return_per_token_outputs=reports_losses))

    with single_rank() as mesh, patch.object(loop_step, "run_micro_batches", reporting):
        trainer = set_up(write_job(root, num_steps=9), mesh)
        batches = prefetch(trainer.order.reader, iter(range(BINS)), BINS, pin=False)
        squares = loop_step.train_step(trainer.chunks, trainer.optimizer, batches, BINS, trainer.context)
        return trainer.context.totals, squares, reports


def test_a_step_that_reports_its_losses_is_the_same_to_the_bit(tmp_path):
    totals, squares, plain = step(tmp_path / "plain", reports_losses=False)
    other_totals, other_squares, reports = step(tmp_path / "reporting", reports_losses=True)
    assert torch.equal(totals.loss_and_tokens, other_totals.loss_and_tokens)
    assert torch.equal(squares, other_squares) and (squares > 0).all()
    assert (totals.tokens, totals.slots) == (other_totals.tokens, other_totals.slots)
    losses = torch.cat([report["losses"] for report in reports])
    total, count = totals.loss_and_tokens.tolist()
    assert len(losses) == count and losses.double().sum().item() == pytest.approx(total, rel=1e-6)
    assert all("losses" not in report for report in plain)
