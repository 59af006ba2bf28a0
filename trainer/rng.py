"""The random number generators' states in a checkpoint.

Nothing in a training step draws a random number today; what will (dropout) is to go on where it stopped. The states are
rank 0's, so that every layout can load them: what ranks share is restored on every rank, and on tensor-parallel rank 0
also the generators of what tensor-parallel ranks divide. On the others these stay as they were seeded: with rank 0's
states they would draw rank 0's numbers for slices of their own.
"""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import random as tensor_parallel_random


def capture() -> dict[str, Any]:
    """The states of this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel_random.get_cuda_rng_tracker().get_states(),
    }


def restore(saved: dict[str, Any], tp_rank: int) -> None:
    """Set the states that `capture` returned on rank 0, whatever its layout. A device's go to its own kind only."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["device"].shape != torch.cuda.get_rng_state().shape:  # a CPU's generator is not a GPU's
        return
    tensor_parallel_random._set_cuda_rng_state(saved["device"])
    tracker = tensor_parallel_random.get_cuda_rng_tracker()
    shared = tensor_parallel_random.get_data_parallel_rng_tracker_name()
    fitting = saved["tracker"] if tp_rank == 0 else {shared: saved["tracker"][shared]}
    tracker.set_states({**tracker.get_states(), **fitting})
