"""The run of lmms-eval for one model: its command in its own environment, its log, its finished results."""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.fingerprint import fingerprint
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from flows.bench.results import TaskResult, read_results
from flows.resources.host import this_host
from stages.evaluate.lmms_eval.task import HELDOUT, LMMS_EVAL_MODEL, lmms_eval_arguments
from trainer.model.registry import read_model

_LOADED = ("qwen3_vl", "qwen3_5")  # families, with and without experts, that lmms-eval's model loads
_ON_CPU = "device=cpu,device_map=cpu"
RESULTS = "results"
_EXPERTS = "-A1B"  # lmms-eval loads a model as a mixture of experts if its path matches A<digits>B
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Exit)\b.*|.*\bERROR\b.*")


class BenchFailed(RuntimeError):
    """lmms-eval ended with an error; the text is one line with its message and the path of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The tasks that models are asked.

    Attributes:
        python: the Python that runs lmms-eval.
        tasks: names of lmms-eval's tasks.
        heldout: directory of the held-out task; None if it is not among the tasks.
        is_offline: whether no task needs the hub.
        limit: number of questions of each task; None: all.
        model_args: further KEY=VALUE pairs for lmms-eval's model.
    """

    python: Path
    tasks: tuple[str, ...]
    heldout: Path | None
    is_offline: bool
    limit: int | None = None
    model_args: str = ""

    @property
    def digest(self) -> str:
        """The digest of the held-out questions; "" without them."""
        return "" if self.heldout is None else hashlib.sha256((self.heldout / HELDOUT).read_bytes()).hexdigest()

    def arguments(self, hf_dir: Path) -> list[str]:
        """Return the arguments of Python for a model, to be run in the directory that `ask_tasks` prepares."""
        pairs = [
            f"pretrained={_link_name(hf_dir)}",
            *([] if this_host().gpu else [_ON_CPU]),
            *filter(None, [self.model_args]),
        ]
        command = lmms_eval_arguments(",".join(pairs), self.tasks, RESULTS, self.heldout)
        return command + (["--limit", str(self.limit)] if self.limit is not None else [])


def check_model_type(hf_dir: Path) -> None:
    """Check that lmms-eval can load a model.

    Raises:
        InputError: it cannot.
    """
    family, _ = read_model(hf_dir)
    if not family.model_type.startswith(_LOADED):
        raise InputError(
            f"{hf_dir}: model_type is {family.model_type}, which lmms-eval's model {LMMS_EVAL_MODEL} does not load; "
            "our own evaluation scores it"
        )


def ask_tasks(question: Question, hf_dir: Path, work: Path) -> dict[str, TaskResult]:
    """Return task -> results for a model. Results of the same command on the same files are reused.

    Args:
        work: directory for the log and for lmms-eval's files.

    Raises:
        BenchFailed: lmms-eval ended with an error, or without results.
    """
    model = work / _link_name(hf_dir)
    work.mkdir(parents=True, exist_ok=True)
    model.unlink(missing_ok=True)
    model.symlink_to(hf_dir, target_is_directory=True)
    arguments = question.arguments(hf_dir)
    asked = fingerprint({"arguments": arguments, "files": _state(hf_dir), "task": question.digest})
    mark, log = work / "asked.txt", work / "lmms-eval.log"
    if mark.is_file() and mark.read_text(encoding="utf-8") == asked:
        return read_results(work / RESULTS)
    mark.unlink(missing_ok=True)
    shutil.rmtree(work / RESULTS, ignore_errors=True)
    with log.open("wb") as output:
        done = subprocess.run(
            [str(question.python), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | _environment(question.is_offline),
            cwd=work,
            check=False,
        )
    try:
        results = read_results(work / RESULTS)
    except InputError as error:
        raise BenchFailed(f"{_why(log) or error} (exit status {done.returncode}; log: {log})") from None
    if done.returncode:
        raise BenchFailed(f"{_why(log) or 'lmms-eval failed'} (exit status {done.returncode}; log: {log})")
    write_text(mark, asked)
    return results


def _link_name(hf_dir: Path) -> str:
    """Return the name of the link to a model, which lmms-eval gets in place of a path with letters like A3B."""
    return f"model{_EXPERTS if 'moe' in read_model(hf_dir)[0].model_type else ''}"


def _environment(is_offline: bool) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if is_offline else {}
    return {**offline, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ""}


def _state(directory: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time in ns of the files of a directory, which change with their content."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _why(log: Path) -> str:
    """Return the last line of a log that names an error."""
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if _ERROR.match(line.strip())), "")
