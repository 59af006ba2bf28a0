"""The drawn data are the same every time, so that a test of scores fails for a change of the scores alone."""

import pytest

from tests.helpers.drawn.suite import SUBSETS, iter_suite_rows
from tests.helpers.drawn.write import write_suite
from tests.helpers.trees import tree_digest

pytestmark = pytest.mark.full  # a dataset of the tests alone

FEW = dict.fromkeys(SUBSETS, 6)


def test_rebuilt_it_has_the_same_bytes_and_another_seed_or_number_draws_another_picture(tmp_path):
    first, second = (write_suite(tmp_path / name, FEW) for name in ("first", "second"))
    assert tree_digest(first) == tree_digest(second)
    rows = [row for seed in (0, 1) for _, row in iter_suite_rows(seed, FEW)]
    assert len({row["images"][0]["bytes"] for row in rows}) == len(rows) == 2 * sum(FEW.values())
    assert [row for _, row in iter_suite_rows(0, {"docvqa": 5})] == rows[6:11]  # whatever the number of rows
