"""Damaged inputs from a seeded generator: each becomes a sample or gets a listed reason, and none does harm.

Damaged model directories are accepted and completely readable, or refused in one line. All 10,000 inputs and 900
directories are drawn from a new seed each time, which is printed. ATHANOR_FUZZ_SEED repeats a seed.
"""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from dataset_builders.contracts.sample import SKIP_REASONS
from dataset_builders.sources.registry import BUILDERS
from tests.fuzz.mutated_models import OUTCOMES
from tests.fuzz.sources import KINDS
from tests.helpers.patience import at_most

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "10,000 mutated inputs become a sample or a named reason within 10 s and 1 GiB, and 900 mutated model "
        "directories are taken or refused."
    ),
]
SEED = int(os.environ.get("ATHANOR_FUZZ_SEED") or secrets.randbelow(1 << 31))
COUNTS = {
    "images": 1800,
    "chat": 1000,
    "the_cauldron": 1000,
    "cord_v2": 1000,
    "table": 800,
    "openai_messages": 1200,
    "llava": 1000,
    "image_folder": 600,
    "detection": 600,
    "webdataset_tars": 1000,
}
MODELS = 900
MAX_GROWTH = 1 << 30
# A damaged file gives its rows, or one InputError that names it.
OF_FILES = {"file: rows", "file: no row", "file: InputError"}
ROOT = Path(__file__).parents[2]


def run(kind: str, count: int, directory: Path) -> subprocess.CompletedProcess[str]:
    words = ["-W", "ignore", "-m", "tests.fuzz.run_inputs", kind, str(SEED), str(count), str(directory)]
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=at_most(300), check=False)


def run_whole(kind: str, count: int, directory: Path) -> dict[str, int]:
    """Return the number of inputs per outcome. Every input has one, and memory stays within its limit."""
    done = run(kind, count, directory)
    assert done.returncode == 0, f"ATHANOR_FUZZ_SEED={SEED}, {kind}: {done.stderr[-4000:]}"
    result = json.loads(done.stdout)
    assert sum(result["outcomes"].values()) == count
    assert result["grown_bytes"] < MAX_GROWTH, f"ATHANOR_FUZZ_SEED={SEED}"
    return result["outcomes"]


def test_every_builder_is_fuzzed_and_they_are_ten_thousand():
    assert set(KINDS) == set(BUILDERS)
    assert set(COUNTS) == {*BUILDERS, "images", "chat"} and sum(COUNTS.values()) == 10_000


@pytest.fixture(autouse=True)
def seed(capsys):
    """Print the seed, even if nothing fails."""
    with capsys.disabled():
        print(f"ATHANOR_FUZZ_SEED={SEED}", end=" ", flush=True)


@pytest.mark.parametrize("kind", COUNTS)
def test_every_input_has_a_known_end(kind, tmp_path):
    outcomes = run_whole(kind, COUNTS[kind], tmp_path)
    assert set(outcomes) <= {"sample", *SKIP_REASONS, *OF_FILES}, f"ATHANOR_FUZZ_SEED={SEED}"
    assert outcomes["sample"] > COUNTS[kind] // 50, outcomes  # otherwise only the first check would have been reached
    assert len(outcomes) > 3


def test_every_model_directory_is_taken_or_refused_in_one_line(tmp_path):
    assert run_whole("model", MODELS, tmp_path).keys() == OUTCOMES


def test_the_watch_sees_what_it_looks_for(tmp_path):
    assert run("raises", 1, tmp_path).returncode == 1
    hung = run("hangs", 1, tmp_path)
    assert hung.returncode == 1 and "Timeout (0:00:01)!" in hung.stderr
    grown = json.loads(run("grows", 1, tmp_path).stdout)
    assert MAX_GROWTH // 4 < grown["grown_bytes"] < MAX_GROWTH
