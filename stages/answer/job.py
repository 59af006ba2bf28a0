"""The workers of the answer stage as a job of the cluster's launcher; progress comes from the parts that they write."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from stages.answer.parts import AnswerJob
from stages.answer.worker import REFUSED
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Job, JobFailed, make_launcher, run_job

JOB_DIR = "job"
_LOOK_SECONDS = 1.0
log = logging.getLogger("athanor.answer")


def answer_job(work_dir: Path, on_line: Callable[[str], None] = lambda line: None) -> Job:
    directory = work_dir / JOB_DIR
    arguments = ("-m", "stages.answer.worker", str(directory / "job.json"))
    return Job(str(directory), arguments, directory / "logs" / "answer.log", on_line)


def run_workers(
    work: AnswerJob, cluster: ClusterConfig, on_line: Callable[[str], None], on_look: Callable[[], None]
) -> None:
    """Answer every missing part, with one worker per process of the cluster's layout; InputError if one refuses its
    job. `on_look` is called about once per second while the workers run, and at the end."""
    directory = work.work_dir / JOB_DIR
    directory.mkdir(exist_ok=True)
    (directory / REFUSED).unlink(missing_ok=True)
    write_text(directory / "job.json", work.model_dump_json(indent=1) + "\n")
    launcher, job, last = make_launcher(cluster), answer_job(work.work_dir, on_line), 0.0
    log.info("answer: %s", launcher.plan(job))

    def look() -> None:
        nonlocal last
        if time.monotonic() - last >= _LOOK_SECONDS:
            last = time.monotonic()
            on_look()

    try:
        run_job(launcher, job, look)
    except JobFailed as error:
        if (directory / REFUSED).is_file():
            raise InputError((directory / REFUSED).read_text(encoding="utf-8")) from error
        raise
    on_look()
