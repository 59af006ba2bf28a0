r"""Dockerfile.data, built by buildah without a Docker engine, and the services of compose.yaml in the image.

    python -m tests.bench.bench_image --base debian-python:3.11 --out image.md        # as root; minutes
    python -m tests.bench.bench_image --image athanor-data:0.1.0                       # an image that is there

It prints the size and the layers, then starts in containers of the image, as the image's user: a run of the default
recipe with few steps, `athanor up`, and each service's command with its environment and its health check, against a
Postgres and an S3 server of this machine. Containers share this machine's network, so ports are free ones.

A base of Debian's own packages, for a place without a registry:

    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm rootfs
    chroot rootfs python3 -m venv /usr/local
    c=$(buildah from scratch); buildah copy $c rootfs /; buildah commit --format docker $c debian-python:3.11
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.bench.command import make_parser, print_report, table_head, table_row
from tests.helpers.compose_file import INFRA, load_compose, read_env_file
from tests.helpers.object_store import KEYS, free_port, moto_server
from tests.helpers.postgres import postgres_server
from tests.helpers.service import answers

REPO = INFRA.parent
BUILDAH = {"STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}
SETTINGS = ("train.num_steps=20", "train.optim.warmup_steps=2", "data.num_scans=300", "data.num_multi=40")
SETTINGS += ("data.num_pairs=40", "data.num_texts=40")
RUN = ["athanor", "run", "--root", "/athanor/root", *(f"--set={setting}" for setting in SETTINGS)]
VALUES = {name: f"value-of-{name.lower()}" for name in read_env_file(INFRA / "env.example")}
VALUES |= {"PREFECT_AUTH": "athanor:a-password"}
EMPTY = "MLFLOW_ALLOWED_HOSTS PREFECT_UI_API_URL ATHANOR_ROOT PREFECT_UI_ORIGIN PREFECT_ALLOWED_HOSTS ATHANOR_DATA_DIRS"
EMPTY += " ATHANOR_DATA_STORES ATHANOR_CACHE_GB ROOT_VOLUME DATA_IMAGE HF_TOKEN BIND"
VALUES |= dict.fromkeys(EMPTY.split(), "")
PORTS = ("4200", "5000", "8080")


def buildah(*words: str) -> str:
    """Return the output of a command of buildah."""
    done = subprocess.run(["buildah", *words], env=os.environ | BUILDAH, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"buildah {shlex.join(words)}: {done.stderr[-2000:]}")
    return done.stdout.strip()


def build(args: argparse.Namespace) -> float:
    """Build the image, with the output on this process's own, and return the seconds."""
    start = time.monotonic()
    words = [
        "buildah",
        "bud",
        *["--format", "docker", "--layers", "--no-cache", "-f", "infra/Dockerfile.data", "-t"],
        args.image,
    ]
    words += ["--build-arg", f"BASE={args.base}"] if args.base else []
    words += [word for volume in args.volume for word in ("--volume", volume)]
    subprocess.run([*words, "."], env=os.environ | BUILDAH, cwd=REPO, check=True)
    return time.monotonic() - start


def layers_of(image: str) -> list[tuple[str, float]]:
    """Return the command and the MB of each layer of an image, the base first."""
    about = json.loads(buildah("inspect", "--type", "image", image))
    ids = [found.removeprefix("sha256:") for found in about["OCIv1"]["rootfs"]["diff_ids"]]
    stored = json.loads(Path("/var/lib/containers/storage/overlay-layers/layers.json").read_text())
    stored = [layer for layer in stored if "diff-digest" in layer]
    sizes = {layer["diff-digest"].removeprefix("sha256:"): layer["diff-size"] / 1e6 for layer in stored}
    made = [entry["created_by"] for entry in about["OCIv1"]["history"] if not entry.get("empty_layer")]
    texts = [
        " ".join(text.removeprefix("/bin/sh -c ").removeprefix("#(nop) ").replace("pip install", "pip").split())[:70]
        for text in made
    ]
    return [(text, sizes.get(name, 0.0)) for text, name in zip(texts, ids)]


