"""The sbatch file of a job: the user's header, and sbatch.sh.j2 with the values of the config.

The header is execution.cluster.job_file: `#SBATCH` lines, and lines of bash.

    #SBATCH --partition=gpu --account=research --time=2-00:00:00
    #SBATCH --gpus-per-node=8
    module load cuda/12.8                              # runs on the first node, before srun
    container=(apptainer exec --nv /images/train.sif)  # words between srun and the command
    python=python                                      # interpreter on the nodes; otherwise the flow's
    address=10.0.0.1                                   # where the ranks meet; otherwise the first node's name

Only the options that athanor depends on are checked. sbatch checks the others. The paths that stand in `#SBATCH` lines
are checked, and everything else is quoted for the shell. The file contains only the names of environment variables:
sbatch takes their values from the flow's environment when the file is submitted.
"""

import re
import shlex
import sys
from pathlib import Path

import jinja2

from dataset_builders.errors import InputError
from stages.shared.launchers.config import JOB_FILES, ClusterConfig
from stages.shared.launchers.job import ON_RANK, Job, rank_environment, read_job_file
from trainer.contract.names import RESULT_JSON

SBATCH_FILE = "job.sbatch"
END_FILE = "slurm-end"  # "<job id> <exit status>", written by the job at its end
_TEMPLATE = Path(__file__).parent / "sbatch.sh.j2"
_VARIABLES = (  # that the job gets from the flow, unless the header has an --export of its own
    *("PATH", "HOME", "USER", "LANG"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
    *("ATHANOR_CACHE_DIR", "ATHANOR_CACHE_GB", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
)
_PATH = re.compile(r"[A-Za-z0-9_.,:@+=/~-]+")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
SIGNAL = "B:USR1@300"  # 300 seconds before the time limit, the batch script lets the ranks save
# The job is found and followed by what athanor writes for these options.
_OWN = {"array", "chdir", "error", "input", "job-name", "no-requeue", "open-mode", "output", "wait"}
_LONG = {
    **{"a": "array", "D": "chdir", "e": "error", "G": "gpus", "i": "input", "J": "job-name"},
    **{"N": "nodes", "n": "ntasks", "o": "output", "W": "wait"},
}


def read_header(cluster: ClusterConfig) -> tuple[list[str], str, dict[str, str]]:
    """Return the header's `#SBATCH` lines, its bash as one text, and the value of each option by its long name.

    Raises:
        InputError: the file cannot be read, or an option is missing or contradicts the run.
    """
    file, nodes, need = cluster.job_file, cluster.nodes, cluster.per_node
    lines = read_job_file(cluster).splitlines()
    sbatch = [line for line in lines if line.startswith("#SBATCH")]
    asked = {"signal": SIGNAL, **_options(sbatch)}
    for name in sorted(_OWN & asked.keys()):
        raise InputError(f"{file}: athanor itself decides what --{name} sets; remove that option")
    for name, number in {"nodes": nodes, "ntasks": nodes, "ntasks-per-node": 1}.items():
        if asked.get(name, str(number)) != str(number):
            raise InputError(
                f"{file}: --{name}={asked[name]}, but execution.cluster.nodes={nodes} with one task each need {number}"
                "; change one of them, or remove the option"
            )
    if (gpus := _gpus(asked, nodes)) is None or 0 < gpus < need:
        raise InputError(
            f"{file}: a node gets {gpus or 'no'} GPUs, but execution.cluster.processes={cluster.processes} on nodes="
            f"{nodes} need {need}; write #SBATCH --gpus-per-node={need}, or 0 on CPU and where all GPUs of a node come "
            f"by themselves. The file is {JOB_FILES['slurm']}"
        )
    if not re.fullmatch(r"B:USR1@\d+", asked["signal"]):
        raise InputError(f"{file}: --signal={asked['signal']}, but the job saves at USR1; write --signal={SIGNAL}")
    return sbatch, "\n".join(line for line in lines if not line.startswith(("#SBATCH", "#!"))).strip("\n"), asked


def _options(lines: list[str]) -> dict[str, str]:
    options, name = {}, ""
    for word in (word for line in lines for word in line.partition(" #")[0].split()[1:]):
        value = word
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        elif word.startswith("-"):
            name, value = _LONG.get(word[1:2], word[1:2]), word[2:]
        options[name] = value.strip("'\"")
    return options


def _gpus(asked: dict[str, str], nodes: int) -> int | None:
    """Return the number of GPUs per node that the header asks for; None if no option asks for any."""
    for name, share in {"gpus-per-node": 1, "gpus-per-task": 1, "gres": 1, "gpus": nodes}.items():
        entries = [entry for entry in asked.get(name, "").split(",") if name != "gres" or "gpu" in entry.split(":")[0]]
        if any(entries):  # type:number, type or number
            return sum(int(end) if (end := entry.rpartition(":")[2]).isdigit() else 1 for entry in entries) // share
    return None


def run_dir_of(job: Job) -> Path:
    """Return the run's output directory, which contains run.json."""
    return Path(job.arguments[-1]).parent


def job_name(job: Job) -> str:
    """Return the name that squeue shows: athanor-train-<fingerprint>."""
    name = next((part for part in reversed(Path(job.name).parts) if "-" in part), Path(job.name).name)
    return "athanor-" + _NOT_IN_NAMES.sub("-", name)[:60]


def render_sbatch(cluster: ClusterConfig, job: Job) -> str:
    """Return the whole file, ready to be submitted.

    Raises:
        InputError: the header cannot be used, or a path of the run has a character that an #SBATCH line cannot contain.
    """
    header, commands, asked = read_header(cluster)
    run_json = Path(job.arguments[-1])
    run_dir = run_dir_of(job)
    for path in (run_dir, job.log_path):
        if not _PATH.fullmatch(str(path)):
            raise InputError(
                f"{path} cannot stand in an sbatch file: use a --root of letters, digits and any of _ . , : @ + = / ~ -"
            )
    options = {
        "job-name": job_name(job),
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "chdir": run_dir,
        "output": job.log_path,
        "open-mode": "append",
        "signal": asked["signal"],
        "export": asked.get("export", ",".join(_VARIABLES)),
    }
    threads = {"OMP_NUM_THREADS": str(cluster.num_threads)} if cluster.num_threads else {}
    values = {
        "script": run_dir / SBATCH_FILE,
        "header": header,
        "commands": commands,
        "options": options,
        "run_dir": run_dir,
        "run_json": run_json,
        "result_json": RESULT_JSON,
        "end_file": END_FILE,
        "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **rank_environment(cluster, job.name), **threads},
        "num_threads": cluster.num_threads,
        "on_rank": ON_RANK,
        "python": sys.executable,
        "nodes": cluster.nodes,
        "per_node": cluster.per_node,
        "arguments": shlex.join(job.arguments),
    }
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)
