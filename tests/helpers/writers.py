"""`python -m tests.helpers.writers ROOT COUNT POINTS`: COUNT processes log to one new MLflow store at the same time.

They are forked from one process that has imported everything, wait for each other, and each opens the store itself.
"""

import json
import os
import sys
import time
from pathlib import Path

from mlflow.entities import Metric

from flows.tracking.store import connect, experiment_of

EXPERIMENT = "writers"


def main(root: Path, count: int, points: int) -> int:
    """Print as JSON how the writers ended and what the store holds."""
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            os.close(go_write)
            os.write(ready_write, b"x")
            os.read(go_read, 1)  # until the parent closes the other end
            os._exit(_write(root, number, points))
        pids.append(pid)
    for _ in pids:
        os.read(ready_read, 1)
    os.close(go_write)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    client = connect(root)
    experiments = [found.name for found in client.search_experiments()]
    experiment_id = experiment_of(client, root, EXPERIMENT)
    runs = client.search_runs([experiment_id])
    held = {run.info.run_name: _values(client, run.info.run_id) for run in runs}
    print(json.dumps({"statuses": statuses, "held": held, "experiments": sorted(experiments)}))
    return 0


def _values(client, run_id: str) -> list[float]:
    return sorted(metric.value for metric in client.get_metric_history(run_id, "value"))


def _write(root: Path, number: int, points: int) -> int:
    try:
        client = connect(root)
        run = client.create_run(experiment_of(client, root, EXPERIMENT), run_name=f"writer-{number}")
        for step in range(points):
            moment = time.time_ns() // 1_000_000
            metric = Metric("value", float(number * points + step), moment, step)
            client.log_batch(run.info.run_id, metrics=[metric])
        return 0
    except Exception as error:
        print(f"writer {number}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
