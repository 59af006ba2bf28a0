"""A second SIGTERM while a command ends after the first: neither a traceback nor another exit status."""

import signal
import subprocess
import sys

from tests.helpers.patience import at_most

# The end of a run takes seconds at the exit of the interpreter too, where the temporary server is stopped.
COMMAND = """
import atexit, sys, time
from flows.cli import main

def wait(word):
    print(word, flush=True)
    time.sleep(WAIT[word])

WAIT = {"running": 60, "cleaning": 1.5, "exiting": 1.5}

def command(args):
    try:
        wait("running")
    finally:
        wait("cleaning")

atexit.register(wait, "exiting")
main._load = lambda name: command
sys.exit(main.main(["recipes"]))
"""


def test_a_second_sigterm_interrupts_no_clean_up():
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for word in ("running", "cleaning", "exiting"):
        assert process.stdout.readline() == f"{word}\n"
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=at_most(30))
    assert errors == "athanor: stopped; the same command resumes from the finished work\n"
    assert process.returncode == 128 + signal.SIGTERM
