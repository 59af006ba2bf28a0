"""The operations that the host dispatches in a training step, by part of the step, counted on a CPU.

    python -m tests.bench.bench_step_operations

A small operation costs a GPU's host some 5 to 20 us, as much as the GPU takes for many of them, so their number says
where a GPU can wait for its host. The models are the tests' tiny ones: their layers are few, but their parameters are
as many small tensors as those of a large model with as many layers. torch's Adam, which updates parameters one by one
on a CPU, is a part of its own, because GPUs have another.
"""

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.run_dir import changed, write_job
from tests.helpers.single_rank import single_rank
from trainer.contract.adapter import AdapterConfig
from trainer.loop import interval, set_up, train

PARTS = ("data", "vision", "language", "gradients", "optimizer", "Adam", "between steps")
CASES = {
    "all weights": ("first", None),
    "adapters": ("first", AdapterConfig(rank=4, alpha=8)),
    "experts, all weights": ("experts-shared", None),
}
COUNTED = 3  # the step, from 1


class Operations(TorchDispatchMode):
    """A mode that counts operations by part."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.part = PARTS[-1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[self.part] += 1
        return func(*args, **(kwargs or {}))

    def switch(self, part: str | None) -> None:
        """Begin a part of the step."""
        self.part = part or PARTS[-1]

    def within(self, part: str, function: Callable) -> Callable:
        """Return the function, whose operations are a part of their own."""

        def counted(*args, **kwargs):
            outer, self.part = self.part, part
            result = function(*args, **kwargs)
            self.part = outer
            return result

        return counted


def count(root: Path, shape: str, adapter: AdapterConfig | None) -> Counter[str]:
    """Return the operations of one step by part."""
    run = write_job(root, num_steps=COUNTED + 1, shape=shape)
    run = changed(run, train=run.train.model_copy(update={"heldout_interval": 1000, "adapter": adapter}))
    operations, steps, add_step = Operations(), train._steps, interval.Interval.add_step
    counts: list[Counter[str]] = []

    def stepping(trainer, *args):
        trainer.chunks[0].module.clock.on_switch = operations.switch
        with operations:
            return steps(trainer, *args)

    def adding(*args):
        counts.append(operations.counts)
        operations.counts = Counter()
        add_step(*args)

    finalize = operations.within("gradients", set_up.finalize_gradients)
    adam = operations.within("Adam", torch.optim.AdamW.step)
    with (
        patch.object(train, "_steps", stepping),
        patch.object(interval.Interval, "add_step", adding),
        patch.object(set_up, "finalize_gradients", finalize),
        patch.object(torch.optim.AdamW, "step", adam),
        single_rank() as mesh,
    ):
        train.train(run, mesh)
    return counts[COUNTED]


def main() -> None:
    print(f"| | {' | '.join(PARTS)} | all but Adam |")
    print("| --- |" + " ---: |" * (len(PARTS) + 1))
    for name, (shape, adapter) in CASES.items():
        with tempfile.TemporaryDirectory() as root:
            counts = count(Path(root), shape, adapter)
        cells = [f"{counts[part]:,}" for part in PARTS]
        print(f"| {name} | {' | '.join(cells)} | {counts.total() - counts['Adam']:,} |", flush=True)


if __name__ == "__main__":
    main()
