"""The loading of transformers models by the stages: without a progress bar, and with unmerged adapters on the linear
layers, where the base weights do not change."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from stages.shared.inputs.adapter_directory import AdapterDirectory
from trainer.contract.peft import ADAPTER_WEIGHTS, LORA_A, LORA_B, MAGNITUDE, PREFIX


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Suppress transformers' progress bars, since a stage has its own."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def add_adapters(model: transformers.PreTrainedModel, adapter: AdapterDirectory) -> None:
    """Add the adapters of a directory to the model's layers, in its dtype and on its device."""
    tensors = {
        name.removeprefix(PREFIX): tensor.to(model.device, model.dtype)
        for name, tensor in load_file(adapter.path / ADAPTER_WEIGHTS).items()
    }
    with torch.no_grad():
        for name in adapter.whole:
            model.get_parameter(name).copy_(tensors[name])
        for name in adapter.modules:
            linear = model.get_submodule(name)
            linear.register_forward_hook(_Adapter(linear, name, tensors, adapter.scaling))


# PEFT itself would replace modules, and bring accelerate with it.
class _Adapter:
    """A forward hook of a linear layer that adds the adapter's output, with PEFT's arithmetic. `tensors` are those of
    the directory, without PEFT's prefix, on the layer's device."""

    def __init__(self, linear: torch.nn.Linear, name: str, tensors: dict[str, torch.Tensor], scaling: float) -> None:
        self._a, self._b, self._scaling = tensors[name + LORA_A], tensors[name + LORA_B], scaling
        self._scale = None  # (out,) DoRA: magnitude / norm of each row of the adapted weight
        if (magnitude := tensors.get(name + MAGNITUDE)) is not None:
            adapted = linear.weight.detach() + scaling * (self._b @ self._a)
            self._scale = magnitude / torch.linalg.norm(adapted, dim=1)

    def __call__(self, linear: torch.nn.Linear, inputs: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        delta = F.linear(F.linear(inputs[0], self._a), self._b) * self._scaling
        if self._scale is None:
            return out + delta
        bias = 0 if linear.bias is None else linear.bias
        return (out - bias + delta) * self._scale + bias  # DoRA scales the weight, and not the bias
