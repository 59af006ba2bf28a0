"""The `athanor` command: parse the arguments, set the directory of Prefect's files, call the command, and turn errors
into one line.

The module of a command is imported only when the command is used. So `--help` is quick, and Prefect's settings are in
the environment before Prefect is imported.
"""

import argparse
import contextlib
import errno
import gc
import importlib
import importlib.util
import logging
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dataset_builders.errors import LONGEST_LINE, InputError, first_line, printable, shown, without_middle
from dataset_builders.storage.files import MAX_LOG_BYTES
from dataset_builders.storage.store import absolute, check_reachable, location, side_dir
from flows.cli.terminal import FirstLines, PrintableLines, PrintableParser, PrintableStream
from flows.service.access import make_private_root, remove_unused_root, use_service
from flows.tracking.servers import DEFAULT_ROOT, check_prefect_database, prefect_home, service_of_another
from trainer.contract.names import EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line. Functions are named as "module:function" and imported when they are used.

    Attributes:
        run: runs the command; its module may import libraries that take seconds.
        check: refuses wrong arguments before these libraries are loaded; empty: nothing is checked.
        writes: whether it creates the root.
        served: whether it talks to the servers of a running `athanor up`.
        starts_prefect: whether Prefect's server starts while the libraries are loaded.
    """

    run: str
    check: str = ""
    writes: bool = False
    served: bool = False
    starts_prefect: bool = False


_AT = "flows.cli."
COMMANDS = {
    "init": Command(f"{_AT}init:init_command", writes=True),
    "run": Command(f"{_AT}run:run_command", f"{_AT}check:open_plan", writes=True, served=True, starts_prefect=True),
    "plan": Command(f"{_AT}plan:plan_command", f"{_AT}check:open_plan"),
    "doctor": Command(f"{_AT}doctor:doctor_command"),
    "ask": Command(f"{_AT}chat:ask_command", f"{_AT}check:check_model_dir"),
    "chat": Command(f"{_AT}chat:chat_command", f"{_AT}check:check_chat"),
    "preview": Command(f"{_AT}commands:preview_command", writes=True),
    "sweep": Command(
        f"{_AT}run:sweep_command", f"{_AT}check:check_points", writes=True, served=True, starts_prefect=True
    ),
    "up": Command(f"{_AT}commands:up_command", f"{_AT}check:check_service", writes=True),
    "sync": Command(f"{_AT}commands:sync_command", served=True),
    "status": Command(f"{_AT}status:status_command", served=True),
    "gc": Command(f"{_AT}garbage:gc_command"),
    "backup": Command(f"{_AT}backup:backup_command"),
    "recipes": Command(f"{_AT}commands:recipes_command"),
}

_CLEANING_SECONDS = 5.0  # after a SIGTERM; a later one is obeyed, because a library may have swallowed the first
_KEPT_LOGS = 100  # of the newest runs
_SPACE_LEFT = 2_000_000  # bytes; with less free space the disk counts as full


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, so that every `finally` block runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        the exit status: 0 success, 1 failed, 2 wrong input, 75 stopped and saved, 128 + the number of a signal.
    """
    _keep_streams()
    keep_bytecode()
    with contextlib.redirect_stdout(PrintableStream(sys.stdout)):
        return _run(make_parser().parse_args(argv))


