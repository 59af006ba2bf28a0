"""The trainer, whose background writers stop in the middle of a file until they are told to go on.

`python -m tests.helpers.held_writer run.json`: the writer of step 3 waits for the file `write-step-000003` in the
output directory.
"""

import functools
import itertools
import os
import sys
import time
from pathlib import Path

from megatron.core.dist_checkpointing.strategies import filesystem_async

from trainer.contract.run import RunConfig
from trainer.loop.job import run_file

TENSORS_BEFORE = 5


def release(run: RunConfig, step: int) -> None:
    """Let the writer of a step go on, now or when it comes."""
    (run.output_dir / f"write-step-{step:06d}").touch()


def main() -> int:
    """Run the trainer with megatron-core's function that writes one tensor made to wait."""
    trainer, written, write = os.getpid(), itertools.count(), filesystem_async._write_item

    @functools.wraps(write)  # megatron-core looks at the signature
    def write_when_told(transforms, stream, *args, **kwargs):
        if os.getpid() != trainer and next(written) == TENSORS_BEFORE:
            stream.flush()
            saving = Path(stream.name).parent
            told = saving.parents[1] / saving.name.replace("saving-", "write-")
            while not told.exists():
                time.sleep(0.01)
        return write(transforms, stream, *args, **kwargs)

    filesystem_async._write_item = write_when_told
    return run_file(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
