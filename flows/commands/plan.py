"""`athanor plan`: what a run would do, how big it is, what memory it needs, and what a cluster would get.

Makes nothing.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.store import StorePath, side_dir
from flows.pipeline_config import PipelineConfig
from flows.recipe import load_recipe
from flows.stage_graph import PlannedStage, get_stage, pipeline_nodes, plan_stages
from flows.text_table import print_table
from stages.answer import answers_apart
from stages.answer_job import answer_job
from stages.artifact import Artifact, Input, scratch_dir, stage_identity
from stages.estimate import count_from_facts, estimate_memory, facts_of_embedded
from stages.export import JOB_DIR
from stages.hf_directory import read_model_config
from stages.launch import Job, make_launcher
from stages.train import trainer_job
from trainer.contract.model_facts import ModelFacts

UNKNOWN = "known once the data is made"
UNKNOWN_FINGERPRINT = "FINGERPRINT"
RULER = "-" * 80
# Node -> the job that it submits, from its work directory.
_JOBS: dict[str, Callable[[Path], Job]] = {
    "train": trainer_job,
    "export": lambda work: trainer_job(work / JOB_DIR),
    "answer": answer_job,
    "answer_base": answer_job,
}


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan."""
    launcher = getattr(args, "launcher", None)
    chosen = [f"execution.cluster.launcher={launcher}"] if launcher else []
    recipe = load_recipe(args.recipe, [*args.overrides, *chosen])
    planned, found = plan_stages(recipe.config, args.root)
    is_terminal = sys.stdout.isatty()
    print(f"recipe {recipe.name}, root {args.root}")
    rows = [(stage.name, "reuse" if stage.artifact else "make", _why(stage)) for stage in planned]
    print_table("Stages", ("stage", "", "why"), rows, is_terminal)
    print_table("Size", ("", "value"), size_rows(recipe.config, found), is_terminal)
    made = sum(stage.artifact is None for stage in planned)
    print(f"\n{made} of {len(planned)} stages would be made, {len(planned) - made} reused.")
    if launcher or recipe.config.execution.cluster.launcher != "torchrun":
        print_submission(recipe.config, args.root, planned, found)
    return 0


def print_submission(
    config: PipelineConfig, root: StorePath, planned: list[PlannedStage], found: Mapping[str, Input]
) -> None:
    """What the launcher would be given for the next stage that trains or answers, byte for byte between the lines."""
    cluster = config.execution.cluster
    names = [stage.name for stage in planned if stage.name in _JOBS and stage.artifact is None]
    if not answers_apart(cluster):
        names = [name for name in names if _JOBS[name] is not answer_job]
    if not names:
        print("\nNothing would be submitted: the training, its export and the answers are finished.")
        return
    first, *others = (_JOBS[name](work_dir_of(name, config, root, found)) for name in names)
    text = make_launcher(cluster).plan(first)
    what = {"slurm": "sbatch gets", "kubernetes": "kubectl applies"}.get(cluster.launcher, "this machine runs")
    note = f" ({UNKNOWN_FINGERPRINT}: {UNKNOWN})" if UNKNOWN_FINGERPRINT in first.name else ""
    print(f"\nFor {names[0]}, {what}{note}:\n{RULER}\n{text}", end="" if text.endswith("\n") else "\n")
    print(RULER)
    for name, job in zip(names[1:], others):
        print(f"For {name} the same, with {' '.join(job.arguments)}")


def work_dir_of(name: str, config: PipelineConfig, root: StorePath, found: Mapping[str, Input]) -> Path:
    """Where a stage will work, as far as its fingerprint is known now."""
    stage = get_stage(name)
    (node,) = (node for node in pipeline_nodes(config) if node.name == name)
    if all(source in found for source in node.inputs.values()):
        inputs = {role: found[source] for role, source in node.inputs.items()}
        return Path(scratch_dir(root, stage, stage_identity(stage, node.config, inputs))).resolve()
    return Path(side_dir(root) / "scratch" / f"{stage.name}-{UNKNOWN_FINGERPRINT}").resolve()


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
        hf_dir = found["model"].dir
        return ModelFacts.from_hf(read_model_config(hf_dir), hf_dir / "config.json")
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
