"""The trainer with saves that stop at a given point until they are released.

`python -m tests.helpers.held_writer run.json [PLACE]`: the save of step 3 stops at this point, reports that by the file
`held-step-000003` in the output directory, and waits for the file `write-step-000003`.

    copy      before the state is copied; training waits
    file      in the middle of the file, after some tensors; training continues
    publish   after the last byte, before the record is written and the directory renamed; training waits
    delete    after the rename, before a checkpoint that is not kept is deleted; its own step is the one in the names
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import directory, saver
from trainer.contract.run import RunConfig
from trainer.loop import train
from trainer.loop.job import run_file

TENSORS_BEFORE = 5
PLACES = ("copy", "file", "publish", "delete")


def release(run: RunConfig, step: int) -> None:
    """Let the save of a step continue, now or as soon as it starts."""
    (run.output_dir / f"write-step-{step:06d}").touch()


def is_held(run: RunConfig, step: int) -> bool:
    return (run.output_dir / f"held-step-{step:06d}").is_file()


class HeldSaver(saver.Checkpointer):
    """A saver that records which save is running, for the points at which saves stop."""

    newest: "HeldSaver"

    def save(self, step: int) -> None:
        self.finish()
        HeldSaver.newest, self.name, self.entries = self, f"step-{step:06d}", 0
        super().save(step)

    def wait(self, name: str) -> None:
        out = self._directory.parent
        (out / f"held-{name}").touch()
        while not (out / f"write-{name}").exists():
            time.sleep(0.01)


def _before(owner: object, name: str) -> None:
    function = getattr(owner, name)

    def held(*args, **kwargs):
        HeldSaver.newest.wait(args[0].name if name == "delete" else HeldSaver.newest.name)
        return function(*args, **kwargs)

    setattr(owner, name, held)


def _in_the_middle(write: Callable) -> Callable:
    def held(transforms, stream, *args, **kwargs):
        HeldSaver.newest.entries += 1
        if HeldSaver.newest.entries == TENSORS_BEFORE:
            stream.flush()
            HeldSaver.newest.wait(HeldSaver.newest.name)
        return write(transforms, stream, *args, **kwargs)

    return held


def main() -> int:
    """Run the trainer with its saves stopped at a point."""
    place = sys.argv[2] if len(sys.argv) > 2 else "file"
    if place == "file":
        saver.write_entry = _in_the_middle(saver.write_entry)
    else:
        owners = {
            "copy": (saver.HostMemory, "copy"),
            "publish": (saver, "write_checkpoint_record"),
            "delete": (directory, "delete"),
        }
        _before(*owners[place])
    train.Checkpointer = HeldSaver
    return run_file(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
