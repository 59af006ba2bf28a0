"""A command that is refused is refused at once: before what takes seconds to load is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "prefect", "mlflow", "transformers", "tokenizers", "scipy", "matplotlib", "webdataset"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--set", "train.optim.lr=abc"], "train.optim.lr='abc' should be a valid number"),
        (["run", "--set", "nosuch.key=1"], "unknown key nosuch"),
        (["run", "--set", "model=/nowhere"], "model '/nowhere' is not a directory here"),
        (["run", "nope"], "no recipe 'nope'"),
        (["plan", "--set", "convert.options={turns: neither}"], "convert"),
        (["lmms-eval", "--set", "train.lr=1"], "unknown key train.lr"),
        (["sweep", "--grid", "train.optim.lr=[7]"], "train.optim.lr=7 should be less than or equal to 1"),
        (["compare", "--grid", "train.seed=[0,1]"], "the command is now `athanor sweep`, with the same arguments"),
        (["ask", "/nowhere", "-", "Which digit?"], "model '/nowhere' is not a directory here"),
    ],
)
def test_nothing_heavy_is_loaded(arguments, words, tmp_path):
    code = f"import sys\nfrom flows.cli.main import main\nstatus = main({[*arguments, '--root', str(tmp_path)]})\n"
    code += f"print(status, sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "2 []"
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
