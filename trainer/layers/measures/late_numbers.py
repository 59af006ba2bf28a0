"""Numbers that the host reads when the device has computed them, and not before."""

import torch


class LateNumbers:
    """Numbers on their way to the host. Sending them waits for nothing.

    Args:
        numbers: (n,) of any dtype; nobody changes it afterwards.

    Attributes:
        are_late: whether the device computes them while the host continues. It is equal on all ranks.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.are_late = numbers.is_cuda
        self._numbers = numbers.to("cpu", non_blocking=True)  # from CUDA into page-locked memory
        if self.are_late:
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def tolist(self) -> list[float]:
        """Return the numbers; wait for them."""
        if self.are_late:
            self._arrival.synchronize()
        return self._numbers.tolist()
