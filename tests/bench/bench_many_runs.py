r"""A root with hundreds of runs: what one more costs MLflow, the time of its pages, of `athanor status` and of
`athanor gc`, and what gc frees.

    make run && python -m tests.bench.bench_many_runs athanor-root --runs 300 --out runs.md    # an hour of two cores

The root, which is copied, has a finished run of the first recipe. For each further run its artifacts from the training
on are copied to where a run with another seed has them, and its record is published for that run by the code of the
pipeline, with all metrics and files and a version of the registered model. Then `athanor up` serves the copy, and the
requests of MLflow's pages are timed, with the bytes of their answers. At last nine of ten versions are deleted in
MLflow, and `athanor gc` frees what they needed. The bench ends with an error if a version that is left does not answer
then, or if a stage of its run is not found finished and whole.
"""

import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import mlflow

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.storage.files import sha256_file
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import DEFAULT_RECIPE, load_recipe
from flows.tracking.publish import Publication
from flows.tracking.record import MlflowState, TrackedRun, records_dir
from flows.tracking.store import connect, tracking_uri
from stages.shared.artifacts.artifact import Artifact, artifact_dir, stage_identity
from stages.shared.artifacts.verify import check_reused
from tests.bench.command import bench_folder, make_parser, print_report, table_head, table_row
from tests.helpers.service import RunningService, running_service
from trainer.contract.checkpoint import read_checkpoint_record, write_checkpoint_record

DAY_MS = 86_400_000
REPEATS = 5
CHARTED = 10, 100  # runs whose curves one chart has


def plan_of(root: Path, seed: int) -> Plan:
    return Plan.open(load_recipe(DEFAULT_RECIPE, changes={"train.seed": seed}), root)


def copy_artifacts(root: Path, plan: Plan, finished: Plan) -> dict[str, str]:
    """Copy the artifacts that a plan lacks from those of a finished one, and return their new fingerprints by the old
    ones. Hard links stay: the release has the weights of the export."""
    renamed, copied = {}, {}

    def copy(source: str, target: str) -> None:
        about = os.stat(source)
        if about.st_nlink > 1 and about.st_ino in copied:
            os.link(copied[about.st_ino], target)
        else:
            shutil.copy2(source, target)
            copied[about.st_ino] = target

    for step in plan.steps:
        inputs = step.read()
        identity = stage_identity(step.stage, step.config, inputs)
        directory = artifact_dir(root, step.stage, identity)
        if not (directory / MANIFEST).exists():
            before = finished.artifact(step.name)
            shutil.copytree(before.dir, directory, copy_function=copy)
            for checkpoint in directory.glob("checkpoints/*"):
                own = {"fingerprint": directory.name, "train": identity["config"]}
                write_checkpoint_record(checkpoint, read_checkpoint_record(checkpoint) | own)
            parents = {role: item.parent() for role, item in inputs.items()}
            facts = {"fingerprint": directory.name, "config": identity["config"], "parents": parents}
            (directory / MANIFEST).unlink()
            before.manifest.model_copy(update=facts).write(directory)
            renamed[before.dir.name] = directory.name
        step.artifact = Artifact.load(directory)
    return renamed


def add_runs(root: Path, count: int) -> list[float]:
    """Publish `count` runs like the root's only one, a day apart, and return the seconds of each publication."""
    (path,) = records_dir(root).glob("*.json")
    text, seconds, finished = path.read_text(), [], plan_of(root, 0)
    finished.find_finished()
    for number in range(count):
        renamed = copy_artifacts(root, plan_of(root, number + 1), finished)
        renamed_text = text
        for before, now in renamed.items():
            renamed_text = renamed_text.replace(before, now)
        record = TrackedRun.model_validate_json(renamed_text)
        opening = record.opening.model_copy(
            update={"identity": f"{number:016x}", "name": f"{record.opening.name} seed={number + 1}"}
        )
        shown = ("first_ms", "opened_ms", "changed_ms", "ended_ms")
        times = {name: getattr(record, name) + (number - count) * DAY_MS for name in shown}
        copy = record.model_copy(
            update={"opening": opening, "creation": f"{number:032x}", "learnt": MlflowState(), **times}
        )
        path.with_stem(opening.identity).write_text(copy.model_dump_json())
        began = time.monotonic()
        publication = Publication(root, opening.identity)
        outcome = publication.attempt()
        publication.lock.release()
        if outcome.problem:
            raise RuntimeError(outcome.problem)
        seconds.append(time.monotonic() - began)
    return seconds


