"""The plan says what host memory the saves of a training take, and which tensors are carried."""

from flows.cli.commands.plan import size_rows
from flows.pipeline.recipe import load_recipe
from stages.artifacts.artifact import External
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.helpers.tiny_model import tiny_hf_dir


def host_memory(*overrides: str) -> str | None:
    rows = dict(size_rows(load_recipe("embedded", list(overrides)).config, {}))
    assert "memory" in rows
    return rows.get("host memory")


def test_host_memory_is_named_where_a_save_comes_before_the_last():
    said = host_memory("execution.checkpoint.save_interval=10", "train.num_steps=1000")
    assert said.endswith("MB in the fullest process, page-locked: checkpoints are written from it")
    assert host_memory("execution.checkpoint.save_interval=1000", "train.num_steps=1000") is None
    assert host_memory("execution.checkpoint.save_interval=10", "execution.checkpoint.asynchronous=false") is None


def test_tensors_that_are_carried_are_named():
    carried = "2 tensors mtp.*: exported as they are, not trained"
    for hf_dir, said in ((hybrid_hf_dir(), carried), (tiny_hf_dir(), None)):
        config = load_recipe("embedded", [f"model={hf_dir}"]).config
        rows = dict(size_rows(config, {"model": External(dir=hf_dir, name="hf_dir", digest="0" * 16)}))
        assert rows.get("carried") == said
