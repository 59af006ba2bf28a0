"""The server's process: loads the models, listens, and prints how to reach it."""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from dataset_builders.errors import MANIFEST
from flows.prefect_server.access import SERVE_KEY, Address, serve_login
from flows.serve.application import make_app
from flows.serve.hang_up import ClosingProtocol
from flows.serve.served_model import LocalModel, ServedModel
from flows.serve.vllm_model import start_vllm
from flows.serve.votes import Votes
from stages.answer.greedy_decoder import PoolLimits
from stages.inputs.hf_directory import resolve_hf_dir

_STOP_SECONDS = 3  # for answers that are being generated when the server is stopped


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to serve, and the name by which requests call it."""

    name: str
    hf_dir: Path
    adapter_dir: Path | None


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of a server.

    Attributes:
        engine: transformers or vllm.
        limits: of one model's batch.
        queue: the number of requests that may wait.
        most_tokens: the limit of an answer's length.
        context: the limit of a prompt and its answer together, in tokens.
        directory: directory of the service's files, which holds the password.
    """

    host: str
    port: int
    engine: str
    limits: PoolLimits
    queue: int
    most_tokens: int
    context: int
    votes_path: Path
    directory: Path


def sources_of(models: Sequence[str], adapter_dir: Path | None) -> list[ModelSource]:
    """Return the models to serve.

    Args:
        models: directories or hub names.
        adapter_dir: a PEFT directory with an adapter for the last model.
    """
    sources: list[ModelSource] = []
    for number, model in enumerate(models):
        hf_dir = resolve_hf_dir(model)
        adapter = adapter_dir if number == len(models) - 1 else None
        name = served_name(model, hf_dir) + (f"+{adapter.resolve().name}" if adapter else "")
        if any(name == other.name for other in sources):
            name += "-2"
        sources.append(ModelSource(name, hf_dir, adapter))
    return sources


def served_name(model: str, hf_dir: Path) -> str:
    """Return a model's name: the hub's, the stage and fingerprint of an artifact, or else the directory's."""
    if (hf_dir.parent / MANIFEST).is_file():
        return f"{hf_dir.parent.parent.name}-{hf_dir.parent.name[:8]}"
    return model if not Path(model).is_dir() and "://" not in model else hf_dir.name


def run_server(sources: Sequence[ModelSource], settings: ServeSettings) -> int:
    """Serve the models until a signal arrives, and return the exit status.

    Raises:
        InputError: a model cannot be loaded, or the file of votes or the password's file cannot be used.
        StartFailed: vLLM did not start.
    """
    address = Address(settings.host)
    login, path = serve_login(settings.directory)
    votes = Votes(settings.votes_path)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        start = time.monotonic()
        models = _load(sources, settings, stack)
        places = settings.limits.rows * len(models) + settings.queue
        app = make_app(models, votes, places, settings.most_tokens, login, address.names())
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http=ClosingProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        lines = [
            f"ready after {time.monotonic() - start:.1f} s: {', '.join(model.name for model in models)}",
            f"page:    {address.url(settings.port)}",
            f"OpenAI:  base_url={address.url(settings.port)}/v1",
            tell_login(login, path, sys.stdout.isatty()),
            f"votes:   {votes.path}",
            "Ctrl-C stops the server",
        ]
        _Server(config, lines).run()
    print("stopped", flush=True)
    return 0


def tell_login(login: str, path: Path | None, is_terminal: bool) -> str:
    """Return the line that says how to log in. It shows the password only on a terminal, as others may read a log."""
    user, _, password = login.partition(":")
    if path is None:
        return f"log in:  user {user}, the password (and API key) is ${SERVE_KEY}"
    shown = f"{password} (kept in {path})" if is_terminal else f"what follows the colon in {path}"
    return f"log in:  user {user}, the password (and API key) is {shown}"


def _load(
    sources: Sequence[ModelSource], settings: ServeSettings, stack: contextlib.ExitStack
) -> Sequence[ServedModel]:
    if settings.engine == "vllm":
        return start_vllm(
            [(source.name, source.hf_dir) for source in sources], settings.limits.rows, settings.directory, stack
        )
    models = []
    for source in sources:
        print(f"loading {source.name} from {source.hf_dir}", flush=True)
        models.append(LocalModel(source.name, source.hf_dir, source.adapter_dir, settings.limits, settings.context))
        stack.callback(models[-1].close)
    return models


class _Server(uvicorn.Server):
    """A server that prints lines as soon as it listens."""

    def __init__(self, config: uvicorn.Config, lines: Sequence[str]) -> None:
        super().__init__(config)
        self._lines = lines

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print("\n".join(self._lines), flush=True)
