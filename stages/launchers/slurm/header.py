"""The user's sbatch header, execution.cluster.job_file: `#SBATCH` lines, and lines of bash.

    #SBATCH --partition=gpu --account=research --time=2-00:00:00
    #SBATCH --gpus-per-node=8
    module load cuda/12.8                              # runs on the first node, before srun
    container=(apptainer exec --nv /images/train.sif)  # words between srun and the command
    python=python                                      # interpreter on the nodes; otherwise the flow's
    address=10.0.0.1                                   # where the ranks meet; otherwise the first node's name

Only the options that athanor depends on are checked. sbatch checks the others.
"""

import re

from dataset_builders.errors import InputError
from stages.launchers.config import JOB_FILES, ClusterConfig
from stages.launchers.job import read_job_file

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
