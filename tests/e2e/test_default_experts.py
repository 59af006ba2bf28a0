"""The default recipe with a model whose layers route tokens to experts learns to read digits too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ATHANOR = Path(sys.executable).parent / "athanor"


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_held_out_digits_are_read_by_experts(family, tmp_path):
    """With the recipe's own steps, without the model before training. Both families read 0.9783 right."""
    env = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")}
    settings = ("--set", f"model.family={family}", "--set", "compare=null")
    command = [ATHANOR, "run", "--root", str(tmp_path), *settings]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    (evaluated,) = (tmp_path / "artifacts" / "evaluate").iterdir()
    scores = json.loads((evaluated / "manifest.json").read_text())["stats"]["scores"]["digits_single"]
    assert scores["exact_match"] >= 0.95 and scores["stop_rate"] >= 0.99
    (released,) = (tmp_path / "artifacts" / "release").iterdir()
    assert json.loads((released / "hf" / "config.json").read_text())["model_type"] == family
    assert "parameters, for a token" in (released / "hf" / "README.md").read_text()
