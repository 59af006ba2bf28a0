"""Set up the environment for an NVIDIA GPU (`make gpu`): the packages of constraints-gpu.txt, with Transformer Engine
and FlashAttention 4.

    python infra/gpu_environment.py                      checks this machine, prints the cost, installs into .venv
    python infra/gpu_environment.py --dry-run            checks this machine, prints the cost and the commands
    python infra/gpu_environment.py --image --venv DIR   for a container image: needs no GPU, does not install athanor

PyPI has Transformer Engine's torch extension only as source, so it is compiled here. nvcc and the headers of CUDA,
cuDNN and NCCL come from pip packages of the same versions that torch uses, so a CUDA toolkit on this machine is neither
needed nor used. This script needs only the standard library, because it runs before anything is installed.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
MIN_DRIVER = 580  # the oldest driver for CUDA 13
DISK_GB = 10
JOB_GB = 2.2  # memory of one compiler process; at most 2.14 GB measured for 20 of the extension's 28 files
MINUTES = 10  # time on one core; 427 s measured for those 20 files with g++ 12
# Headers that Transformer Engine includes, below site-packages/nvidia.
HEADERS = (
    *("cu13/include/cuda_runtime.h", "cu13/include/cublas_v2.h", "cu13/include/cusparse.h"),
    *("cu13/include/cusolverDn.h", "cu13/include/nvtx3/nvToolsExt.h", "cu13/include/cccl/nv/target"),
    *("cudnn/include/cudnn.h", "nccl/include/nccl.h"),
)
CUDA_PACKAGES = ("torch", "cuda-toolkit[cccl,nvcc]", "nvidia-cuda-crt", "nvidia-nvvm")
BUILD_PACKAGES = ("setuptools>=77", "wheel", "ninja", "packaging")


def read_pins(path: Path) -> dict[str, str]:
    """Return normalized name -> pinned line `name==version` of a constraints file."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {normalized(line.partition("==")[0]): line for line in lines if "==" in line}


def normalized(name: str) -> str:
    """Return a distribution's name in the form in which pip compares names."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def merged_pins(repo: Path = REPO) -> dict[str, str]:
    """Return the pins of a GPU environment: constraints-gpu.txt, and constraints.txt for every other package."""
    return read_pins(repo / "constraints.txt") | read_pins(repo / "constraints-gpu.txt")


def find_gpus() -> list[tuple[str, str]]:
    """Return (name, driver version) of every NVIDIA GPU that nvidia-smi lists."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [(row[0].strip(), row[1].strip()) for row in rows if len(row) == 2]


def missing_parts(venv: Path, gpus: list[tuple[str, str]]) -> list[str]:
    """Return one line per part that this machine lacks: the part, and the way to get it."""
    compiler = os.environ.get("CXX", "c++")
    python_header = Path(sysconfig.get_path("include"), "Python.h")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    place = next(parent for parent in (venv, *venv.resolve().parents) if parent.exists())
    free_gb = shutil.disk_usage(place).free / 1e9
    old = next((driver for _, driver in gpus if int(driver.split(".")[0]) < MIN_DRIVER), None)
    found = {
        f"a C++ compiler ({compiler}): apt-get install g++, or name one in CXX": shutil.which(compiler),
        f"Python's headers ({python_header}): apt-get install {python}-dev": python_header.is_file(),
        f"{DISK_GB} GB of disk for {venv} ({free_gb:.1f} GB are free): free some, or name another place with --venv": (
            free_gb >= DISK_GB
        ),
        f"a driver for CUDA 13 ({old} is installed): update it to {MIN_DRIVER} or newer": old is None,
    }
    return [line for line, is_there in found.items() if not is_there]


def missing_headers(site: Path) -> list[str]:
    """Return one line per header or program of CUDA that is missing in site-packages after the installation."""
    return [
        f"{site / 'nvidia' / name}: torch came from an index without its CUDA build; unset PIP_INDEX_URL, "
        f"PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS, delete {site.parents[2]} and run the same command again"
        for name in ("cu13/bin/nvcc", *HEADERS)
        if not (site / "nvidia" / name).is_file()
    ]


