"""Write the held-out questions of a finished run as a task of lmms-eval:

    python -m stages.evaluate.lmms_eval athanor-root/artifacts/release/FINGERPRINT DIRECTORY

The questions are those that the run's own evaluation counts, each with the headline metric of its subset.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.errors import InputError
from dataset_builders.storage.store import absolute, local_dir, location
from stages.answer.heldout import heldout_samples
from stages.evaluate.lmms_eval.task import METRICS, MIN_PIXELS, LmmsEvalTask, write_lmms_eval_task
from stages.evaluate.predictions import counted, read_predictions
from stages.shared.artifacts.artifact import Artifact
from trainer.contract.names import HF_EXPORT

_OTHERWISE = "exact_match"  # the metric for subsets whose headline metric lmms-eval lacks


def write_task_of_run(release: str, directory: Path) -> int:
    """Write the task of a run, and return the number of questions with an image that lmms-eval enlarges. `release` is
    the artifact that `athanor run` names at its end, or the model's directory in it."""
    place = absolute(location(release))
    place = place.parent if place.name == HF_EXPORT else place
    if place.parent.name != "release" or not (place / MANIFEST).is_file():
        raise InputError(f"{release} is no artifact of the stage release; give the one that `athanor run` printed")
    parents = Artifact.load(place).manifest.parents
    samples, evaluated = (
        Artifact.load(place.parent.parent / parents[role].name / parents[role].fingerprint)
        for role in ("samples", "evaluate")
    )
    rows = counted(read_predictions(evaluated.dir, ("key", "turn", "subset", "metric", "contaminated"))).to_pylist()
    task = LmmsEvalTask(
        name="heldout",
        max_new_tokens=evaluated.manifest.config["max_new_tokens"],
        metrics={row["subset"]: row["metric"] if row["metric"] in METRICS else _OTHERWISE for row in rows},
        questions={(row["key"], row["turn"]) for row in rows},
    )
    return write_lmms_eval_task(directory, local_dir(place / HF_EXPORT), heldout_samples(samples, None), task).num_small


def main(argv: Sequence[str]) -> int:
    """Write the task, and say where the command that asks it stands."""
    parser = argparse.ArgumentParser(prog="python -m stages.evaluate.lmms_eval", description=__doc__.splitlines()[0])
    parser.add_argument("release", help="artifact of the stage release, as `athanor run` prints it")
    parser.add_argument("directory", type=Path, help="directory of the task, which is made")
    args = parser.parse_args(argv)
    try:
        small = write_task_of_run(args.release, args.directory)
    except InputError as error:
        print(f"athanor: {error}", file=sys.stderr)
        return 2
    print(f"{args.directory / 'README.md'} has the command that asks the questions")
    if small:
        print(f"{small} of them show an image of fewer than {MIN_PIXELS:,} pixels, which lmms-eval enlarges")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
