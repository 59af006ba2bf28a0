"""The sbatch file of a job: the user's header (`header.py`), and sbatch.sh.j2 with the values of the config.

This module checks the paths that stand in `#SBATCH` lines, and quotes everything else for the shell. The file contains
only the names of environment variables: sbatch takes their values from the flow's environment when the file is
submitted.
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
from stages.launchers.slurm.header import read_header
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