def _run(args: argparse.Namespace) -> int:
    """Run the command of parsed arguments, and return its exit status."""
    try:
        args.root = absolute(location(args.root))
        if args.command != "doctor":
            check_reachable(args.root)
    except InputError as error:
        _say_error(f"--root: {error}", args.debug)
        return EXIT_INPUT
    root, command = side_dir(args.root), COMMANDS[args.command]
    os.environ.setdefault("PREFECT_HOME", str(prefect_home(args.root)))
    with contextlib.suppress(ValueError):  # raised outside the main thread
        signal.signal(signal.SIGTERM, _sigterm_handler())
    log_path, is_new = None, command.writes and not os.path.lexists(root)
    try:
        if (command.served or command.writes) and (other := service_of_another(args.root)) is not None:
            _say_error(
                f"--root {args.root} is a copy of {other.root}, which process {other.pid} serves; the copy is a root "
                "of its own, and that service is not used",
                False,
            )
        if command.served:
            use_service(args.root)
        if command.writes and (line := make_private_root(root)):
            _say_error(line, False)
        if command.check:
            _function(command.check)(args)
        if args.command == "run":
            log_path = _log_to_file(root)
        return _load(command)(args)
    except (InputError, ValidationError) as error:
        _say_error(_one_line(error), args.debug)
        if is_new:
            remove_unused_root(root)
        return EXIT_INPUT
    except KeyboardInterrupt as error:
        return _stopped(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT, error)
    except BrokenPipeError:  # the reader of the output has ended, as in `athanor run | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if log_path:
            logging.getLogger("athanor").exception("%s failed", args.command)
        status, line = _why(error, root, log_path)
        _say_error(line, args.debug)
        return status
    except BaseException as error:
        if type(error).__name__ != "TerminationSignal":  # Prefect's own exception for SIGTERM
            raise
        return _stopped(signal.SIGTERM, error)


class _Version(argparse.Action):
    """Print the installed version and exit. `importlib.metadata` is imported only then, because its import is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        metadata = importlib.import_module("importlib.metadata")
        print(f"athanor {metadata.version('athanor-vlm')}")
        parser.exit()


def _keep_streams() -> None:
    """Open the null device for each standard stream that is closed. Otherwise the next file would get its number, and
    libraries would write their messages into that file."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def keep_bytecode() -> None:
    """Let this process and its child processes keep compiled modules in the user's cache, if they are not kept yet.

    Some container images have packages without compiled modules and do not let Python write any
    (PYTHONDONTWRITEBYTECODE is set, or the files belong to another user). There, every process compiles every module
    that it imports: 10 of the 16 s that the trainer's imports took on a GPU host.
    """
    spec = None if sys.pycache_prefix else importlib.util.find_spec("torch")  # every slow process imports it
    if spec is None or spec.cached is None or Path(spec.cached).is_file():
        return
    if not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK):
        return
    try:
        directory = Path.home() / ".cache" / "athanor" / "bytecode"
    except RuntimeError:  # the user has no home directory
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(directory), False
    os.environ |= {"PYTHONPYCACHEPREFIX": str(directory), "PYTHONDONTWRITEBYTECODE": ""}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = PrintableParser(prog="athanor", description="From raw vision-language data to a scored model.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version of athanor")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    init = commands.add_parser("init", help="find out how raw data can be read, and write a recipe that runs")
    init.add_argument("data", help="directory, file, URL or hub name of the raw data")
    init.add_argument(
        "--model", metavar="DIR_OR_NAME", help="model directory or hub name (default: a model that fits the GPU)"
    )
    init.add_argument(
        "--gpu-memory", type=float, metavar="GB", help="memory of the GPU to train on (default: this machine's GPU)"
    )
    init.add_argument(
        "--out", type=Path, metavar="FILE", help="file of the new recipe (default: NAME_OF_THE_DATA.yaml)"
    )
    run = commands.add_parser("run", help="run a recipe: convert, tokenize, pack, train, export, answer, evaluate")
    _add_recipe(run)
    plan = commands.add_parser("plan", help="show what `run` would do: which stages it would make, why, and the sizes")
    _add_recipe(plan)
    plan.add_argument(
        "--launcher", choices=("torchrun", "slurm", "kubernetes"), help="also show what this launcher would submit"
    )
    plan.add_argument("--gpu-memory", type=float, metavar="GB", help="also list settings that fit a GPU of this size")
    doctor = commands.add_parser("doctor", help="show what this machine has, what it lacks and how to install it")
    doctor.add_argument("--network", action="store_true", help="also try to reach the Hugging Face hub")
    ask = commands.add_parser("ask", help="ask an exported model a question about an image or a video")
    ask.add_argument("model", help="model directory or hub name")
    ask.add_argument("picture", type=Path, help="file of an image or a video; '-' for a question without one")
    ask.add_argument("question", help="text of the question")
    ask.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT directory of an adapter to use with the model")
    chat = commands.add_parser("chat", help="open a page to ask one or two models about images")
    chat.add_argument("models", nargs="+", metavar="MODEL", help="one or two model directories or hub names")
    chat.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT directory of an adapter for the last model")
    chat.add_argument("--port", type=_positive, default=7860, help="port of 127.0.0.1 (default: %(default)s)")
    chat.add_argument(
        "--max-tokens",
        type=_positive,
        default=256,
        metavar="N",
        help="maximal number of tokens of an answer (default: %(default)s)",
    )
    preview = commands.add_parser("preview", help="write one HTML page that shows an artifact")
    preview.add_argument(
        "path",
        help="directory or URL of an artifact, or a shard; for artifacts of the root, the name of a stage or the first "
        "characters of a fingerprint",
    )
    preview.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file of the page (default: previews/<stage>-<fingerprint>.html in the root)",
    )
    preview.add_argument(
        "--samples", type=int, default=24, metavar="N", help="number of samples or bins to show (default: %(default)s)"
    )
    preview.add_argument("--key", help="show only the sample with this key, or the bin that holds it")
    preview.add_argument(
        "--model",
        help="model directory or hub name whose tokenizer turns tokens into text; needed if the root has no record of "
        "the model",
    )
    sweep = commands.add_parser("sweep", help="run a recipe once for every combination of some settings")
    _add_recipe(sweep)
    sweep.add_argument(
        "--grid", metavar="A.B=[V1,V2]", action="append", default=[], help="a setting and its values to try; repeatable"
    )
    up = commands.add_parser("up", help="start Prefect, MLflow and a worker on this machine, until Ctrl-C")
    up.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address that the servers listen on (default: %(default)s)",
    )
    up.add_argument(
        "--max-runs",
        type=_positive,
        default=2,
        metavar="N",
        help="number of flow runs that may run at the same time (default: %(default)s)",
    )
    up.add_argument(
        "--limit",
        dest="limits",
        metavar="NAME=SLOTS",
        action="append",
        default=[],
        help="set the number of slots of a concurrency limit; repeatable",
    )
    commands.add_parser("sync", help="send to MLflow what earlier runs could not send")
    commands.add_parser("status", help="list the newest runs, what they do and wait for, and the bytes of the root")
    collect = commands.add_parser("gc", help="list what is not needed any more in a root, or delete it")
    collect.add_argument("--delete", action="store_true", help="delete what is listed")
    collect.add_argument(
        "--keep",
        action="extend",
        nargs="+",
        default=[],
        metavar="RECIPE",
        help="recipes whose artifacts and unfinished work are needed too: names, or paths of YAML files",
    )
    collect.add_argument(
        "--days",
        type=_not_negative,
        metavar="DAYS",
        help="days for which every run and unfinished work is needed (default: 7)",
    )
    backup = commands.add_parser("backup", help="copy databases, records and registered models while runs go on")
    backup.add_argument("directory", type=Path, metavar="DIR", help="new directory for the copy")
    commands.add_parser("recipes", help="list the recipes that are part of athanor")
    for command in commands.choices.values():
        command.add_argument(
            "--root",
            default=DEFAULT_ROOT,
            help="directory of all files that athanor writes, or URL of an object store (default: %(default)s)",
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", default="embedded", help="name of a recipe, or path of a YAML file (default: %(default)s)"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="A.B=VALUE",
        action="append",
        default=[],
        help="change one setting of the recipe; repeatable",
    )


