"""A frozen base whose weights several models hold at once, each with modules of its own.

A run changes its modules: layers get adapters and another class, megatron-core wraps the model, graphs are captured.
The weights of a frozen base are only read. So the next run needs new modules, no new weights, and nothing to undo.
"""

import torch

from trainer.libraries.torch_private import parameters_of


def take_base(model: torch.nn.Module, base: torch.nn.Module) -> None:
    """Give a chunk that was built without memory the weights of a chunk of the same model, without a copy.

    Layers whose weights the base holds in float8 become such layers. Nothing of the run is left in the base.
    """
    taken: dict[int, torch.nn.Parameter] = {}
    for module, held in zip(model.modules(), base.modules(), strict=True):
        module.__class__ = type(held)
        own = parameters_of(module)
        for name, param in parameters_of(held).items():
            if param is None:
                continue
            if id(param) not in taken:
                taken[id(param)] = torch.nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                taken[id(param)].__dict__.update(own[name].__dict__)
            own[name] = taken[id(param)]
        for name, buffer in held.named_buffers(recurse=False):
            if name not in dict(module.named_buffers(recurse=False)):  # the factors of a float8 weight
                module.register_buffer(name, buffer, persistent=False)
