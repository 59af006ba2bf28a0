"""The states of the random number generators in a checkpoint.

Dropout draws random numbers, and a resumed training should continue its sequence. The states are those of rank 0, so
that every layout can load them.
"""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import random as tensor_parallel_random

from trainer.libraries.megatron_private import set_device_rng_state


def capture() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel_random.get_cuda_rng_tracker().get_states(),
    }


def restore(saved: dict[str, Any], tp_rank: int) -> None:
    """Set the states that `capture` returned on rank 0 of any layout. A device's state only fits the same kind."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["device"].shape != torch.cuda.get_rng_state().shape:  # a CPU's generator is not a GPU's
        return
    set_device_rng_state(saved["device"])
    tracker = tensor_parallel_random.get_cuda_rng_tracker()
    shared = tensor_parallel_random.get_data_parallel_rng_tracker_name()
    # Only generators that ranks share, except on tensor-parallel rank 0: with rank 0's states, other ranks would draw
    # rank 0's numbers for their own slices of divided weights.
    states = saved["tracker"] if tp_rank == 0 else {shared: saved["tracker"][shared]}
    tracker.set_states({**tracker.get_states(), **states})
