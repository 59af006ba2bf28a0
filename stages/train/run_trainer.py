"""The run of a trainer's job: write run.json, launch the job, follow its metrics, read its result."""

import logging
import signal
from collections.abc import Callable
from pathlib import Path

from dataset_builders.errors import DamagedFile, InputError
from dataset_builders.storage.files import GrowingFile, write_text
from stages.shared.artifacts.workers import StageResources
from stages.shared.launchers.job import EXIT_DEADLINE, Job, JobFailed, make_launcher, run_job
from stages.shared.launchers.processes import end_processes, processes_of
from trainer.contract.checkpoint import KEPT_ASIDE, check_checkpoint
from trainer.contract.names import METRICS_JSONL, RESULT_JSON, RUN_JSON, TRAINER_LOG
from trainer.contract.result import MetricsRow, TrainResult, parse_metrics
from trainer.contract.run import EncodeRun, RunConfig

log = logging.getLogger("athanor.train")


class StageStopped(RuntimeError):
    """The trainer was stopped and has saved; the same command resumes it."""


class TrainerFailed(RuntimeError):
    """The trainer gave up; the text has its message, the keys of the samples of that step, and the path of the log."""


def run_trainer(run: RunConfig | EncodeRun, resources: StageResources, name: str) -> TrainResult:
    """Launch the trainer with a run.json in the run's output directory; return its result.

    Raises:
        StageStopped: the trainer was stopped from outside, and saved.
        InputError: the trainer refused its config or an input.
        TrainerFailed: the trainer gave up with a message.
        JobFailed: the job ended without a result (killed, out of memory), or took too long.
    """
    directory, run_json = run.output_dir, run.model_dump_json(indent=1) + "\n"
    follower = MetricsFollower(directory / METRICS_JSONL, resources.on_rows)
    if (earlier := _finished_before(run, run_json)) is not None:
        log.info("%s: it is trained already, by a job that nobody waited for", name)
        end_processes(processes_of(str(directory)), resources.cluster.stop_grace_seconds)
        follower.poll()
        return earlier
    (directory / RESULT_JSON).unlink(missing_ok=True)
    write_text(directory / RUN_JSON, run_json)

    def on_line(line: str) -> None:
        if KEPT_ASIDE in line:  # a damaged checkpoint, which nobody would notice in the log
            log.warning("%s", line.strip())
        resources.on_line(line)

    job = trainer_job(directory, on_line)
    launcher = make_launcher(resources.cluster)
    log.info("%s: %s", name, launcher.plan(job))
    try:
        run_job(launcher, job, follower.poll)
    except JobFailed as error:
        result = _read_result(directory)
        if result is None or result.status == "finished":
            raise
        _raise_for(result, error, name)
    result = _read_result(directory)
    if result is None or result.status != "finished":
        raise TrainerFailed(f"{name} ended without a finished {directory / RESULT_JSON}; log: {job.log_path}")
    return result


def trainer_job(output_dir: Path, on_line: Callable[[str], None] = lambda line: None) -> Job:
    """Return the launcher's job for the trainer with the run.json of a run's output directory."""
    return Job(str(output_dir), ("-m", "trainer", str(output_dir / RUN_JSON)), output_dir / TRAINER_LOG, on_line)


class MetricsFollower:
    """Follower of metrics.jsonl: each poll calls `on_rows` with the new rows, each step once.

    A trainer that resumes truncates the file to its checkpoint; repeated steps are not passed on again.
    """

    def __init__(self, path: Path, on_rows: Callable[[list[MetricsRow]], None]) -> None:
        self.on_rows = on_rows
        self._file = GrowingFile(path)
        self._step = -1

    def poll(self) -> None:
        """Read new rows once. An error of `on_rows` is logged and ignored: a listener never stops the training."""
        try:
            rows = [row for row in parse_metrics(self._file.new_lines()) if row.step > self._step]
            self._file.take()
            if rows:
                self._step = rows[-1].step
                self.on_rows(rows)
        except Exception:
            log.warning("a listener to the training's metrics failed; training goes on", exc_info=True)


def _finished_before(run: RunConfig | EncodeRun, run_json: str) -> TrainResult | None:
    """Return the result for this very run.json, from a job that outlived the flow that waited for it; None if there is
    none, or if its checkpoint is damaged."""
    path = run.output_dir / RUN_JSON
    if run.task != "train" or not path.is_file() or path.read_text(encoding="utf-8") != run_json:
        return None
    result = _read_result(run.output_dir)
    if result is None or result.status != "finished":
        return None
    try:
        check_checkpoint(run.output_dir / (result.checkpoint or ""), fingerprint=run.fingerprint)
    except DamagedFile:  # the trainer itself resumes from an older checkpoint
        return None
    return result


def _raise_for(result: TrainResult, error: JobFailed, name: str) -> None:
    if result.status == "stopped":
        stopped = f"{name} was stopped after step {result.step} and saved; run the same command again to go on"
        if error.exit_status == EXIT_DEADLINE:
            stopped = f"{name}: {error.what}; {stopped}, with a larger execution.cluster.timeout_seconds"
        raise StageStopped(stopped) from error
    if result.is_input_error:  # torchrun has an exit status of its own
        raise InputError(result.message) from error
    keys = f" Samples of that step: {', '.join(result.keys)}." if result.keys else ""
    message = result.message or f"{name} failed after step {result.step}"
    if error.exit_status < 0:  # the other ranks' messages only report that they lost this rank
        how = f"killed by signal {error.exit_status} ({signal.Signals(-error.exit_status).name})"
        message = f"{name}: rank {error.rank} was {how}; {message}"
    raise TrainerFailed("\n".join([f"{message}{keys} Log: {error.log_path}", *error.tail])) from error


def _read_result(directory: Path) -> TrainResult | None:
    path = directory / RESULT_JSON
    return TrainResult.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else None
