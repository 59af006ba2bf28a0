"""The workers of the answer stage: the job of the cluster's launcher that starts them, and the program that each runs.

    torchrun ... -m stages.answer.worker job.json

A worker is one process with one GPU. Workers do not communicate: each answers its share of the parts and ends. The
stage sees their progress in the parts that they write.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from stages.answer.parts import AnswerJob, answer_parts
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Job, JobFailed, make_launcher, run_job
from trainer.contract.names import EXIT_INPUT

JOB_DIR = "job"
REFUSED = "refused.txt"  # in the directory of job.json: one line with the reason why a worker refused its job
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


def main(argv: Sequence[str]) -> int:
    """Answer this worker's share, and return the exit status."""
    os.umask(0o077)  # on a cluster no flow is the parent process; only the owner may read a root
    parser = argparse.ArgumentParser(prog="python -m stages.answer.worker")
    parser.add_argument("job_json", type=Path, help="an AnswerJob, written by the answer stage")
    path = parser.parse_args(argv).job_json
    job = AnswerJob.model_validate_json(path.read_text(encoding="utf-8"))
    worker, local, workers = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))

    def say(answered: int) -> None:
        print(f"worker {worker} of {workers}: {answered} more answers", flush=True)

    try:
        answer_parts(job, worker, workers, local, say)
    except InputError as error:
        write_text(path.parent / REFUSED, str(error))
        print(error, file=sys.stderr)
        return EXIT_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
