"""Reporting the losses themselves changes nothing of a step: same loss, same gradient norms, same totals."""

import pytest
import torch

from tests.helpers.run_dir import write_job
from tests.helpers.single_rank import single_rank
from trainer.data.reader import prefetch
from trainer.loop.set_up import set_up
from trainer.loop.step import run_micro_batches, train_step
from trainer.objectives.sft import Totals

pytestmark = pytest.mark.promise(
    "Another order in a bin moves losses by at most 2e-6, another image changes only its sample's, and "
    "reporting losses changes no bit."
)

BINS = 3


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """One update with and one without the losses reported: (totals, squared gradient norms, reports)."""

    def step(trainer, mesh, reports_losses: bool):
        totals, reports = Totals.zero(mesh.device), []
        batches = prefetch(trainer.order.reader, iter(range(BINS)), BINS, pin=False)

        def accumulate():
            reports.extend(
                run_micro_batches(trainer.chunks, batches, BINS, mesh, totals, return_per_token_outputs=reports_losses)
            )

        return totals, train_step(trainer.chunks, trainer.optimizer, accumulate), reports

    taken = {}
    for reports_losses in (False, True):
        run = write_job(tmp_path_factory.mktemp(f"losses-{reports_losses}"), num_steps=9)
        with single_rank() as mesh:
            taken[reports_losses] = step(set_up(run, mesh), mesh, reports_losses)
    return taken


def test_the_step_is_the_same_to_the_bit(steps):
    (totals, squares, _), (other_totals, other_squares, _) = steps[False], steps[True]
    assert torch.equal(totals.loss_and_tokens, other_totals.loss_and_tokens)
    assert torch.equal(squares, other_squares) and (squares > 0).all()
    assert (totals.tokens, totals.slots) == (other_totals.tokens, other_totals.slots)


def test_the_losses_are_those_that_were_summed(steps):
    totals, *_, reports = steps[True]
    losses = torch.cat([report["losses"] for report in reports])
    total, count = totals.loss_and_tokens.tolist()
    assert len(losses) == count and losses.double().sum().item() == pytest.approx(total, rel=1e-6)
    assert all("losses" not in report for report in steps[False][2])
