"""Which rows the last layer goes on with."""

import pytest
import torch

from trainer.layers.segments import SelectedRows


@pytest.mark.parametrize(
    ("places", "multiple", "expected"),
    [
        ([4, 7], 1, [4, 7]),
        ([4, 7, 9], 2, [4, 7, 9, 0]),
        ([4, 7], 2, [4, 7]),
        ([], 1, [0]),
        ([], 4, [0, 0, 0, 0]),
    ],
)
def test_places_are_filled_up_to_a_multiple_and_never_none(places, multiple, expected):
    rows = SelectedRows.of(torch.tensor(places, dtype=torch.int64), None, multiple)
    assert rows.index.tolist() == expected
