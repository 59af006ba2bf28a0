"""The recipe `adapter`: adapters teach a model that reads digits to spell them, on a CPU, and it still reads them."""

import json
from pathlib import Path

import pytest

from stages.shared.inputs.adapter_directory import AdapterDirectory
from stages.shared.inputs.model_directory import ModelDirectory
from tests.e2e.command import athanor, made, only, sets

pytestmark = pytest.mark.promise(
    "Adapters teach a model that reads digits to spell at least 85% of them; of the first task it loses at "
    "most 6 points."
)

BASE = {"train.num_steps": 400, "compare": "null"}
SECOND = {"train.num_steps": 200, "evaluate.adapter": "beside"}


@pytest.mark.full
def test_adapters_learn_a_second_task_and_the_base_stays_as_it_is(tmp_path):
    athanor("run", "--root", str(tmp_path), *sets(BASE), seconds=900)
    base, (first,) = only(tmp_path, "release").dir / "hf", made(tmp_path, "export")
    weights = (base / "model.safetensors").read_bytes()
    athanor("run", "adapter", "--root", str(tmp_path), *sets({"model": base, **SECOND}), seconds=900)
    assert (base / "model.safetensors").read_bytes() == weights
    _, before, after = _by_inputs(tmp_path)
    assert before["digits_words"] == 0 and before["digits_single"] >= 0.85
    assert after["digits_words"] >= 0.85 and after["digits_single"] >= before["digits_single"] - 0.06
    (second,) = [export for export in made(tmp_path, "export") if export.dir != first.dir]
    adapter = AdapterDirectory(second.dir / "adapter")
    adapter.check_base(ModelDirectory(base))
    assert len(adapter.modules) == 3 * 7 + 3 * 2  # the language model's layers and three mergers
    assert "digits_single" in json.dumps(only(tmp_path, "compare").manifest.stats)


def _by_inputs(root: Path) -> list[dict[str, float]]:
    """Return the exact match by subset: of the first training's model, then of the second training's base and
    result."""
    scores, evaluations = {}, made(root, "evaluate")
    assert len(evaluations) == 3
    for evaluated in evaluations:
        subsets = evaluated.manifest.stats["scores"]
        kind = 0 if "digits_words" not in subsets else 1 if "start_of" in evaluated.manifest.parents else 2
        scores[kind] = {name: row["exact_match"] for name, row in subsets.items()}
    return [scores[kind] for kind in range(3)]
