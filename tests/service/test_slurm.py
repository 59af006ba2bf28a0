"""A real SLURM: two slurmd on this machine, the real trainer, and the events that interrupt jobs on clusters.

One undisturbed run of the whole flow is the reference. A second training with the same bins is killed, requeued, and
cancelled from outside and by athanor. It must end with the same numbers, bit for bit.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.pipeline.recipe import load_recipe
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.slurm import SBATCH_FILE
from stages.train import stage as train
from stages.train.run_trainer import StageStopped
from tests.helpers.patience import at_most
from tests.helpers.service import wait_for
from tests.helpers.slurm_cluster import SlurmCluster, slurm_cluster, why_not
from tests.helpers.small_run import SMALL
from trainer.contract.names import CHECKPOINTS, METRICS_JSONL
from trainer.contract.result import MetricsRow, read_metrics
from trainer.contract.run import CheckpointConfig, TrainerExecution

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(why_not()), reason=f"no SLURM here: {why_not()}"),
    pytest.mark.promise(
        "On a real SLURM on one host, two nodes give the loss of one, and requeue, scancel and time limit change "
        "no number."
    ),
]

STEPS = 150  # a signal takes as long as dozens of steps of a fast machine
CANCEL_SECONDS = 10.0
SETTINGS = {
    **SMALL,
    "train.num_steps": STEPS,
    "train.global_batch_size": 2,
    "train.heldout_interval": STEPS,
    "execution.cluster.nodes": 2,
    "execution.cluster.processes": 2,
    "execution.cluster.launcher": "slurm",
    "execution.cluster.job_file": str(Path(__file__).parents[1] / "helpers" / "cpu.sbatch"),
    "execution.checkpoint.save_interval": 1000,
}
OVERRIDES = [f"{name}={value}" for name, value in SETTINGS.items()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("slurm")
    before = os.environ.get("SLURM_CONF")
    with slurm_cluster(directory) as running:
        os.environ["SLURM_CONF"] = str(running.conf)
        yield running
    os.environ.pop("SLURM_CONF")
    if before is not None:
        os.environ["SLURM_CONF"] = before


@pytest.fixture(scope="module")
def flow_root(cluster, tmp_path_factory) -> Path:
    """Make the root of a whole flow whose training and export ran on two nodes. Also return the output of the plan."""
    root = tmp_path_factory.mktemp("flow")
    sets = [part for override in OVERRIDES for part in ("--set", override)]
    command = [sys.executable, "-m", "flows.cli.main"]
    done = subprocess.run(
        [*command, "run", "--root", str(root), *sets], capture_output=True, text=True, timeout=at_most(300)
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "15 of 15 stages made" in done.stdout
    return root


def _only(root: Path, stage: str) -> Artifact:
    (found,) = (root / "artifacts" / stage).iterdir()
    return Artifact.load(found)


def train_on(
    flow_root: Path,
    root: Path,
    on_rows: Callable = lambda rows: None,
    cluster: ClusterConfig | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> Path:
    """Repeat the flow's training in another root. Return its directory."""
    config = load_recipe("embedded", OVERRIDES).config
    inputs = {role: _only(flow_root, stage) for role, stage in (("model", "embedded_model"), ("tokenized", "tokenize"))}
    resources = StageResources(
        cluster=cluster or config.execution.cluster,
        trainer=TrainerExecution(checkpoint=CheckpointConfig(save_interval=1000)),
        on_rows=on_rows,
        on_line=on_line,
    )
    result = run_stage(train.STAGE, config.train, {**inputs, "bins": _only(flow_root, "plan_bins")}, root, resources)
    return result.artifact.dir


def _numbers(directory: Path) -> list[tuple[int, float, float]]:
    return [(row.step, row.loss, row.grad_norm) for row in read_metrics(directory)]


def _jobs(cluster: SlurmCluster, root: Path) -> list[int]:
    lines = cluster.call("squeue", "--noheader", "--format=%A %Z").splitlines()
    return [
        int(job) for job, directory in (line.split(maxsplit=1) for line in lines) if directory.startswith(str(root))
    ]


def _assert_nothing_left(cluster: SlurmCluster, root: Path) -> None:
    wait_for(lambda: not cluster.processes_of(root) and not _jobs(cluster, root), 10, "end of the job")


