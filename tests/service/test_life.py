"""Must-show 3: a run that is cancelled or killed ends as a user expects, leaves nothing, and a retry resumes it.

One flow run with two trainer processes is disturbed several times, each time a few steps later, and retried as the
Prefect UI does it. In the end every loss is bit-equal to that of an undisturbed run.
"""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Scheduled, Suspended

from tests.helpers.patience import at_most
from tests.helpers.service import lines, processes_with, wait_for
from tests.helpers.small_run import SMALL, runs_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "Cancel, a deadline or kill -9 leaves a checkpoint and no process, and a retry gives an undisturbed run's "
        "losses."
    ),
]
NUM_STEPS = 360  # seven tries, each of which a fast machine lets run on for dozens of steps
MORE_STEPS = 6  # steps of a try before it is disturbed
# Fields of metrics.jsonl that the training computes, without durations.
COMPUTED = ("step", "loss", "heldout_loss", "lr", "epoch", "tokens", "loss_tokens", "padding_fraction")
NORMS = ("grad_norm", "vision_grad_norm", "merger_grad_norm", "language_grad_norm")
SETTINGS = {
    **SMALL,
    "train.num_steps": NUM_STEPS,
    "train.global_batch_size": 2,
    "train.heldout_interval": 1000,
    "evaluate.max_new_tokens": 1,
    "evaluate.max_samples_per_subset": 1,
    "execution.cluster.processes": 2,
    "execution.cluster.num_threads": 1,
    "execution.checkpoint.save_interval": 5,
}


class Life:
    """A flow run of the service, with its processes and the metrics of its training."""

    def __init__(self, service) -> None:
        self.service, self.root = service, service.root
        self.client = SyncPrefectClient(service.record.prefect_api, auth_string=service.login)
        self.deployment = self.client.read_deployment_by_name("vlm-sft/vlm-sft")
        self.run_id: UUID | None = None
        self.began = 0.0

    def start(self, changes: dict[str, object] | None = None) -> None:
        parameters = {"set": lines({**SETTINGS, **(changes or {})})}
        self.run_id = self.client.create_flow_run_from_deployment(self.deployment.id, parameters=parameters).id

    def retry(self) -> None:
        """Retry as `prefect flow-run retry` and the button of the UI do.

        Retry again if Prefect's worker, which has not completely settled the previous try, undoes the first retry.
        """

        def has_begun() -> bool:
            if self.read().state.is_final():
                self.client.set_flow_run_state(self.run_id, Scheduled(message="Retried"))
            return bool(self.ranks())

        wait_for(has_begun, 180, "second try", self.service.tell)

    def read(self) -> FlowRun:
        return self.client.read_flow_run(self.run_id)

    def step(self) -> int:
        """Return the last step in metrics.jsonl of the unfinished training."""
        try:
            lines = [line for path in self.root.glob("scratch/train-*/metrics.jsonl") for line in path.open()]
        except FileNotFoundError:  # the training has ended meanwhile
            return 0
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("\n") else 0

    def train_on(self) -> int:
        """Wait until the training has done some more steps, and return the last step."""
        before, checkpoint = self.step(), self.checkpoint()

        def is_there() -> bool:
            assert self.read().state.type not in (StateType.FAILED, StateType.CRASHED), self.read().state.message
            return bool(self.ranks()) and self.step() >= max(before, checkpoint) + MORE_STEPS

        wait_for(is_there, 120, f"step after {before}", self.service.tell)
        self.began = time.monotonic()
        return self.step()

    def goes_on(self) -> None:
        """Wait for the end of the run, however long it takes, as long as it makes steps and artifacts."""

        def done() -> tuple[int, int, bool]:
            return self.step(), len([*self.root.glob("artifacts/*/*")]), self.read().state.is_final()

        while not (before := done())[-1]:
            wait_for(lambda: done() != before, 120, f"more than {before}", self.service.tell)

    def checkpoint(self) -> int:
        names = [path.name for path in self.root.glob("scratch/train-*/checkpoints/step-*") if path.is_dir()]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def ends(self, *names: str, seconds: float) -> FlowRun:
        """Wait until the flow run and all its processes have ended, and print how long that took."""
        wait_for(lambda: self.read().state.is_final(), seconds, f"end in {names}", self.service.tell)
        to_end = time.monotonic() - self.began
        wait_for(lambda: not self.processes(), seconds, f"end of {self.processes()}", self.service.tell)
        run = self.read()
        gone = time.monotonic() - self.began
        print(f"\n  {run.state.name} after {to_end:.1f} s, no process after {gone:.1f} s: {run.state.message}")
        assert run.state.name in names, f"{run.state.name}: {run.state.message}\n{self.service.tell()}"
        return run

    def processes(self) -> list[psutil.Process]:
        return processes_with("PREFECT__FLOW_RUN_ID", str(self.run_id))

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the trainer's processes by rank."""
        found = {}
        for process in self.processes():
            try:
                environment = process.environ()
                if "RANK" in environment and "RANK" not in process.parent().environ():
                    found[int(environment["RANK"])] = process
            except (psutil.Error, AttributeError, OSError):
                continue
        return found

    def flow_process(self) -> psutil.Process:
        record = json.loads((self.root / "service" / "runs" / f"{self.run_id}.json").read_text())
        return psutil.Process(record["pid"])

    def new_server(self) -> None:
        """Kill Prefect's server, and wait until `athanor up` has started a new one."""
        server = self.service.program("prefect")
        server.kill()
        wait_for(lambda: self.service.program("prefect") not in (None, server), 60, "new server", self.service.tell)
        wait_for(lambda: self.client.api_healthcheck() is None, 120, "server again", self.service.tell)

    def mlflow_status(self) -> str:
        return runs_of(self.root, f"tags.`prefect.flow_run_id` = '{self.run_id}'")[0].info.status


