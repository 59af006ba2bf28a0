"""The data stages of a small source in many shards, without a flow: raw rows -> convert -> tokenize -> plan_bins."""

from pathlib import Path

from flows.pipeline.recipe import load_recipe
from stages.convert.stage import STAGE as CONVERT
from stages.plan_bins.stage import STAGE as PLAN_BINS
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.tokenize.stage import STAGE as TOKENIZE
from tests.helpers.raw_rows import mixed_rows, plain_rows, row, write_source

SETTINGS = (
    "convert.shard_size_mb=0.05",
    "convert.heldout_fraction=0.2",
    "convert.max_skip_fraction=0.5",
    "tokenize.max_seq_len=256",
    "plan_bins.seq_len=512",
    "plan_bins.max_patches=1024",
)


def write_rows(source: Path) -> Path:
    """Write several hundred rows of every kind, with unusable rows and duplicates, in about forty files."""
    rows = [*plain_rows(240, first_seed=5000), *mixed_rows()]
    rows[::40] = [row([b"no picture"], [("What?", "nothing")])] * len(rows[::40])
    again = [*plain_rows(30, first_seed=5000), *plain_rows(40, first_seed=9000)]
    return write_source(source, {"first": rows, "second": again}, file_rows=9)


def run_convert(source: Path, root: Path, resources: StageResources | None = None) -> Path:
    inputs = {"raw": External(source, "raw", "0" * 16)}
    return run_stage(CONVERT, load_recipe(overrides=SETTINGS).config.convert, inputs, root, resources).artifact.dir


def run_tokenize(samples: Path, hf_dir: Path, root: Path, resources: StageResources | None = None) -> Path:
    inputs = {"samples": Artifact.load(samples), "processor": processor_input(ModelDirectory(hf_dir))}
    return run_stage(TOKENIZE, load_recipe(overrides=SETTINGS).config.tokenize, inputs, root, resources).artifact.dir


def run_plan_bins(tokenized: Path, root: Path, resources: StageResources | None = None) -> Path:
    inputs = {"tokenized": Artifact.load(tokenized)}
    return run_stage(PLAN_BINS, load_recipe(overrides=SETTINGS).config.plan_bins, inputs, root, resources).artifact.dir


def run_all(source: Path, hf_dir: Path, root: Path, resources: StageResources | None = None) -> Path:
    """Run all three stages, and return the root's directory of artifacts."""
    tokenized = run_tokenize(run_convert(source, root, resources), hf_dir, root, resources)
    run_plan_bins(tokenized, root, resources)
    return root / "artifacts"