class Containers:
    """Containers of an image, each for one command; all end with the block."""

    def __init__(self, image: str, folder: Path) -> None:
        self.image, self.folder, self.started = image, folder, []

    def __enter__(self) -> "Containers":
        return self

    def __exit__(self, *_: object) -> None:
        for name, process in self.started:
            self.end(process)
            buildah("rm", name)

    def command(self, words: Sequence[str], environment: Mapping[str, str], volumes: Sequence[str] = ()) -> list[str]:
        """Return the command that runs words in a new container."""
        name = buildah("from", "--pull-never", self.image)
        self.started.append((name, None))
        options = [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
        options += [word for volume in volumes for word in ("--volume", volume)]
        return ["buildah", "run", *options, name, "--", *words]

    def start(self, name: str, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
        """Start words in a container; the output goes to NAME.log."""
        command = self.command(words, environment)
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | BUILDAH, start_new_session=True
            )
        self.started[-1] = (self.started[-1][0], process)
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    @staticmethod
    def end(process: subprocess.Popen | None) -> None:
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def await_true(is_there: Callable[[], bool], seconds: float, what: str, process: subprocess.Popen, log: Path) -> float:
    """Return the seconds until a condition holds."""
    start = time.monotonic()
    while not is_there():
        if process.poll() is not None or time.monotonic() - start > seconds:
            raise RuntimeError(f"{what} is not there; its log ends with\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)
    return time.monotonic() - start


def try_by_itself(containers: Containers) -> list[tuple[str, str]]:
    """Run the default recipe with few steps, and `athanor up`. Return (what, outcome)."""
    start = time.monotonic()
    done = subprocess.run(
        containers.command(RUN, {}), env=os.environ | BUILDAH, capture_output=True, text=True, cwd=containers.folder
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])
    (line,) = (line for line in done.stdout.splitlines() if " stages made, " in line)
    rows = [("athanor run, 20 steps", f"{line} {time.monotonic() - start:.0f} s with the start")]
    process = containers.start("up", ["athanor", "up", "--root", "/athanor/root"], {"PYTHONUNBUFFERED": "1"})
    log = containers.log("up")
    await_true(lambda: "ready after" in log.read_text(errors="replace"), 600, "athanor up", process, log)
    (line,) = (line for line in log.read_text(errors="replace").splitlines() if line.startswith("ready after"))
    children = psutil.Process(process.pid).children(recursive=True)
    ups = [one for one in children if one.cmdline()[2:3] == ["up"] and "python" in one.cmdline()[0]]
    up = min(ups, key=psutil.Process.create_time)  # it forks
    up.send_signal(signal.SIGINT)  # to the command itself: buildah would kill it
    return [*rows, ("athanor up", f"{line.partition(';')[0]}; exit status {process.wait(120)} after Ctrl-C")]


def try_services(containers: Containers) -> list[tuple[str, str]]:
    """Start each service of compose.yaml that has the image. Return (service, outcome)."""
    services: dict[str, Any] = load_compose("compose.yaml", VALUES)["services"]
    rows = []
    with postgres_server() as postgres, moto_server() as store:
        postgres.make_databases(VALUES)
        ports = {port: str(free_port()) for port in PORTS}
        hosts = {"postgres:5432": f"127.0.0.1:{postgres.port}", "http://s3:7070": store}
        hosts |= {
            f"http://{name}:{port}": f"http://127.0.0.1:{ports[port]}"
            for name, port in (("prefect", "4200"), ("mlflow", "5000"))
        }
        hosts |= {f"127.0.0.1:{port}": f"127.0.0.1:{own}" for port, own in ports.items()}

        def here(text: str) -> str:
            for name, place in hosts.items():
                text = text.replace(name, place)
            text = ports.get(text, text).replace("--port=4200", f"--port={ports['4200']}")
            return text.replace("/infra/", "/tmp/infra/")

        def settings(name: str) -> dict[str, str]:
            own = {key: here(value) for key, value in services[name]["environment"].items()}
            own |= {key: value for key, value in KEYS.items() if key in own}
            own |= {"PREFECT_SERVER_DATABASE_HOST": "127.0.0.1", "PREFECT_SERVER_DATABASE_PORT": str(postgres.port)}
            own |= {"PREFECT_WORKER_WEBSERVER_PORT": ports["8080"]} if name == "worker" else {}
            return own | ({"MLFLOW_SERVER_ALLOWED_HOSTS": "127.0.0.1:*"} if name == "mlflow" else {})

        def command(name: str) -> list[str]:
            files = ("make_buckets.py", "mlflow_auth.ini")
            puts = [f"cat > /tmp/infra/{file} <<'END'\n{here((INFRA / file).read_text())}\nEND" for file in files]
            words = shlex.join([here(word) for word in services[name]["command"]])
            return ["bash", "-c", "\n".join(["mkdir -p /tmp/infra", *puts, f"exec {words}"])]

        words = containers.command(command("buckets"), settings("buckets"))
        done = subprocess.run(words, env=os.environ | BUILDAH, capture_output=True, text=True)
        rows.append(("buckets", done.stderr[-500:] if done.returncode else " and ".join(done.stdout.split("\n")[:2])))
        for name, url in (("prefect", "4200/api/health"), ("mlflow", "5000/health"), ("worker", "8080/health")):
            port, _, rest = url.partition("/")
            process, log = containers.start(name, command(name), settings(name)), containers.log(name)
            address = f"http://127.0.0.1:{ports[port]}/{rest}"
            seconds = await_true(partial(answers, address), 300, name, process, log)
            check = containers.command([here(word) for word in services[name]["healthcheck"]["test"][1:]], {})
            healthy = subprocess.run(check, env=os.environ | BUILDAH, capture_output=True).returncode == 0
            told = f"compose.yaml's own check {'passes' if healthy else 'FAILS'}"
            rows.append((name, f"{seconds:.0f} s to its health; {told}"))
    return rows


def main(argv: Sequence[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--image", help="an image that is there; without it Dockerfile.data is built")
    parser.add_argument("--base", help="base image for the build")
    parser.add_argument("--volume", action="append", default=[], help="as buildah bud --volume, for pip's files")
    parser.add_argument("--out", type=Path, help="the report, Markdown")
    args = parser.parse_args(argv)
    seconds, is_built = 0.0, args.image is None
    args.image = args.image or "localhost/athanor-data:0.1.0"
    seconds = build(args) if is_built else 0.0
    layers = layers_of(args.image)
    version = buildah("--version")
    with tempfile.TemporaryDirectory() as folder, Containers(args.image, Path(folder)) as containers:
        rows = try_by_itself(containers) + try_services(containers)
    lines = [f"# Dockerfile.data by {version}", f"    {shlex.join(['python', '-m', 'tests.bench.bench_image', *argv])}"]
    lines.append(f"Built in {seconds:.0f} s." if is_built else "Built before.")
    lines.append(f"{sum(size for _, size in layers) / 1e3:.2f} GB in {len(layers)} layers:")
    sizes = [table_row([f"`{text}`", f"{mb:,.1f}"]) for text, mb in layers]
    lines.append("\n".join([table_head(["layer"], ["MB"]), *sizes]))
    lines.append("\n".join([table_head(["in the image", "outcome"]), *map(table_row, rows)]))
    print_report("\n\n".join(lines), args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
