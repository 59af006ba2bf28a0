"""The run of a trainer's job: write run.json, launch the job, follow its metrics, read its result."""

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from dataset_builders.errors import DamagedFile, InputError
from dataset_builders.storage.files import GrowingFile, write_text
from stages.artifacts.workers import StageResources
from stages.launchers.job import EXIT_DEADLINE, Job, JobFailed, make_launcher, run_job
from stages.launchers.processes import end_processes, processes_of
from trainer.contract.answer import KEPT_ASIDE, MetricsRow, TrainResult, check_checkpoint, parse_metrics
from trainer.contract.names import METRICS_JSONL, RESULT_JSON, RUN_JSON, TOGETHER_JSON, TRAINER_LOG
from trainer.contract.run import EncodeRun, RunConfig, SharedBaseRun

log = logging.getLogger("athanor.train")


class StageStopped(RuntimeError):
    """The trainer was stopped and has saved; the same command resumes it."""


class TrainerFailed(RuntimeError):
    """The trainer gave up; the text has its message, the keys of the samples of that step, and the path of the log."""


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


def run_trainer(
    run: RunConfig | EncodeRun,
    resources: StageResources,
    name: str,
    others: Sequence[tuple[RunConfig, Callable[[list[MetricsRow]], None]]] = (),
) -> TrainResult:
    """Launch the trainer with a run.json in the run's output directory; return its result.

    Args:
        name: name of the job in messages.
        others: runs that the same job trains after this one over the same base, each with a listener to its metrics.
            How they end is in their own result.json. A run that has finished, or has failed so before, is left out.

    Raises:
        StageStopped: the trainer was stopped from outside, and saved.
        InputError: the trainer refused its config or an input.
        TrainerFailed: the trainer gave up with a message.
        JobFailed: the job ended without a result (killed, out of memory), or took too long.
    """
    directory = run.output_dir
    follower = MetricsFollower(directory / METRICS_JSONL, resources.on_rows)
    if (earlier := _finished_before(run)) is not None:
        log.info("%s: it is trained already, by a job for several runs or by one that nobody waited for", name)
        end_processes(processes_of(str(directory)), resources.cluster.stop_grace_seconds)  # it may train other runs
        follower.poll()
        return earlier
    others = [(other, on_rows) for other, on_rows in others if not _ended_before(other)]
    job = trainer_job(directory, _telling(resources.on_line), [other.output_dir for other, _ in others])
    followers = [follower, *(MetricsFollower(other.output_dir / METRICS_JSONL, on_rows) for other, on_rows in others)]
    runs = [run, *(other for other, _ in others)]
    for each in runs:
        (each.output_dir / RESULT_JSON).unlink(missing_ok=True)
        write_text(each.output_dir / RUN_JSON, _run_json(each))
    if others:
        together = SharedBaseRun(runs=tuple(each.output_dir / RUN_JSON for each in runs))
        write_text(directory / TOGETHER_JSON, together.model_dump_json(indent=1) + "\n")
    seconds = resources.cluster.timeout_seconds * len(followers)
    launcher = make_launcher(resources.cluster.model_copy(update={"timeout_seconds": seconds}))
    log.info("%s: %s", name, launcher.plan(job))
    try:
        run_job(launcher, job, lambda: [each.poll() for each in followers])
    except JobFailed as error:
        result = _read_result(directory)
        if others and result is not None and result.status == "finished":
            log.warning("%s: the job ended in one of the %d other runs; they go on by themselves", name, len(others))
            return result
        if result is None or result.status == "finished":
            raise
        _raise_for(result, error, name)
    finally:
        (directory / TOGETHER_JSON).unlink(missing_ok=True)
    result = _read_result(directory)
    if result is None or result.status != "finished":
        raise TrainerFailed(f"{name} ended without a finished {directory / RESULT_JSON}; log: {job.log_path}")
    return result


def trainer_job(
    output_dir: Path, on_line: Callable[[str], None] = lambda line: None, others: Sequence[Path] = ()
) -> Job:
    """Return the launcher's job for the trainer with the run.json of a run's output directory.

    Args:
        others: output directories of other runs that the job trains too.
    """
    arguments = ("-m", "trainer", str(output_dir / (TOGETHER_JSON if others else RUN_JSON)))
    members = tuple(str(directory) for directory in others)
    return Job(str(output_dir), arguments, output_dir / TRAINER_LOG, on_line, members)


def _telling(on_line: Callable[[str], None]) -> Callable[[str], None]:
    """Return `on_line` with an addition: the trainer's line about a damaged checkpoint is also logged as a warning."""

    def listen(line: str) -> None:
        if KEPT_ASIDE in line:
            log.warning("%s", line.strip())
        on_line(line)

    return listen


def _run_json(run: RunConfig | EncodeRun) -> str:
    return run.model_dump_json(indent=1) + "\n"


def _result_before(run: RunConfig | EncodeRun) -> TrainResult | None:
    """Return the result for this very run.json of a training, from an earlier job; None if there is none."""
    path = run.output_dir / RUN_JSON
    is_same = path.is_file() and path.read_text(encoding="utf-8") == _run_json(run)
    return _read_result(run.output_dir) if is_same and run.task == "train" else None


def _ended_before(run: RunConfig) -> bool:
    """Whether a run that an earlier job trained is finished, or has failed: it is then tried again by itself."""
    result = _result_before(run)
    return result is not None and (result.status == "failed" or _finished_before(run) is not None)


def _finished_before(run: RunConfig | EncodeRun) -> TrainResult | None:
    """Return the result for this very run.json, from a job for several runs or one that outlived the flow that waited
    for it; None if there is none, or if its checkpoint is damaged."""
    result = _result_before(run)
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
