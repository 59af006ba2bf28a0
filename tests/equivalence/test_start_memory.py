"""What the trainer's processes take of the host's memory, at 600 million parameters; the small tests of it are
`test_one_matrix_is_there_unpacked_while_a_base_is_loaded` and `test_a_model_is_divided_before_it_has_memory`."""

import pytest

from tests.bench.bench_start_memory import SIZES, large_job, peaks_of
from tests.helpers.bins import Kind
from tests.helpers.large_model import write_large_model
from tests.helpers.run_dir import changed, log_of, make_bins, metrics_of, run_trainer, write_job
from tests.helpers.tiny_text_model import text_config
from trainer.contract.adapter import AdapterConfig
from trainer.contract.parallel import ParallelConfig

LAYERS = 38  # 598 million parameters


@pytest.mark.full
def test_a_float8_base_takes_a_byte_a_parameter(tmp_path):
    """0.5 GB are torch and megatron-core, 0.6 the codes; whole in float32 the weights were 2.4 GB more."""
    parameters = write_large_model(
        tmp_path / "hf", text_config("first", **SIZES, num_hidden_layers=LAYERS, head_dim=128)
    )
    assert parameters > 590e6
    bins = make_bins("text-first", [[Kind(30)]] * 4)
    run = write_job(tmp_path, num_steps=3, shape="text-first", bins=bins, parallel=ParallelConfig(recompute="full"))
    adapter = AdapterConfig(rank=4, alpha=8, base="float8")
    train = run.train.model_copy(update={"adapter": adapter})
    run = changed(run, hf_dir=tmp_path / "hf", seq_len=32, train=train)
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    assert run_trainer(run, timeout=600) == 0, log_of(run)
    assert max(row.memory_gb for row in metrics_of(run)) < 1.3


@pytest.mark.full
def test_fsdp_starts_with_each_ranks_share(tmp_path):
    """Its share of the weights, and beside that at most one matrix, as read and as written."""
    for sizes in peaks_of(large_job(tmp_path, LAYERS)):
        assert sizes["share"] == pytest.approx(4 * 598_301_184 / 2 / 1e9, rel=1e-3)
        assert sizes["peak"] - sizes["before"] < sizes["share"] + 0.3
