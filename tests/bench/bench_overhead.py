"""The time that the flow takes besides its stages: with a temporary Prefect server, with a service, and as a
deployment.

    python -m tests.bench.bench_overhead [--rounds N]

The embedded recipe runs on little data with the real trainer, each time on a new root. "Whole" is the time of the
process
of `athanor run`, with its imports and its last messages to MLflow; for a deployment it is the time from the request to
the
end of the run. "Flow" is the time that Prefect reports for the flow run. Both are given minus the sum of the stages.
Prints
a markdown table.
"""

import argparse
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import mlflow
import prefect

from tests.helpers.service import SMALL, RunningService, clean_environment, nested, wait_for

MADE = re.compile(r": made in ([0-9.]+) s")
ROW = re.compile(r"\| made \| ([0-9.]+) \|")


@dataclass(frozen=True, slots=True)
class Run:
    """The seconds of one run: in all, of the flow (None if no server can be asked), and of each stage."""

    whole: float
    flow: float | None
    stages: tuple[float, ...]


def run_command(root: Path) -> Run:
    """Run `athanor run` in a process of its own. It uses the service of the root if there is one."""
    words = [f"--set={key}={value}" for key, value in SMALL.items()]
    command = [sys.executable, "-m", "flows.cli.main", "run", "--root", str(root), *words]
    began = time.monotonic()
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    return Run(time.monotonic() - began, None, tuple(map(float, MADE.findall(done.stdout))))


def ask(service: RunningService, path: str, body: object = None) -> object:
    """Return an answer of Prefect's API."""
    return service.ask(service.record.prefect_api + path, body)


def seconds_of(run: dict) -> float:
    """Return the duration of a flow run as Prefect reports it."""
    start, end = (datetime.fromisoformat(run[name]) for name in ("start_time", "end_time"))
    return (end - start).total_seconds()


def run_with_service(root: Path) -> Run:
    """Run `athanor run` while a service is running."""
    service = RunningService(root)
    try:
        run = run_command(root)
        (found,) = ask(service, "/flow_runs/filter", {"flow_runs": {"parent_task_run_id": {"is_null_": True}}})
        return Run(run.whole, seconds_of(found), run.stages)
    finally:
        service.stop()


def run_deployment(root: Path) -> Run:
    """Run the deployment `vlm-sft`, requested as the UI does."""
    service = RunningService(root)
    try:
        deployment = ask(service, "/deployments/name/vlm-sft/vlm-sft")["id"]
        began = time.monotonic()
        parameters = {"parameters": {"overrides": nested(SMALL)}}
        asked = ask(service, f"/deployments/{deployment}/create_flow_run", parameters)
        path = f"/flow_runs/{asked['id']}"
        wait_for(lambda: ask(service, path)["state_type"] == "COMPLETED", 280, "end", service.tell)
        whole, run = time.monotonic() - began, ask(service, path)
        body = {"artifacts": {"flow_run_id": {"any_": [asked["id"]]}, "key": {"any_": ["stages"]}}}
        (stages,) = ask(service, "/artifacts/filter", body)
        return Run(whole, seconds_of(run), tuple(map(float, ROW.findall(stages["data"]))))
    finally:
        service.stop()


KINDS = {
    "`athanor run`, no server": run_command,
    "`athanor run`, a service": run_with_service,
    "deployment, a service": run_deployment,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        for kind, run in KINDS.items():
            with tempfile.TemporaryDirectory(prefix="athanor-bench-") as folder:
                found[kind].append(run(Path(folder) / "root"))
    versions = f"prefect {prefect.__version__}, mlflow {mlflow.__version__}, Python {platform.python_version()}"
    print(f"{versions}; medians of {args.rounds} rounds, seconds\n")
    print("| | stages | sum of stages | whole less stages (worst) | flow less stages (worst) |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for kind, runs in found.items():
        whole = [run.whole - sum(run.stages) for run in runs]
        flow = [run.flow - sum(run.stages) for run in runs if run.flow is not None]
        told = f"{statistics.median(flow):.1f} ({max(flow):.1f})" if flow else ""
        total = statistics.median(sum(run.stages) for run in runs)
        print(
            f"| {kind} | {len(runs[0].stages)} | {total:.1f} "
            f"| {statistics.median(whole):.1f} ({max(whole):.1f}) | {told} |"
        )


if __name__ == "__main__":
    main()
