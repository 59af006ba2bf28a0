"""The recipe `adapter`: adapters teach a model that reads digits to spell them, on a CPU, and it still reads them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataset_builders.contracts.manifest import load_manifest
from stages.shared.inputs.adapter_directory import AdapterDirectory
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.patience import at_most

pytestmark = pytest.mark.promise(
    "Adapters teach a model that reads digits to spell at least 85% of them; of the first task it loses at "
    "most 6 points."
)

ATHANOR = Path(sys.executable).parent / "athanor"
BASE = ("train.num_steps=400", "compare=null")
SECOND = ("train.num_steps=200", "evaluate.adapter=beside")


def run(root: Path, *arguments: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")}
    command = [ATHANOR, "run", "--root", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=at_most(900))
    assert done.returncode == 0, done.stdout + done.stderr


def artifacts(root: Path, stage: str) -> list[Path]:
    return sorted((root / "artifacts" / stage).iterdir(), key=lambda path: path.stat().st_mtime)


@pytest.mark.full
def test_adapters_learn_a_second_task_and_the_base_stays_as_it_is(tmp_path):
    run(tmp_path, *(f"--set={setting}" for setting in BASE))
    (base,) = artifacts(tmp_path, "release")
    weights = (base / "hf" / "model.safetensors").read_bytes()
    run(tmp_path, "adapter", f"--set=model={base / 'hf'}", *(f"--set={setting}" for setting in SECOND))
    assert (base / "hf" / "model.safetensors").read_bytes() == weights
    _, before, after = _by_inputs(tmp_path)
    assert before["digits_words"] == 0 and before["digits_single"] >= 0.85
    assert after["digits_words"] >= 0.85 and after["digits_single"] >= before["digits_single"] - 0.06
    export = artifacts(tmp_path, "export")[-1]
    adapter = AdapterDirectory(export / "adapter")
    adapter.check_base(ModelDirectory(base / "hf"))
    assert len(adapter.modules) == 3 * 7 + 3 * 2  # the language model's layers and three mergers
    (compared,) = artifacts(tmp_path, "compare")
    assert "digits_single" in json.dumps(load_manifest(compared).stats)


def _by_inputs(root: Path) -> list[dict[str, float]]:
    """Return the exact match by subset: of the first training's model, then of the second training's base and
    result."""
    scores = []
    for directory in artifacts(root, "evaluate"):
        manifest = load_manifest(directory)
        subsets = manifest.stats["scores"]
        kind = 0 if "digits_words" not in subsets else 1 if "start_of" in manifest.parents else 2
        scores.append((kind, {name: row["exact_match"] for name, row in subsets.items()}))
    return [values for _, values in sorted(scores, key=lambda item: item[0])]
