"""The trainer on a machine without a GPU on which Transformer Engine is installed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


_PROGRAM = """
import trainer.loop.job
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
print(HAVE_TE, USING_PYTORCH_OPTIMIZER)
"""


def test_transformer_engine_is_not_used_where_it_is_installed_without_a_gpu(tmp_path):
    optimizers = tmp_path / "transformer_engine" / "pytorch" / "optimizers"
    optimizers.mkdir(parents=True)
    for package in (optimizers.parent.parent, optimizers.parent):
        (package / "__init__.py").touch()
    names = ("FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale")
    (optimizers / "__init__.py").write_text(f"{' = '.join(names)} = object\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "True"], ran.stderr
