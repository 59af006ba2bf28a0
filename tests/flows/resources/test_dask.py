"""execution.dask_address: a cluster makes the same artifacts, impossible work is not started, lost workers are
replaced."""

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster

from dataset_builders.errors import InputError
from dataset_builders.readers.source_files import ROOT_MARK
from flows.cli.main import main
from flows.pipeline import dask_pool, progress
from flows.pipeline.config import ExecutionConfig
from flows.pipeline.dask_pool import on_cluster, with_cluster
from flows.pipeline.dask_worker import look, run_shard_task, versions
from flows.pipeline.flow import flow, prepare_data
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import load_recipe
from flows.pipeline.tasks import task
from stages.shared.artifacts.workers import StageResources, run_tasks
from tests.helpers.kill_worker import kill_itself, kill_itself_once, slow_or_failing, work_until_released
from tests.helpers.patience import at_most, wait_for
from tests.helpers.tiers import full
from tests.helpers.trees import tree_digest

pytestmark = pytest.mark.promise(
    "The data stages write the same bytes from one process, several or a Dask cluster, on a disk or in an object "
    "store whose connections are cut, in any order of completion and after kill -9."
)

REPO = Path(__file__).parents[3]
SMALL = {
    "data.num_scans": 30,
    "data.num_multi": 8,
    "data.num_pairs": 8,
    "data.num_texts": 8,
    "convert.heldout_fraction": 0.3,
    "convert.shard_size_mb": 0.02,
    "execution.num_workers": 1,
}


@pytest.fixture(scope="module")
def address():
    """Start a scheduler with two worker processes and return its address. A task may take down two workers."""
    settings = {"distributed.scheduler.allowed-failures": 1, "distributed.admin.log-format": ""}
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
    ):
        yield cluster.scheduler_address


@task
def spread(function, tasks, execution: ExecutionConfig) -> dict[int, object]:
    with with_cluster(StageResources(), execution) as resources:
        return dict(run_tasks(function, tasks, resources))


@flow
def visit(address: str, root: Path, sources=(), function=len, tasks=()) -> dict[int, object]:
    """A flow that only passes tasks to the cluster."""
    execution = ExecutionConfig(dask_address=address)
    with on_cluster(execution, root, list(sources)):
        return spread(function, tasks, execution)


class Recorder(progress.Display):
    """A listener that keeps the reports that it gets."""

    def __init__(self) -> None:
        self.heard: dict[str, list[tuple[int, int]]] = {}

    def progressed(self, stage: str, done: int, total: int, text: str = "") -> None:
        self.heard.setdefault(stage, []).append((done, total))


@pytest.mark.full
def test_prepare_data_makes_the_same_artifacts(address, tmp_path, monkeypatch):
    submitted: list[str] = []
    submit = dask_pool._ShardExecutor.submit

    def recorded(self, function, /, *args, **kwargs):
        submitted.append(function.__name__)
        return submit(self, function, *args, **kwargs)

    recorder = Recorder()
    monkeypatch.setattr(progress, "_display", recorder)
    monkeypatch.setattr(dask_pool._ShardExecutor, "submit", recorded)
    trees = []
    for extra in ([f"execution.dask_address={address}"], []):
        root = tmp_path / str(len(trees))
        plan = Plan.open(load_recipe(overrides=[*(f"{k}={v}" for k, v in SMALL.items()), *extra]), root)
        prepare_data(plan)
        results = [step.result for step in plan.steps if step.result is not None]
        assert results and not any(result.reused for result in results)
        trees.append(tree_digest(root / "artifacts"))
        assert {path.suffix for path in (root / "scratch").iterdir()} == {".lock"}
        assert {path.name for path in root.iterdir() if path.is_file()} == set(), "the marker is gone"
        for stage in ("convert", "tokenize"):
            done, totals = zip(*recorder.heard.pop(stage))
            assert list(done) == sorted(done) and done[-1] == totals[-1]
        if extra:
            assert {"scan_part", "write_shard", "tokenize_shard"} <= set(submitted)
            submitted.clear()
    assert not submitted, "without an address no cluster is asked"
    assert trees[0] == trees[1] and len(trees[0]) > 20


