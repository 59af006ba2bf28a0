"""The trainer on a machine without a GPU on which libraries of GPU kernels are installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMES = ("FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale")
_PROGRAM = """
import trainer.loop.job
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
print(HAVE_TE, USING_PYTORCH_OPTIMIZER)
"""


@pytest.mark.parametrize("library", ["transformer_engine/pytorch", "apex"])
def test_the_adam_of_torch_is_taken(library, tmp_path):
    optimizers = tmp_path / library / "optimizers"
    optimizers.mkdir(parents=True)
    (optimizers / "__init__.py").write_text(f"{' = '.join(NAMES)} = object\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "True"], ran.stderr