def requests_of(service: RunningService) -> dict[str, Callable[[], Any]]:
    """Return what MLflow's pages ask when an experiment, a chart, a comparison and a registered model are opened."""
    api = f"{service.record.mlflow}/ajax-api/2.0/mlflow"
    (experiment,) = [
        each["experiment_id"]
        for each in service.ask(f"{api}/experiments/search", {"max_results": 100})["experiments"]
        if each["name"].startswith("athanor-")
    ]
    search = {"experiment_ids": [experiment], "order_by": ["attributes.start_time DESC"]}
    runs = service.ask(f"{api}/runs/search", search | {"max_results": 1000})["runs"]
    ids = [run["info"]["run_id"] for run in runs]

    def curves(count: int) -> Callable[[], Any]:
        query = urlencode({"metric_key": "loss", "run_ids": ids[:count], "max_results": 320}, doseq=True)
        return lambda: service.ask(f"{api}/metrics/get-history-bulk-interval?{query}")

    found = {"first 100 runs of the table": lambda: service.ask(f"{api}/runs/search", search | {"max_results": 100})}
    found |= {
        "the same, by a parameter": lambda: service.ask(
            f"{api}/runs/search", search | {"max_results": 100, "filter": "params.`train.seed` = '0'"}
        ),
        "two runs to compare": lambda: [service.ask(f"{api}/runs/get?run_id={run}") for run in ids[:2]],
        "versions of the model": lambda: service.ask(f"{api}/model-versions/search?max_results=100"),
    }
    return found | {f"the loss of {count} runs": curves(count) for count in CHARTED}


def timed(call: Callable[[], Any]) -> tuple[float, int]:
    """Return the median seconds of a call, and the bytes of its answer."""
    seconds = []
    for _ in range(REPEATS):
        began = time.monotonic()
        answer = call()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds), len(str(answer))


def athanor(root: Path, *words: str) -> tuple[float, str]:
    """Run a command of athanor, and return its seconds and what it printed."""
    command = [sys.executable, "-m", "flows.cli.main", *words, "--root", str(root)]
    began = time.monotonic()
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"athanor {shlex.join(words)}: {ended.stdout}{ended.stderr}")
    return time.monotonic() - began, ended.stdout


def bytes_on_disk(root: Path) -> int:
    files = (path.lstat() for path in root.rglob("*") if not path.is_dir())
    return sum({(about.st_dev, about.st_ino): about.st_size for about in files}.values())


def collect(root: Path) -> list[str]:
    """Delete nine of ten versions in MLflow and what only they needed, and return the rows of the table."""
    client, rows = connect(root), []

    def add(what: str, seconds: float | None = None, size: object = "") -> None:
        rows.append(table_row([what, "" if seconds is None else f"{seconds:.1f}", size]))

    versions = client.search_model_versions(max_results=1000)
    name, numbers = versions[0].name, sorted(int(version.version) for version in versions)
    kept = numbers[::10]
    add(f"`athanor gc` of {len(numbers)} versions", athanor(root, "gc")[0])
    for number in numbers:
        if number not in kept:
            client.delete_model_version(name, str(number))
    add(f"`athanor gc`, once {len(kept)} versions are left", athanor(root, "gc")[0])
    before = bytes_on_disk(root)
    took, printed = athanor(root, "gc", "--delete")
    gone, (told,) = printed.count("deleted artifacts/"), re.findall(r"^freed (.*)$", printed, re.MULTILINE)
    add(f"with `--delete`: {gone} artifacts, by its own words {told}", took, f"{before - bytes_on_disk(root):,}")
    mlflow.set_tracking_uri(tracking_uri(root))
    began = time.monotonic()
    for number in kept:
        (answer,) = mlflow.pyfunc.load_model(f"models:/{name}/{number}").predict([{"question": "What is 1 + 2?"}])
        if not isinstance(answer, str):
            raise RuntimeError(f"version {number} answers {answer!r}")
    add(f"one of the {len(kept)} versions loads and answers", (time.monotonic() - began) / len(kept))
    for number in kept:  # version 1 is that of the run that was copied
        plan = plan_of(root, number - 1)
        missing = {name: why for name, why in plan.find_finished().items() if plan.artifact(name) is None}
        if missing:
            raise RuntimeError(f"the run of version {number} would make again: {missing}")
        for step in plan.steps:
            check_reused(step.artifact, sha256_file)
    took, printed = athanor(root, "run", "--set", f"train.seed={kept[-1] - 1}")
    if "0 of 15 stages made, 15 reused" not in printed:
        raise RuntimeError(printed)
    add("the run of one of them again: 15 of 15 stages reused", took)
    return rows


def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("root", type=Path, help="of one finished run; copied")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--dir", type=Path, help="where the copy is made; deleted at the end")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with bench_folder(args.dir) as folder:
        root = shutil.copytree(args.root, folder / "root", symlinks=True)
        before = (root / "mlflow.db").stat().st_size
        seconds = add_runs(root, args.runs)
        grown = (root / "mlflow.db").stat().st_size - before
        lines = [table_head(["what"], ["seconds", "bytes"])]
        for name, part in (("first", seconds[:10]), ("last", seconds[-10:])):
            lines.append(table_row([f"a run into MLflow, {name} ten", f"{statistics.median(part):.2f}", ""]))
        lines.append(table_row(["mlflow.db, a run", "", f"{grown / args.runs:,.0f}"]))
        status = [sys.executable, "-m", "flows.cli.main", "status", "--root", str(root)]
        said = timed(lambda: subprocess.run(status, check=False, capture_output=True, text=True))
        lines.append(table_row(["`athanor status`", f"{said[0]:.2f}", f"{said[1]:,}"]))
        with running_service(root) as service:
            for name, call in requests_of(service).items():
                took, size = timed(call)
                lines.append(table_row([name, f"{took:.3f}", f"{size:,}"]))
        lines += collect(root)
    print_report("\n".join(lines), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