def test_two_nodes_give_the_loss_of_one(cluster, flow_root, tmp_path):
    directory = _only(flow_root, "train").dir
    assert (directory / "logs" / "rank-0001.log").is_file() and (directory / SBATCH_FILE).is_file()
    log = (directory / "logs" / "trainer.log").read_text()
    assert "world 2 = dp 2" in log and "n[1-2]" in log and f"step {STEPS} loss" in log
    one_node = train_on(flow_root, tmp_path, cluster=ClusterConfig(processes=2, num_threads=1))
    two, one = _numbers(directory), _numbers(one_node)
    assert len(two) == STEPS and [row[0] for row in two] == [row[0] for row in one]
    assert all(abs(a[1] - b[1]) <= 1e-6 for a, b in zip(two, one, strict=True))
    _assert_nothing_left(cluster, flow_root)


class Disturber:
    """A sequence of disturbances of a training, each at its own step and once the one before it has shown."""

    def __init__(self, *actions: tuple[int, Callable[[], object]], may_go_on: Callable[[int], bool] = bool) -> None:
        self.actions, self.done, self.may_go_on = list(actions), 0, may_go_on

    def __call__(self, rows: list[MetricsRow]) -> None:
        """Disturb, if `may_go_on`, called with the number of earlier disturbances, allows it."""
        if self.actions and rows[-1].step >= self.actions[0][0] and (not self.done or self.may_go_on(self.done)):
            self.actions.pop(0)[1]()
            self.done += 1


def _start_and_kill_the_flow(flow_root: Path, root: Path) -> None:
    """Start the flow in a child process, and kill it with -9 once its job trains."""
    code = "import sys; from pathlib import Path; from tests.service.test_slurm import train_on\n"
    code += "train_on(Path(sys.argv[1]), Path(sys.argv[2]))"
    child = subprocess.Popen([sys.executable, "-c", code, str(flow_root), str(root)], start_new_session=True)
    try:
        steps = f"scratch/*/{METRICS_JSONL}"
        wait_for(lambda: any(len(read_metrics(found.parent)) >= 2 for found in root.glob(steps)), 240, "two steps")
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_what_a_cluster_does_to_a_job_changes_no_number(cluster, flow_root, tmp_path):
    root = tmp_path / "disturbed"
    _start_and_kill_the_flow(flow_root, root)
    (job,) = _jobs(cluster, root)  # the job continues without the flow

    # The next flow finds the job. It is told to save by its time limit and requeued, and then requeued by hand.
    def has_restarted(times: int) -> bool:
        return f"Restarts={times} " in cluster.call("scontrol", "show", "job", str(job), "--oneliner")

    disturber = Disturber(
        (6, lambda: cluster.call("scancel", "--batch", "--signal=USR1", str(job))),
        (11, lambda: cluster.call("scontrol", "requeue", str(job))),
        (16, lambda: cluster.call("scancel", str(job))),
        may_go_on=has_restarted,
    )
    said: list[str] = []
    with pytest.raises(StageStopped, match="run the same command again"):
        train_on(flow_root, root, disturber, on_line=said.append)
    assert not disturber.actions
    (scratch,) = root.glob("scratch/train-*/")
    assert any(f"job {job} is there already (RUNNING)" in line for line in said)
    log = (scratch / "logs" / "trainer.log").read_text()
    assert "saved before its time limit and is queued again" in log and "try 3" in log
    assert list((scratch / CHECKPOINTS).glob("step-*"))
    _assert_nothing_left(cluster, root)

    # A new job that athanor cancels: it saves, and all its processes end within ten seconds.
    moments: list[float] = []

    def interrupt() -> None:
        moments.append(time.monotonic())
        raise KeyboardInterrupt

    saved = max(int(found.name[-6:]) for found in (scratch / CHECKPOINTS).glob("step-*"))
    with pytest.raises(KeyboardInterrupt):
        train_on(flow_root, root, Disturber((saved + 3, interrupt)))
    seconds = time.monotonic() - moments[0]
    print(f"cancelled within {seconds:.1f} s")
    assert seconds < at_most(CANCEL_SECONDS)
    assert max(int(found.name[-6:]) for found in (scratch / CHECKPOINTS).glob("step-*")) >= saved + 3
    _assert_nothing_left(cluster, root)

    directory = train_on(flow_root, root)
    assert _numbers(directory) == _numbers(_only(flow_root, "train").dir)
    _assert_nothing_left(cluster, root)
