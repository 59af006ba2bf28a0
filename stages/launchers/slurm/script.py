"""The sbatch file of a job: sbatch.sh.j2 with the values of the config.

SlurmConfig checks the values of `#SBATCH` lines, and this module checks the paths; everything else is quoted for the
shell. The file contains only the names of environment variables: sbatch takes their values from the flow's environment
when the file is submitted.
"""

import re
import shlex
import sys
from pathlib import Path

import jinja2

from dataset_builders.errors import InputError
from stages.launchers.config import ClusterConfig
from stages.launchers.job import Job, rank_environment
from stages.launchers.rank_logs import ON_RANK
from trainer.contract.names import RESULT_JSON

SBATCH_FILE = "job.sbatch"
END_FILE = "slurm-end"  # "<job id> <exit status>", written by the job at its end
_TEMPLATE = Path(__file__).parent / "sbatch.sh.j2"
_PROJECT = Path(__file__).parents[3]
_ALWAYS = ("PATH", "HOME", "USER", "LANG")
_PATH = re.compile(r"[A-Za-z0-9_.,:@+=/~-]+")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


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
        InputError: a path of the run has a character that an #SBATCH line cannot contain.
    """
    config, run_json = cluster.slurm, Path(job.arguments[-1])
    run_dir = run_dir_of(job)
    for path in (run_dir, job.log_path):
        if not _PATH.fullmatch(str(path)):
            raise InputError(
                f"{path} cannot stand in an sbatch file: use a --root of letters, digits and any of _ . , : @ + = / ~ -"
            )
    python = config.python or ("python" if config.container_image else sys.executable)
    values = {
        "script": run_dir / SBATCH_FILE,
        "options": [*_options(cluster, job), *config.extra],
        "run_dir": run_dir,
        "run_json": run_json,
        "result_json": RESULT_JSON,
        "end_file": END_FILE,
        "environment": _environment(cluster, job),
        "num_threads": cluster.num_threads,
        "setup": config.setup,
        "rendezvous_address": config.rendezvous_address,
        "on_rank": ON_RANK,
        "cpus_per_task": config.cpus_per_task,
        "container": _container(cluster),
        "workdir": config.workdir or ("/" if config.container_image else str(_PROJECT)),
        "python": python,
        "nodes": cluster.nodes,
        "per_node": cluster.processes // cluster.nodes,
        "arguments": shlex.join(job.arguments),
    }
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)


def _options(cluster: ClusterConfig, job: Job) -> list[str]:
    config = cluster.slurm
    gpus = cluster.processes // cluster.nodes if config.gpus_per_node is None else config.gpus_per_node
    values = {
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "reservation": config.reservation,
        "nodelist": config.nodelist,
        "exclude": config.exclude,
        "time": config.time_limit,
        "gpus-per-node": f"{config.gpu_type}:{gpus}" if config.gpu_type and gpus else gpus or None,
        "cpus-per-task": config.cpus_per_task,
        "mem": config.memory,
    }
    return [
        f"--job-name={job_name(job)}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        *(f"--{name}={value}" for name, value in values.items() if value is not None),
        *(["--exclusive"] if config.exclusive else []),
        f"--chdir={run_dir_of(job)}",
        f"--output={job.log_path}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{config.signal_seconds}",
        f"--export={','.join(dict.fromkeys([*_ALWAYS, *config.variables]))}",
    ]


def _environment(cluster: ClusterConfig, job: Job) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(cluster.num_threads)} if cluster.num_threads else {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **rank_environment(cluster, job.name), **threads}


def _container(cluster: ClusterConfig) -> list[str]:
    """Return the arguments between srun's own options and the command; empty without a container."""
    config = cluster.slurm
    if config.container_image is None:
        return []
    if config.container_runtime == "pyxis":
        mounts = [f"--container-mounts={','.join(config.container_mounts)}"] if config.container_mounts else []
        return [f"--container-image={config.container_image}", *mounts]
    binds = [f"--bind={mount}" for mount in config.container_mounts]
    return ["apptainer", "exec", *(["--nv"] if config.gpus_per_node != 0 else []), *binds, config.container_image]