@contextmanager
def suspended(*processes: psutil.Process | psutil.Popen) -> Iterator[None]:
    """Stop processes (SIGSTOP) while the block lasts, and let them continue afterwards."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def losses(root: Path) -> list[dict]:
    (path,) = root.glob("artifacts/train/*/metrics.jsonl")
    return [{name: json.loads(line)[name] for name in COMPUTED + NORMS} for line in path.open()]


@pytest.fixture(scope="module")
def undisturbed(service) -> list[dict]:
    """Return the metrics of every step of an undisturbed run. Its training is then deleted."""
    life = Life(service)
    life.start({"evaluate.max_new_tokens": 2})  # the same training, another MLflow run
    life.began = time.monotonic()
    life.goes_on()
    life.ends("Completed", seconds=60)
    rows = losses(service.root)
    assert len(rows) == NUM_STEPS
    for stage in ("train", "export", "answer", "evaluate"):
        shutil.rmtree(service.root / "artifacts" / stage)
    return rows


@pytest.mark.usefixtures("undisturbed")  # it has made the stages before the training
def test_a_training_over_its_deadline_saves_and_says_so(service):
    late = Life(service)  # a separate training, too long to end in time; its artifacts are deleted afterwards
    for factor in (1, 3, 9):  # the trainer has to start and to make a step in time, on a busy machine too
        seconds = round(factor * at_most(20))
        late.start({"train.num_steps": 20 * NUM_STEPS, "execution.cluster.timeout_seconds": seconds})
        late.began = time.monotonic()
        run = late.ends("Failed", seconds=factor * 120)
        assert f"stopped after timeout_seconds={seconds}" in run.state.message
        if late.step():
            break
    assert 0 < late.step() == late.checkpoint() < 20 * NUM_STEPS
    (checkpoints,) = service.root.glob("scratch/train-*/checkpoints")
    shutil.rmtree(checkpoints.parent)


@pytest.fixture(scope="module")
def life(service, undisturbed) -> Life:
    """Start the flow run that is disturbed."""
    life = Life(service)
    life.start()
    return life


def test_cancelling_saves_and_ends_everything(life):
    step = life.train_on()
    life.client.set_flow_run_state(life.run_id, State(type=StateType.CANCELLING))
    run = life.ends("Cancelled", seconds=20)  # by itself: after 30 seconds Prefect kills a flow
    assert life.checkpoint() >= step
    assert run.state.message == f"step {life.checkpoint()} saved; Retry resumes from it"
    wait_for(lambda: life.mlflow_status() == "KILLED", 20, "MLflow run KILLED")


def test_suspending_saves_and_ends_everything_and_resume_continues(life):
    life.retry()
    step = life.train_on()
    life.client.set_flow_run_state(life.run_id, Suspended(timeout_seconds=3600))  # as the button of the UI does
    wait_for(lambda: not life.processes(), 40, "end of every process", life.service.tell)
    assert life.read().state.name == "Suspended" and life.checkpoint() >= step
    wait_for(lambda: life.mlflow_status() == "KILLED", 20, "MLflow run KILLED")
    saved = life.checkpoint()
    life.client.resume_flow_run(life.run_id)
    assert life.train_on() > saved


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank_fails_the_run_and_says_so(life, rank):
    life.retry()
    life.train_on()
    life.ranks()[rank].kill()
    run = life.ends("Failed", seconds=60)
    assert f"rank {rank} was killed by signal -9 (SIGKILL)" in run.state.message
    assert str(life.root / "scratch") in run.state.message, "whose log to read"


@pytest.mark.parametrize("part", ["flow", "worker"])
def test_a_killed_flow_or_worker_crashes_the_run_which_saves(life, part):
    life.retry()
    step = life.train_on()
    (life.flow_process() if part == "flow" else life.service.program("worker")).kill()
    life.ends("Crashed", seconds=60)
    assert life.checkpoint() >= step


def test_a_killed_server_disturbs_nothing_and_the_losses_are_those_of_an_undisturbed_run(life, undisturbed):
    life.retry()
    life.train_on()
    ranks, tries = life.ranks(), life.read().run_count
    with suspended(*ranks.values()):  # otherwise a fast machine ends the training before the server is back
        life.new_server()
    assert life.ranks() == ranks
    with suspended(life.service.process):  # it would start another server
        life.service.program("prefect").kill()
        wait_for(lambda: not life.ranks(), 240, "training's end without a server", life.service.tell)
    run = life.ends("Completed", seconds=300)  # includes the stages after the training, with a new server
    assert run.run_count == tries, "nobody had to try again"
    assert losses(life.root) == undisturbed
    wait_for(lambda: life.mlflow_status() == "FINISHED", 20, "MLflow run FINISHED")
