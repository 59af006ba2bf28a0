"""`athanor` as a user types it, with settings that make a whole run small, and one such run that many tests look at."""

import contextlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import filelock
import pytest

from flows.cli.main import main
from flows.tracking.store import connect
from tests.helpers.fake_trainer import stand_in

SMALL = {
    "data.num_scans": 40,
    "data.num_multi": 8,
    "data.num_pairs": 8,
    "data.num_texts": 8,
    "convert.heldout_fraction": 0.3,
    "tokenize.system_prompt": "Be brief.",
    "train.num_steps": 5,
    "train.optim.lr": 0.002,
    "train.optim.warmup_steps": 1,
    "evaluate.max_new_tokens": 2,
    "evaluate.max_samples_per_subset": 2,
    "execution.num_workers": 1,
    "execution.registry.gates": {},  # after five steps a model cannot end its answers yet
}


def athanor(command: str, root: Path, *arguments: str, **changes: object) -> int:
    """Run a command with the small settings in this process, and return its exit status. In the names of changes, __ is
    a dot."""
    sets = [f"--set={key.replace('__', '.')}={value}" for key, value in {**SMALL, **changes}.items()]
    return main([command, *arguments, "--root", str(root), *sets])


def error_line(capsys: pytest.CaptureFixture) -> str:
    """Return the one line of stderr that is not a warning. On a loaded machine a warning about MLflow
    may come first."""
    (line,) = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("warning: ")]
    return line


def runs_of(root: Path, condition: str = "") -> list:
    """Return MLflow's runs of the recipe `embedded` on a root, all of them or those of a condition."""
    client = connect(root)
    return client.search_runs([client.get_experiment_by_name("athanor-embedded").experiment_id], condition)


@contextlib.contextmanager
def stand_in_trainer():
    """Replace the training and the drawing of its curves by stand-ins, and hide the developer's servers."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "FAKE_TRAINER"):
            patch.delenv(name, raising=False)
        stand_in(patch)
        yield


@dataclass(frozen=True)
class SmallRun:
    """A finished run with the small settings and the stand-in trainer. All tests share its root: look, do not write."""

    root: Path
    printed: str

    def copy(self, directory: Path) -> Path:
        """Return a copy of the root, for a test that goes on from it."""
        return Path(shutil.copytree(self.root, directory / "root", symlinks=True))


def made_once(directory: Path) -> SmallRun:
    """Return the run below a directory, and make it if no other process has done so."""
    told = directory / "printed.json"
    with filelock.FileLock(directory / "lock"):
        if not told.exists():
            with stand_in_trainer(), contextlib.redirect_stdout(io.StringIO()) as out:
                assert athanor("run", directory / "root") == 0
            told.write_text(json.dumps(out.getvalue()))
    return SmallRun(directory / "root", json.loads(told.read_text()))
