"""10,000 spoilt inputs, by a seeded generator: each ends as a sample or with a reason from the list, none does harm.

And 900 spoilt model directories: each is taken, and can be read whole, or refused in one line.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dataset_builders.contracts.sample import SKIP_REASONS
from dataset_builders.sources.registry import BUILDERS
from tests.fuzz.run_models import OUTCOMES
from tests.fuzz.sources import KINDS

SEED = 20261121
COUNTS = {
    "images": 3000,
    "chat": 1000,
    "the_cauldron": 1000,
    "cord_v2": 1000,
    "table": 800,
    "openai_messages": 1200,
    "llava": 1000,
    "webdataset_tars": 1000,
}
MODELS = 900
MAX_GROWTH = 1 << 30
# A spoilt file gives its rows, or one InputError that names it.
OF_FILES = {"file: rows", "file: no row", "file: InputError"}
ROOT = Path(__file__).parents[2]


def run(kind: str, count: int, directory: Path, seed: int = SEED, module: str = "") -> subprocess.CompletedProcess[str]:
    module = module or ("tests.fuzz.run_chats" if kind == "chat" else "tests.fuzz.run_inputs")
    command = [sys.executable, "-W", "ignore", "-m", module, kind, str(seed), str(count), str(directory)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


def test_every_builder_is_fuzzed_and_they_are_ten_thousand():
    assert set(KINDS) == set(BUILDERS)
    assert set(COUNTS) == {*BUILDERS, "images", "chat"} and sum(COUNTS.values()) == 10_000


@pytest.mark.parametrize("kind", COUNTS)
def test_every_input_has_a_known_end(kind, tmp_path):
    done = run(kind, COUNTS[kind], tmp_path)
    assert done.returncode == 0, f"{kind}: {done.stderr[-4000:]}"
    result = json.loads(done.stdout)
    outcomes = result["outcomes"]
    assert sum(outcomes.values()) == COUNTS[kind]
    assert set(outcomes) <= {"sample", *SKIP_REASONS, *OF_FILES}
    assert result["grown_bytes"] < MAX_GROWTH
    assert outcomes["sample"] > COUNTS[kind] // 50, outcomes  # else only the first check was ever reached
    assert len(outcomes) > 3


def test_every_model_directory_is_taken_or_refused_in_one_line(tmp_path):
    done = run("model", MODELS, tmp_path, module="tests.fuzz.run_models")
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert sum(result["outcomes"].values()) == MODELS and set(result["outcomes"]) == OUTCOMES
    assert result["grown_bytes"] < MAX_GROWTH


def test_the_watch_sees_what_it_looks_for(tmp_path):
    assert run("raises", 1, tmp_path, module="tests.fuzz.naughty").returncode == 1
    hung = run("hangs", 1, tmp_path, module="tests.fuzz.naughty")
    assert hung.returncode == 1 and "Timeout (0:00:01)!" in hung.stderr
    grown = json.loads(run("grows", 1, tmp_path, module="tests.fuzz.naughty").stdout)
    assert MAX_GROWTH // 4 < grown["grown_bytes"] < MAX_GROWTH
