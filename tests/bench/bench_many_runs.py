r"""A root with hundreds of runs: what one more costs MLflow, and how long its pages and `athanor status` take.

    make run && python -m tests.bench.bench_many_runs athanor-root --runs 300 --out runs.md    # 30 minutes of two cores

The root, which is copied, has a finished run. Its record is published again and again as runs of other identities, by
the code of the pipeline, each with all metrics and files and each a version of the registered model. Then `athanor up`
serves the copy, and the requests of MLflow's pages are timed, with the bytes of their answers.
"""

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from flows.tracking.publish import Publication
from flows.tracking.record import MlflowState, TrackedRun, records_dir
from tests.bench.command import bench_folder, make_parser, print_report, table_head, table_row
from tests.helpers.service import RunningService, running_service

DAY_MS = 86_400_000
REPEATS = 5
CHARTED = 10, 100  # runs whose curves one chart has


def add_runs(root: Path, count: int) -> list[float]:
    """Publish `count` copies of the root's only run, a day apart, and return the seconds of each."""
    (path,) = records_dir(root).glob("*.json")
    record, seconds = TrackedRun.model_validate_json(path.read_bytes()), []
    for number in range(count):
        opening = record.opening.model_copy(
            update={"identity": f"{number:016x}", "name": f"{record.opening.name} seed={number}"}
        )
        times = {name: getattr(record, name) + (number - count) * DAY_MS for name in ("first_ms", "opened_ms")}
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
        "runs of one seed": lambda: service.ask(
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
        said = timed(lambda: subprocess.run(status, check=True, capture_output=True, text=True).stdout)
        lines.append(table_row(["`athanor status`", f"{said[0]:.2f}", f"{said[1]:,}"]))
        with running_service(root) as service:
            for name, call in requests_of(service).items():
                took, size = timed(call)
                lines.append(table_row([name, f"{took:.3f}", f"{size:,}"]))
    print_report("\n".join(lines), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
