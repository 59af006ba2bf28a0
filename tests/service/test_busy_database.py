"""The form is submitted at load 20 while other programs write into Prefect's database. No request is refused."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.patience import at_most
from tests.helpers.tiers import full

SUBMITS, LOAD = 20, 20
LATER = "2099-01-01T00:00:00Z"  # no worker takes the runs


def write_on(path, ended: threading.Event) -> None:
    """Write repeatedly, like several flow runs that send logs and states."""
    while not ended.is_set():
        with sqlite3.connect(path, timeout=at_most(60), isolation_level=None) as database:
            database.execute("BEGIN IMMEDIATE")
            time.sleep(0.02)
            database.execute("COMMIT")
        time.sleep(0.05)


@pytest.mark.parametrize("together", [full(1), full(5)])
def test_twenty_of_twenty_submits_are_taken(service, together):
    deployment = service.prefect("/deployments/filter", {})[0]["id"]
    url = f"{service.record.prefect_api}/deployments/{deployment}/create_flow_run"
    state = {"type": "SCHEDULED", "state_details": {"scheduled_time": LATER}}

    def submit(number: int) -> int | str:
        try:
            service.ask(url, {"state": state, "name": f"submit-{number}", "enforce_parameter_schema": False})
        except urllib.error.HTTPError as error:
            return error.code
        except OSError as error:
            return repr(error)
        return 201

    busy = [sys.executable, "-c", "while True: pass"]
    spinners = [subprocess.Popen(busy) for _ in range(max(0, LOAD - round(os.getloadavg()[0])))]
    ended = threading.Event()
    writers = [
        threading.Thread(target=write_on, args=(service.root / "prefect" / "prefect.db", ended)) for _ in range(2)
    ]
    try:
        for writer in writers:
            writer.start()
        started = time.monotonic()
        with ThreadPoolExecutor(together) as pool:
            answers = Counter(pool.map(submit, range(SUBMITS)))
        seconds = time.monotonic() - started
    finally:
        ended.set()
        for spinner in spinners:
            spinner.kill()
        for writer in writers:
            writer.join()
    print(f"{answers[201]} of {SUBMITS} submits, {together} at a time, {seconds:.1f} s, {len(spinners)} spinners")
    assert answers == {201: SUBMITS}, service.tell()