def max_jobs(cores: int, free_gb: float) -> int:
    """Return the number of compiler processes that the cores and the free memory allow at the same time."""
    return max(1, min(cores, int(free_gb / JOB_GB)))


def build_environment(site: Path) -> dict[str, str]:
    """Return the variables with which Transformer Engine's build finds nvcc, the headers and ninja."""
    nvidia = site / "nvidia"
    includes = [nvidia / "cudnn/include", nvidia / "nccl/include", nvidia / "cu13/include/cccl"]
    old_includes = filter(None, [os.environ.get("CPLUS_INCLUDE_PATH")])
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free_gb = int(available[1]) / 1e6 if available else 0.0
    return {
        "CUDA_HOME": str(nvidia / "cu13"),
        "CPLUS_INCLUDE_PATH": os.pathsep.join([*map(str, includes), *old_includes]),
        "PATH": os.pathsep.join([str(site.parents[2] / "bin"), os.environ.get("PATH", os.defpath)]),
        "MAX_JOBS": os.environ.get("MAX_JOBS") or str(max_jobs(os.cpu_count() or 1, free_gb)),
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # otherwise its setup.py first looks for a binary outside of PyPI
    }


def commands(venv: Path, image: bool) -> list[list[str]]:
    """Return the three commands: install torch and the build's packages; install Transformer Engine and FlashAttention
    4 (with athanor); check that the first can be imported, because the other needs a GPU for that."""
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-c", str(venv / "constraints.txt")]
    what = ["transformer-engine[pytorch]", "flash-attn-4[cu13]"] if image else ["-e", ".[gpu]"]
    return [
        [*pip, *CUDA_PACKAGES, *BUILD_PACKAGES],
        [*pip, "--no-build-isolation", *what],
        [python, "-c", "import torch, transformer_engine.pytorch; print('torch', torch.__version__)"],
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=REPO / ".venv")
    parser.add_argument("--image", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    gpus = find_gpus()
    if not gpus and not args.image:
        print("make gpu: nvidia-smi lists no NVIDIA GPU on this machine; `make run` needs none", file=sys.stderr)
        return 2
    missing = missing_parts(args.venv, gpus)
    for line in missing:
        print(f"make gpu: missing {line}", file=sys.stderr)
    if missing:
        return 2
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = args.venv / "lib" / version / "site-packages"
    environment = build_environment(site)
    print(cost(gpus, args.venv, environment["MAX_JOBS"]), flush=True)
    if args.dry_run:
        print("\n".join(shlex.join(command) for command in commands(args.venv, args.image)))
        return 0
    return install(args.venv, site, environment, args.image)


def cost(gpus: list[tuple[str, str]], venv: Path, jobs: str) -> str:
    """Return lines for a terminal about the installation: the versions, and the disk and time that it takes."""
    pins = merged_pins()
    return f"""\
{gpus[0][0] if gpus else "no GPU here"}; Python {sys.version.split()[0]}; into {venv}:
  {pins["torch"]}, {pins["triton"]}, {pins["transformers"]}, {pins["megatron-core"]}, {pins["transformer-engine"]},
  {pins["flash-attn-4"]}
  disk: {DISK_GB} GB
  Transformer Engine: {MINUTES} minutes of one core to compile; {jobs} processes (MAX_JOBS) of up to {JOB_GB:g} GB"""


def install(venv: Path, site: Path, environment: dict[str, str], image: bool) -> int:
    """Make the environment if it is missing, install everything, and mark it as set up for a GPU.

    Returns:
        the exit status: 0 success, 1 a command failed, 2 a part is missing.
    """
    if not (venv / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (venv / "constraints.txt").write_text("".join(f"{pin}\n" for pin in merged_pins().values()))
    for number, command in enumerate(commands(venv, image)):
        if number == 1 and (missing := missing_headers(site)):
            print("\n".join(f"make gpu: missing {line}" for line in missing), file=sys.stderr)
            return 2
        code = subprocess.run(command, cwd=REPO, env={**os.environ, **environment}).returncode
        if code:
            print(f"make gpu: failed at: {shlex.join(command)}", file=sys.stderr)
            return 1
    (venv / ".installed").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
