"""Numbers that the host reads when the device has computed them, and not before."""

import torch


class LateNumbers:
    """Numbers on their way to the host, (n,) of any dtype, which nobody changes afterwards. Sending them waits for
    nothing."""

    def __init__(self, numbers: torch.Tensor) -> None:
        # Whether the device computes them while the host continues. It is equal on all ranks.
        self.are_late = numbers.is_cuda
        self._numbers = numbers.to("cpu", non_blocking=True)  # from CUDA into page-locked memory
        if self.are_late:
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def tolist(self) -> list[float]:
        if self.are_late:
            self._arrival.synchronize()
        return self._numbers.tolist()
