"""A rank that is gone ends the others at once, by a line that names it; to leave, to fail or to stop is not that."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.patience import at_most
from tests.helpers.watched_rank import WORLD
from trainer.parallel import watch
from trainer.parallel.watch import name_ranks

pytestmark = pytest.mark.promise(
    "Two hosts with a torchrun agent each have the losses of one, to the bit; a rank or host that disappears "
    "is named and ends the others."
)

SECONDS = 30


class Ranks:
    """The ranks of a directory."""

    def __init__(self, directory, pids):
        self.directory, self.pids = directory, pids
        _wait_for(lambda: all((directory / f"joined-{rank}").exists() for rank in range(WORLD)))

    def signal(self, number, *ranks):
        for rank in ranks:
            os.kill(self.pids[rank], number)

    def statuses(self, *ranks):
        _wait_for(lambda: all(self._read(f"exit-{rank}") for rank in ranks))
        return [int(self._read(f"exit-{rank}")) for rank in ranks]

    def _read(self, name):
        path = self.directory / name
        return path.read_text() if path.exists() else ""


def _wait_for(is_so):
    deadline = time.monotonic() + at_most(SECONDS)
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.watched_rank"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def ranks(server, tmp_path):
    (tmp_path / "told").mkdir()
    server.stdin.write(f"{tmp_path}\n")
    server.stdin.flush()
    ranks = Ranks(tmp_path, [int(pid) for pid in server.stdout.readline().split()])
    yield ranks
    for pid in ranks.pids:
        if not (tmp_path / f"exit-{ranks.pids.index(pid)}").exists():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_is_named_by_all_others(ranks, tmp_path, lost):
    ranks.signal(signal.SIGKILL, lost)
    others = set(range(WORLD)) - {lost}
    assert ranks.statuses(*others) == [1, 1]
    told = {(tmp_path / f"told/lost-{rank}").read_text() for rank in others}
    assert told == {f"lost rank {lost} on {socket.gethostname()}"}


def test_ranks_that_are_lost_together_are_named_together(ranks, tmp_path):
    ranks.signal(signal.SIGKILL, 1, 2)
    assert ranks.statuses(0) == [1]
    assert (tmp_path / "told/lost-0").read_text() == f"lost ranks 1, 2 on {socket.gethostname()}"


def test_a_line_that_cannot_be_written_ends_them_all_the_same(ranks, tmp_path):
    (tmp_path / "told").rmdir()
    ranks.signal(signal.SIGKILL, 1)
    assert ranks.statuses(0, 2) == [1, 1]


def test_ranks_that_leave_lose_nobody(ranks, tmp_path):
    (tmp_path / "leave").touch()
    assert ranks.statuses(0, 1, 2) == [0, 0, 0]
    assert not list(tmp_path.glob("told/lost-*"))


@pytest.mark.parametrize("failing", [0, 2])
def test_what_a_rank_fails_of_ends_the_others(ranks, tmp_path, failing):
    (tmp_path / f"fail-{failing}").touch()
    assert ranks.statuses(0, 1, 2) == [1, 1, 1]
    line = f"rank {failing} on {socket.gethostname()} failed: ValueError: no luck\n"
    for rank in set(range(WORLD)) - {failing}:
        assert (tmp_path / f"log-{rank}").read_text() == line
    assert not list(tmp_path.glob("told/lost-*"))


def test_a_stopped_rank_is_not_lost(ranks, tmp_path):
    ranks.signal(signal.SIGSTOP, 1)
    time.sleep(4)  # two seconds without an answer would lose it
    ranks.signal(signal.SIGCONT, 1)
    (tmp_path / "leave").touch()
    assert ranks.statuses(0, 1, 2) == [0, 0, 0]


def test_a_stranger_does_not_become_a_rank():
    token = bytes(range(16))
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = {}
        accepting = threading.Thread(target=lambda: found.update(watch._accept(server, token, 3)))
        accepting.start()
        place = watch.RankAddress("here", (), server.getsockname()[1], token)
        stranger = socket.create_connection(server.getsockname())
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        connections = [watch._connect(rank, place, True) for rank in (2, 1)]
        accepting.join(at_most(10))
    assert sorted(found) == [1, 2] and all(connections)


def test_ranks_are_named_by_host():
    hosts = ("a", "a", "b", "b")
    assert name_ranks([3, 0, 2], hosts) == "rank 0 on a and ranks 2, 3 on b"
