"""A worker of the answer stage: one process, one GPU. The launcher starts it with torchrun's variables.

    torchrun ... -m stages.answer.worker job.json

Workers do not communicate: each answers its share of the parts and ends.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from stages.answer.parts import AnswerJob, answer_parts
from trainer.contract.names import EXIT_INPUT

REFUSED = "refused.txt"  # in the directory of job.json: one line with the reason why a worker refused its job


def main(argv: Sequence[str]) -> int:
    """Answer this worker's share, and return the exit status."""
    os.umask(0o077)  # on a cluster no flow is the parent process; only the owner may read a root
    parser = argparse.ArgumentParser(prog="python -m stages.answer.worker")
    parser.add_argument("job_json", type=Path, help="an AnswerJob, written by the answer stage")
    path = parser.parse_args(argv).job_json
    job = AnswerJob.model_validate_json(path.read_text(encoding="utf-8"))
    worker, local, workers = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))

    def say(answered: int) -> None:
        print(f"worker {worker} of {workers}: {answered} more answers", flush=True)

    try:
        if job.config.engine == "vllm":
            _see_one_gpu(local)
        answer_parts(job, worker, workers, local, say)
    except InputError as error:
        write_text(path.parent / REFUSED, str(error))
        print(error, file=sys.stderr)
        return EXIT_INPUT
    return 0


def _see_one_gpu(local: int) -> None:
    """Make only one of the host's GPUs visible, before CUDA is first used: vLLM has no argument for it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible != [""] and local >= len(visible):
        raise InputError(
            f"worker {local} of this host has no GPU: CUDA_VISIBLE_DEVICES={','.join(visible)}; lower "
            "execution.cluster.processes"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = str(local) if visible == [""] else visible[local]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
