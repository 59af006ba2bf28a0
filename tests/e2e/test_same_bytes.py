"""convert, tokenize and plan_bins give the same bytes in every file, wherever and in whatever order shards are made."""

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

import stages.convert.stage
import stages.tokenize.stage
from stages.shared.artifacts import workers
from stages.shared.artifacts.workers import StageResources
from tests.helpers.data_stages import run_all, write_rows
from tests.helpers.patience import at_most
from tests.helpers.raw_rows import mixed_rows, write_source
from tests.helpers.tiers import full
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.trees import tree_digest

pytestmark = pytest.mark.promise(
    "The data stages write the same bytes from one process, several or a Dask cluster, on a disk or in an object "
    "store whose connections are cut, in any order of completion and after kill -9."
)

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("source") / "raw")


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory) -> dict[str, str]:
    """Make the artifacts in one process, one shard after the other."""
    tree = tree_digest(run_all(source, tiny_hf_dir(), tmp_path_factory.mktemp("one")))
    for stage in ("convert", "tokenize"):
        assert sum(name.startswith(stage) and name.endswith(".tar") for name in tree) > 12
    return tree


def assert_same(artifacts: Path, expected: dict[str, str]) -> None:
    got = tree_digest(artifacts)
    differing = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
    assert not differing


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes(processes, source, expected, tmp_path, monkeypatch):
    started: list[int] = []

    class Counted(ProcessPoolExecutor):
        def __init__(self, max_workers, *args):
            started.append(max_workers)
            super().__init__(max_workers, *args)

    monkeypatch.setattr(workers, "ProcessPoolExecutor", Counted)
    monkeypatch.setattr(stages.convert.stage, "_ROWS_PER_WORKER", 1)
    monkeypatch.setattr(stages.tokenize.stage, "_PROCESS_WORTH", 1e-9)
    assert_same(run_all(source, tiny_hf_dir(), tmp_path, StageResources(num_workers=processes)), expected)
    assert started[:3] == [processes] * 3, "scan, write and tokenize"


class ShuffledExecutor(Executor):
    """An executor that runs its tasks in a random order, one after the other, in a thread."""

    def __init__(self, seed: int) -> None:
        self._rng, self._waiting, self._changed = random.Random(seed), [], threading.Condition()
        self._is_open, self.order = True, []
        self._count = 0
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def submit(self, function, /, *args, **kwargs) -> Future:
        future: Future = Future()
        with self._changed:
            self._waiting.append((self._count, future, function, args))
            self._count += 1
            self._changed.notify()
        return future

    def _next(self):
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._is_open)
            while self._is_open and self._changed.wait(0.02):  # until no more tasks arrive, so that there is a choice
                pass
            return self._waiting.pop(self._rng.randrange(len(self._waiting))) if self._waiting else None

    def _work(self) -> None:
        while (item := self._next()) is not None:
            number, future, function, args = item
            self.order.append(number)
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join()


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, full(2)])
def test_shards_that_end_in_another_order(source, expected, tmp_path, seed):
    with ShuffledExecutor(seed) as executor:
        assert_same(run_all(source, tiny_hf_dir(), tmp_path, StageResources(executor=executor)), expected)
    assert sum(a > b for a, b in zip(executor.order, executor.order[1:])) > len(executor.order) // 4 > 12


@pytest.fixture(scope="module")
def cluster_client() -> Iterator[Client]:
    """Start two Dask worker processes. tests/flows/resources/test_dask.py tests how the flow itself uses a cluster."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.mark.full
def test_a_cluster_of_two_workers(source, expected, tmp_path, cluster_client):
    executor = cluster_client.get_executor(pure=False)
    assert_same(run_all(source, tiny_hf_dir(), tmp_path, StageResources(executor=executor)), expected)


def killed(how: str, source: Path, root: Path) -> dict:
    command = [sys.executable, "-m", "tests.helpers.kill_data_stages", how, source, tiny_hf_dir(), root]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=at_most(600))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_killed_three_times_in_each_stage(source, expected, tmp_path):
    assert killed("random", source, tmp_path / "root") == {"convert": 3, "tokenize": 3}
    assert_same(tmp_path / "root" / "artifacts", expected)


@pytest.mark.full
def test_killed_at_many_moments_of_each_stage(tmp_path):
    found = killed("each", write_source(tmp_path / "raw", {"mixed": mixed_rows()}, file_rows=30), tmp_path)
    assert all(of_stage["differing"] == {} for of_stage in found.values())
    kills = [found[stage]["kills"] for stage in ("convert", "tokenize", "plan_bins")]
    assert kills[0] >= 10 and kills[1] >= 8 and kills[2] >= 4
    assert not [path for path in tmp_path.glob("*/killed-*/scratch/*") if path.is_dir()]