@pytest.mark.parametrize(
    ("address", "blocked", "words"),
    [
        ("tcp://127.0.0.1:1", None, "no Dask scheduler answers there"),
        full("nonsense://nowhere", None, "no Dask scheduler answers there"),
        (
            "tcp://127.0.0.1:1",
            "distributed",
            "needs distributed, which is not installed: pip install -e '.[dask]'",
        ),
    ],
)
def test_no_cluster_is_one_line_before_any_work(tmp_path, capsys, monkeypatch, address, blocked, words):
    monkeypatch.setattr(dask_pool, "_CONNECT_SECONDS", 0.5)
    if blocked:
        monkeypatch.setitem(sys.modules, blocked, None)
    assert main(["run", "--root", str(tmp_path), f"--set=execution.dask_address={address}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"execution.dask_address={address}" in line and words in line and "leave execution.dask_address out" in line
    assert {path.name for path in tmp_path.iterdir()} <= {ROOT_MARK, "logs", "prefect"}


def test_a_server_that_is_no_scheduler(tmp_path, monkeypatch):
    """The server accepts the connection and sends nothing. Dask's own client would wait for ever."""
    monkeypatch.setattr(dask_pool, "_CONNECT_SECONDS", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(InputError, match="no Dask scheduler answers there"),
    ):
        visit(f"tcp://127.0.0.1:{server.getsockname()[1]}", tmp_path)


def test_a_scheduler_without_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(dask_pool, "_WORKER_SECONDS", 0.5)
    with (
        LocalCluster(n_workers=0, dashboard_address=None) as cluster,
        pytest.raises(InputError, match=r"no worker answered in 0 s; start some: `dask worker tcp://"),
    ):
        visit(cluster.scheduler_address, tmp_path)


def test_a_worker_that_does_not_see_a_directory(address, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"worker tcp://\S+ on \S+ does not see /nowhere/raw; give it the same paths"):
        visit(address, tmp_path, [tmp_path, Path("/nowhere/raw")])
    # another directory with the same name as the root
    monkeypatch.setattr(dask_pool, "write_text", lambda path, _: path.write_text("of another machine"))
    with pytest.raises(InputError, match=f"does not see {tmp_path};"):
        visit(address, tmp_path, [tmp_path])


def test_a_worker_with_other_versions(address, tmp_path, monkeypatch):
    monkeypatch.setattr(dask_pool, "versions", lambda: versions() | {"numpy": "1.0"})
    with pytest.raises(InputError, match=r"has numpy 2\S+, this machine has 1\.0.*install the same there"):
        visit(address, tmp_path)


def test_a_worker_that_cannot_import_athanor_is_told_so():
    with pytest.raises(InputError, match=r"worker w cannot run athanor.*No module named 'flows'"):
        dask_pool._check_worker("worker w", ModuleNotFoundError("No module named 'flows'"))


def test_what_a_worker_sees(tmp_path):
    marker = tmp_path / "marker"
    assert look(str(marker), "a", [])["unseen"] == str(tmp_path)
    marker.write_text("a")
    assert look(str(marker), "a", [str(tmp_path)])["unseen"] is None
    assert look(str(marker), "a", [str(tmp_path), str(tmp_path / "b")])["unseen"] == str(tmp_path / "b")
    assert look(str(marker), "a", [])["versions"] == versions() and len(versions()) > 8


def test_a_task_of_a_lost_worker_is_done_by_another(address, tmp_path):
    markers = [str(tmp_path / name) for name in "abc"]
    Path(markers[0]).touch()
    Path(markers[2]).touch()
    assert visit(address, tmp_path, function=kill_itself_once, tasks=markers) == dict(enumerate(markers))


def test_a_task_that_kills_every_worker_is_one_clear_error(address, tmp_path):
    with pytest.raises(
        InputError, match=r"a shard was given up after 2 workers died over it, the last tcp://"
    ) as caught:
        visit(address, tmp_path, function=kill_itself, tasks=[1])
    assert "\n" not in str(caught.value) and f"execution.dask_address={address}" in str(caught.value)


def test_after_a_failure_nothing_runs_on(address, tmp_path):
    """Otherwise a task could write into the directory of the next try."""
    with pytest.raises(ValueError, match="failed beside another"):
        visit(address, tmp_path, function=slow_or_failing, tasks=[("slow", str(tmp_path)), ("fail", str(tmp_path))])
    assert (tmp_path / "ended").exists()


def test_shards_of_a_killed_run_are_waited_for(address, tmp_path, monkeypatch):
    """The flow's process has died, but a worker's thread runs until the next run reports that it waits for it."""
    monkeypatch.setattr(dask_pool._log, "warning", lambda *_: (tmp_path / "release").touch())
    with Client(address, set_as_default=False) as client:
        dask_pool._ShardExecutor(client).submit(work_until_released, str(tmp_path))
        wait_for((tmp_path / "began").exists, 30, "beginning of the task")
    try:
        visit(address, tmp_path)
        assert (tmp_path / "ended").exists()
    finally:
        (tmp_path / "release").touch()


def test_a_worker_of_many_threads_does_one_task_at_a_time():
    inside, most = [], []

    def work(number: int) -> int:
        inside.append(number)
        most.append(len(inside))
        time.sleep(0.01)
        inside.remove(number)
        return threading.get_ident()

    with ThreadPoolExecutor(4) as pool:
        threads = set(pool.map(run_shard_task, [work] * 12, range(12)))
    assert set(most) == {1} and len(threads) > 1


def test_nothing_of_dask_is_needed_without_an_address():
    code = "import sys\nfor name in ('dask', 'distributed'): sys.modules[name] = None\n"
    code += "import flows.pipeline.dask_pool\n"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, timeout=at_most(120))
