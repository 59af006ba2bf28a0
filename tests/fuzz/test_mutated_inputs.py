"""Damaged inputs from a seeded generator: each becomes a sample or gets a listed reason, and none does harm.

Damaged model directories are accepted and completely readable, or refused in one line. The core draws 500 inputs from a
fixed seed. The full tier draws 10,000 inputs and 900 directories from a new seed each time, which it prints.
ATHANOR_FUZZ_SEED repeats a seed.
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
from tests.fuzz.run_models import OUTCOMES
from tests.fuzz.sources import KINDS

pytestmark = pytest.mark.promise(
    "10,000 mutated inputs become a sample or a named reason within 10 s and 1 GiB, 900 mutated model "
    "directories are taken or refused; the core draws 500 and 90."
)

SEED = 20261121
NEW_SEED = int(os.environ.get("ATHANOR_FUZZ_SEED") or secrets.randbelow(1 << 31))
COUNTS = {  # numbers of the core tier and of the full tier
    "images": (40, 2400),
    "chat": (40, 1000),
    "the_cauldron": (50, 1000),
    "cord_v2": (50, 1000),
    "table": (40, 800),
    "openai_messages": (60, 1200),
    "llava": (40, 1000),
    "image_folder": (40, 600),
    "webdataset_tars": (140, 1000),  # few inputs of these kinds become samples
}
MODELS = (90, 900)
MAX_GROWTH = 1 << 30
TIERS = [pytest.param(0, SEED, id="core"), pytest.param(1, NEW_SEED, id="full", marks=pytest.mark.full)]
# A damaged file gives its rows, or one InputError that names it.
OF_FILES = {"file: rows", "file: no row", "file: InputError"}
ROOT = Path(__file__).parents[2]


def run(kind: str, count: int, directory: Path, seed: int = SEED, module: str = "") -> subprocess.CompletedProcess[str]:
    module = module or ("tests.fuzz.run_chats" if kind == "chat" else "tests.fuzz.run_inputs")
    command = [sys.executable, "-W", "ignore", "-m", module, kind, str(seed), str(count), str(directory)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


def test_every_builder_is_fuzzed_and_they_are_ten_thousand():
    assert set(KINDS) == set(BUILDERS)
    assert set(COUNTS) == {*BUILDERS, "images", "chat"}
    assert [sum(counts) for counts in zip(*COUNTS.values())] == [500, 10_000]


@pytest.fixture(autouse=True)
def new_seed(request, capsys):
    """Print the new seed of the full tier, even if nothing fails."""
    if request.node.get_closest_marker("full"):
        with capsys.disabled():
            print(f"ATHANOR_FUZZ_SEED={NEW_SEED}", end=" ", flush=True)


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize(("tier", "seed"), TIERS)
def test_every_input_has_a_known_end(kind, tier, seed, tmp_path):
    count = COUNTS[kind][tier]
    done = run(kind, count, tmp_path, seed)
    assert done.returncode == 0, f"ATHANOR_FUZZ_SEED={seed}, {kind}: {done.stderr[-4000:]}"
    result = json.loads(done.stdout)
    outcomes = result["outcomes"]
    assert sum(outcomes.values()) == count
    assert set(outcomes) <= {"sample", *SKIP_REASONS, *OF_FILES}, f"ATHANOR_FUZZ_SEED={seed}"
    assert result["grown_bytes"] < MAX_GROWTH, f"ATHANOR_FUZZ_SEED={seed}"
    assert outcomes["sample"] > count // 50, outcomes  # otherwise only the first check would have been reached
    assert len(outcomes) > 3


@pytest.mark.parametrize(("tier", "seed"), TIERS)
def test_every_model_directory_is_taken_or_refused_in_one_line(tier, seed, tmp_path):
    done = run("model", MODELS[tier], tmp_path, seed, module="tests.fuzz.run_models")
    assert done.returncode == 0, f"ATHANOR_FUZZ_SEED={seed}: {done.stderr[-4000:]}"
    result = json.loads(done.stdout)
    assert sum(result["outcomes"].values()) == MODELS[tier] and set(result["outcomes"]) == OUTCOMES
    assert result["grown_bytes"] < MAX_GROWTH, f"ATHANOR_FUZZ_SEED={seed}"


def test_the_watch_sees_what_it_looks_for(tmp_path):
    assert run("raises", 1, tmp_path, module="tests.fuzz.naughty").returncode == 1
    hung = run("hangs", 1, tmp_path, module="tests.fuzz.naughty")
    assert hung.returncode == 1 and "Timeout (0:00:01)!" in hung.stderr
    grown = json.loads(run("grows", 1, tmp_path, module="tests.fuzz.naughty").stdout)
    assert MAX_GROWTH // 4 < grown["grown_bytes"] < MAX_GROWTH