def _positive(text: str) -> int:
    """Return a whole number of 1 or more; another text is an error of the command line."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _not_negative(text: str) -> float:
    """Return a number of 0 or more; another text is an error of the command line."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return number


def _load(command: Command) -> Callable[[argparse.Namespace], int]:
    """Import and return the function of a command.

    Its libraries take seconds to import. A server that the command needs starts in the meantime.
    """
    gc.disable()  # saves a seventh of the import time
    try:
        if command.starts_prefect:
            _function("flows.pipeline.temporary_server:start_early")()
        return _function(command.run)
    finally:
        gc.enable()
        gc.freeze()  # otherwise the collection at interpreter exit visits all imported objects, for two seconds


def _function(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def _log_to_file(root: Path) -> Path:
    path = root / "logs" / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    with contextlib.suppress(FileNotFoundError):  # another command may remove the same
        # By the time of the last line, so that a long run that goes on keeps its log.
        for old in sorted(path.parent.glob("run-*.log*"), key=os.path.getmtime)[: -_KEPT_LOGS + 1]:
            old.unlink()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); choose another root") from error
    handler.setFormatter(PrintableLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.raiseExceptions = False  # on a full disk every line of the log would print a traceback
    root_logger = logging.getLogger()
    root_logger.setLevel(logging.INFO)
    root_logger.addHandler(handler)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it writes one line per call to Prefect's server
    warnings = logging.StreamHandler(sys.stderr)
    warnings.setLevel(logging.WARNING)
    warnings.setFormatter(FirstLines())
    warnings.addFilter(lambda record: record.name.startswith("athanor") and record.levelno < logging.ERROR)
    root_logger.addHandler(warnings)
    return path


def _why(error: Exception, root: Path, log_path: Path | None) -> tuple[int, str]:
    """Return the exit status and the one-line message of an unexpected error."""
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return EXIT_INPUT, f"{shown(error.filename)}: {error.strerror}"
    if isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError) and error.filename:
        return EXIT_INPUT, f"{shown(error.filename)} is in the way ({error.strerror}); move it away"
    if type(error).__name__ == "StageStopped":  # by name, since its heavy module may not be imported
        return EXIT_STOPPED, first_line(error)
    if log_path and not log_path.exists():
        return EXIT_FAILED, f"--root {root} was deleted during the run; the same command starts again"
    # On a full disk, Prefect's database or the trainer may fail first, with an error that does not mention the disk.
    free = shutil.disk_usage(root).free if root.exists() else _SPACE_LEFT
    if (is_ours := free < _SPACE_LEFT) or os.strerror(errno.ENOSPC) in str(error):
        full = f"the disk of --root {root} is full" if is_ours else f"a disk is full, perhaps that of --root {root}"
        room = "make room, and the same command resumes from the finished work"
        return EXIT_FAILED, f"{full} ({free / 1e6:.1f} MB are free); {room} ({first_line(error)})"
    if os.strerror(errno.EMFILE) in str(error):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = f"{soft} are too few; `ulimit -n 4096`, and the same command resumes"
        return EXIT_FAILED, f"a process ran out of open files: {room} ({first_line(error)})"
    try:
        check_prefect_database(prefect_home(root))
    except InputError as ruin:  # the server answers such a database's users with status 500
        return EXIT_INPUT, str(ruin)
    addresses = [name for name in ("PREFECT_API_URL", "HF_ENDPOINT") if name in os.environ]
    if type(error).__module__.startswith("httpx") and addresses:
        return EXIT_FAILED, f"{first_line(error)}: nothing answers at the address in {' or '.join(addresses)}"
    where = f"log: {log_path}" if log_path else "--debug shows where in the code"
    return EXIT_FAILED, f"{first_line(error)} ({where})"


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return without_middle(" ".join(str(error).splitlines()), LONGEST_LINE)  # a name in it may have a line break


