"""The trainer on a machine without a GPU on which libraries of GPU kernels are installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiers import full

ROOT = Path(__file__).parents[3]
BOTH = ("transformer_engine/pytorch", "apex")
NAMES = ("FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale")
_PROGRAM = """
import trainer.loop.job
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
print(HAVE_TE, USING_PYTORCH_OPTIMIZER)
"""


# megatron-core asks for the first, and for the second where it cannot have the first.
@pytest.mark.parametrize("libraries", [BOTH, full(BOTH[:1]), full(BOTH[1:])], ids="+".join)
def test_the_adam_of_torch_is_taken(libraries, tmp_path):
    for library in libraries:
        optimizers = tmp_path / library / "optimizers"
        optimizers.mkdir(parents=True)
        (optimizers / "__init__.py").write_text(f"{' = '.join(NAMES)} = object\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "True"], ran.stderr
