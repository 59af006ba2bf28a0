"""The plan says what host memory the saves of a training take."""

from flows.cli.commands.plan import size_rows
from flows.pipeline.recipe import load_recipe


def host_memory(*overrides: str) -> str | None:
    rows = dict(size_rows(load_recipe("embedded", list(overrides)).config, {}))
    assert "memory" in rows
    return rows.get("host memory")


def test_host_memory_is_named_where_a_save_comes_before_the_last():
    said = host_memory("execution.checkpoint.save_interval=10", "train.num_steps=1000")
    assert said.endswith("MB in the fullest process, page-locked: checkpoints are written from it")
    assert host_memory("execution.checkpoint.save_interval=1000", "train.num_steps=1000") is None
    assert host_memory("execution.checkpoint.save_interval=10", "execution.checkpoint.asynchronous=false") is None