def _say_error(text: str, debug: bool) -> None:
    if debug:
        print(printable(traceback.format_exc()), end="", file=sys.stderr)
    print(f"athanor: {without_middle(printable(text), LONGEST_LINE)}", file=sys.stderr, flush=True)


def _stopped(signum: int, error: BaseException | None) -> int:
    """Say that the command was stopped, and what its training has saved, and return the exit status. A later SIGTERM
    would interrupt the exit."""
    with contextlib.suppress(ValueError):  # raised outside the main thread
        signal.signal(signal.SIGTERM, lambda *_: None)
    while error is not None and not hasattr(error, "__notes__"):  # a task notes it on the exception that stopped it
        error = error.__context__
    saved = "" if error is None else f", {error.__notes__[0]}"
    _say_error(f"stopped{saved}; the same command resumes from the finished work", False)
    return 128 + signum


def _sigterm_handler() -> Callable[[int, object], None]:
    """Return a handler that raises Terminated, though not twice within seconds: that would interrupt the clean-up."""
    raised = -_CLEANING_SECONDS

    def terminate(_signal: int, _frame: object) -> None:
        nonlocal raised
        if time.monotonic() - raised >= _CLEANING_SECONDS:
            raised = time.monotonic()
            raise Terminated

    return terminate


if __name__ == "__main__":
    sys.exit(main())
