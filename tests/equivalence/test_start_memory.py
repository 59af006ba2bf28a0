"""The host memory that the trainer's processes take under FSDP2, at 600 million parameters. Its small test is
`test_a_model_is_divided_before_it_has_memory`."""

import pytest

from tests.bench.bench_start_memory import large_job, peaks_of

pytestmark = pytest.mark.promise(
    "FSDP2 on 1, 2 and 3 processes trains as the distributed optimizer does: losses to 1e-6, gradient norms to "
    "1e-5, weights to 2e-6."
)

LAYERS = 38  # 598 million parameters


@pytest.mark.full
def test_fsdp_starts_with_each_ranks_share(tmp_path):
    """Its share of the weights, and beside that at most one matrix, as read and as written."""
    for sizes in peaks_of(large_job(tmp_path, LAYERS)):
        assert sizes["share"] == pytest.approx(4 * 598_301_184 / 2 / 1e9, rel=1e-3)
        assert sizes["peak"] - sizes["before"] < sizes["share"] + 0.3
