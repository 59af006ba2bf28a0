"""`athanor plan`: what a run would do, how big it is, and what memory it needs. Makes nothing."""

import argparse
import sys
from collections.abc import Mapping

from dataset_builders.contracts.sample import SPLITS
from flows.pipeline_config import PipelineConfig
from flows.recipe import load_recipe
from flows.stage_graph import PlannedStage, plan_stages
from flows.text_table import print_table
from stages.artifact import Artifact, Input
from stages.estimate import count_from_facts, estimate_memory, facts_of_embedded
from stages.hf_directory import read_model_config
from trainer.contract.model_facts import ModelFacts

UNKNOWN = "known once the data is made"


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan."""
    recipe = load_recipe(args.recipe, args.overrides)
    planned, found = plan_stages(recipe.config, args.root)
    is_terminal = sys.stdout.isatty()
    print(f"recipe {recipe.name}, root {args.root}")
    rows = [(stage.name, "reuse" if stage.artifact else "make", _why(stage)) for stage in planned]
    print_table("Stages", ("stage", "", "why"), rows, is_terminal)
    print_table("Size", ("", "value"), size_rows(recipe.config, found), is_terminal)
    made = sum(stage.artifact is None for stage in planned)
    print(f"\n{made} of {len(planned)} stages would be made, {len(planned) - made} reused.")
    return 0


def _why(stage: PlannedStage) -> str:
    return f"{stage.artifact.dir.name} is finished" if stage.artifact else stage.why


def size_rows(config: PipelineConfig, found: Mapping[str, Input]) -> list[tuple[str, str]]:
    """Samples, bins, steps, epochs, parameters and memory, as far as they are known now."""
    facts = model_facts(config, found)
    parts, memory = count_from_facts(facts), _memory(config, facts)
    steps, batch = config.train.num_steps, config.train.global_batch_size
    tokens = steps * batch * config.plan_bins.seq_len
    return [
        ("samples", _samples(found.get("tokenize"))),
        ("bins", _bins(found.get("plan_bins"))),
        ("steps", f"{steps:,} of {batch} bins of {config.plan_bins.seq_len:,} tokens (up to {tokens:,} tokens)"),
        ("epochs", _epochs(found.get("plan_bins"), steps * batch)),
        ("parameters", f"{sum(parts.values()):,} ({', '.join(f'{name} {n:,}' for name, n in parts.items())})"),
        (
            "memory",
            f"about {_size(sum(memory.values()))} on the fullest process, without the {_RUNTIME} of torch itself",
        ),
        *((f"  {name}", _size(value)) for name, value in memory.items()),
        ("processes", str(config.execution.cluster.processes)),
    ]


_RUNTIME = "0.5 to 1 GB"


def _memory(config: PipelineConfig, facts: ModelFacts) -> dict[str, int]:
    parallel = config.execution.parallel
    dp = config.execution.cluster.processes // parallel.model_size
    return estimate_memory(
        facts,
        parallel,
        dp=dp,
        num_micro_batches=config.train.global_batch_size // dp,
        seq_len=config.plan_bins.seq_len,
        max_patches=config.plan_bins.max_patches,
        precision=config.train.precision,
    )


def model_facts(config: PipelineConfig, found: Mapping[str, Input]) -> ModelFacts:
    """The facts of the model that would be trained, whether it is there or still to be made."""
    if isinstance(config.model, str):
        return ModelFacts.from_hf(read_model_config(found["model"].dir))
    return facts_of_embedded(config.model.model_dump())


def _samples(tokenized: Input | None) -> str:
    if not isinstance(tokenized, Artifact):
        return UNKNOWN
    counts = {"train": 0, "heldout": 0}
    for shard in tokenized.manifest.shards:
        counts[shard.split] += shard.num_samples
    skipped = sum(tokenized.manifest.skips.values())
    return f"{counts['train']:,} train, {counts['heldout']:,} held-out, {skipped:,} left out"


def _bins(bins: Input | None) -> str:
    if not isinstance(bins, Artifact):
        return UNKNOWN
    stats = bins.manifest.stats
    fraction = stats.get("padding_fraction")
    shown = fraction.get("train") if isinstance(fraction, dict) else fraction
    padding = "" if shown is None else f"; {shown:.1%} padding"
    return ", ".join(f"{stats['num_bins'][split]:,} {split}" for split in SPLITS) + padding


def _epochs(bins: Input | None, num_bins: int) -> str:
    if not isinstance(bins, Artifact):
        return UNKNOWN
    return f"{num_bins / max(1, bins.manifest.stats['num_bins']['train']):.2f}"


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
