"""The workers of the answer stage as a job of the cluster's launcher: started, followed by the parts they write."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_text
from stages.answer_parts import AnswerJob
from stages.answer_worker import REFUSED
from stages.cluster_config import ClusterConfig
from stages.launch import Job, JobFailed, make_launcher, run_job

JOB_DIR = "job"
_LOOK_SECONDS = 1.0
log = logging.getLogger("athanor.answer")


def answer_job(work_dir: Path, on_line: Callable[[str], None] = lambda line: None) -> Job:
    """What a launcher is asked for."""
    directory = work_dir / JOB_DIR
    arguments = ("-m", "stages.answer_worker", str(directory / "job.json"))
    return Job(str(directory), arguments, directory / "logs" / "answer.log", on_line)


def run_workers(
    job: AnswerJob, cluster: ClusterConfig, on_line: Callable[[str], None], on_look: Callable[[], None]
) -> None:
    """Answer every part that is not there, with a worker for each process of the cluster's layout.

    Args:
        on_look: called about once a second while they work, and at the end.

    Raises:
        InputError: a worker refused what it was given.
        JobFailed: a worker ended with an error, or it all took too long.
    """
    directory = job.work_dir / JOB_DIR
    directory.mkdir(exist_ok=True)
    (directory / REFUSED).unlink(missing_ok=True)
    write_text(directory / "job.json", job.model_dump_json(indent=1) + "\n")
    launcher, asked, last = make_launcher(cluster), answer_job(job.work_dir, on_line), 0.0
    log.info("answer: %s", launcher.plan(asked))

    def look() -> None:
        nonlocal last
        if time.monotonic() - last >= _LOOK_SECONDS:
            last = time.monotonic()
            on_look()

    try:
        run_job(launcher, asked, look)
    except JobFailed as error:
        if (directory / REFUSED).is_file():
            raise InputError((directory / REFUSED).read_text(encoding="utf-8")) from error
        raise
    on_look()
