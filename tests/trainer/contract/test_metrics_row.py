"""A line of metrics.jsonl holds the numbers of whatever parts a family names, and no other keys."""

import pytest
from pydantic import ValidationError

from tests.helpers.fake_trainer import metrics_row
from trainer.contract.result import MetricsRow, parse_metrics


def test_numbers_of_parts_are_read_back_under_their_names():
    row = metrics_row(1, adapter_grad_norm=None, vision_seconds=0.5, language_tflops=2.0)
    (again,) = parse_metrics(row.model_dump_json().encode())
    assert again == row
    assert again.model_extra == {"adapter_grad_norm": None, "vision_seconds": 0.5, "language_tflops": 2.0}


@pytest.mark.parametrize("changes", [{"los": 1.0}, {"vision_seconds": "soon"}])
def test_other_keys_and_values_are_refused(changes):
    with pytest.raises(ValidationError, match=next(iter(changes))):
        MetricsRow(**metrics_row(1).model_dump() | changes)
