"""Reading an HF directory's safetensors into a model. Each rank reads only its slices; no converted copy is made.

A rank holds its pipeline rank's layers, and its tensor-parallel slice of each layer.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from megatron.core.transformer.module import MegatronModule
from safetensors import SafetensorError, safe_open

from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.files import read_object
from trainer.model.rules import Rule, global_names, stored_rules
from trainer.parallel.late_memory import put, with_memory

INDEX = "model.safetensors.index.json"


class HFTensors:
    """The tensors of an HF directory by name, regardless of the file that holds them."""

    def __init__(self, hf_dir: Path) -> None:
        self.dir = hf_dir
        index, single = hf_dir / INDEX, hf_dir / "model.safetensors"
        self._files: dict[str, str] = {}
        if index.is_file() and not single.is_file():  # from_pretrained looks for the single file first
            self._files = read_object(index, "copy the model's own file again").get("weight_map") or {}
        else:
            for path in [single] if single.is_file() else sorted(hf_dir.glob("*.safetensors")):
                with _opened(path) as file:
                    self._files |= dict.fromkeys(file.keys(), path.name)
        if not self._files:
            raise InputError(f"{hf_dir} holds no *.safetensors; give a directory that from_pretrained can read")

    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor, on the CPU, in its stored dtype."""
        with self._open(name) as file:
            return file.get_tensor(name)

    def get_slice(self, name: str, dim: int, rank: int, size: int, runs: Sequence[int] = (1,)) -> torch.Tensor:
        """Return the rank-th of `size` equal slices along `dim`; only its bytes are read. A tensor that is fused from
        several runs along `dim`, of these relative lengths, is sliced run by run."""
        with self._open(name) as file:
            stored = file.get_slice(name)
            unit = stored.get_shape()[dim] // sum(runs)
            starts = accumulate((unit * run for run in runs), initial=0)
            shares = [unit * run // size for run in runs]
            bounds = [(start + rank * share, start + (rank + 1) * share) for start, share in zip(starts, shares)]
            before = (slice(None),) * dim
            return torch.cat([stored[(*before, slice(start, stop))] for start, stop in bounds], dim)

    def header(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and the shape of a stored tensor, reading only the file's header."""
        with self._open(name) as file:
            stored = file.get_slice(name)
            return stored[:0].dtype, torch.Size(stored.get_shape())

    def _open(self, name: str):
        if name not in self._files:
            raise InputError(f"{self.dir}: the tensor {name} is missing; is it a complete model of this architecture?")
        return _opened(self.dir / self._files[name])


def _opened(path: Path):
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({one_line(error)}); copy it again") from error


def load_hf_weights(
    model: MegatronModule,
    hf_dir: Path,
    rules: Sequence[Rule],
    carried: tuple[str, ...] = (),
    on_loaded: Callable[[str], None] | None = None,
) -> int:
    """Fill every parameter of this rank's chunk from `hf_dir`, except adapters, and return their number.

    Args:
        carried: name prefixes of tensors that the model does not use and that are not an error.
        on_loaded: called with the table's name of each parameter after it is filled.
    """
    source = HFTensors(hf_dir)
    table = {rule.ours: rule for rule in stored_rules(rules, source.names())}
    _check_leftovers(source, table, model, carried)
    # Only names: an iterator over the parameters would keep replaced ones in memory.
    named = zip(global_names(model), model.named_parameters(), strict=True)
    names = [(name, own) for (name, _), (own, _) in named if ".adapter." not in name]
    for name, own in names:
        # Memory comes just before the numbers, so that at most one parameter waits to be replaced by `on_loaded`.
        fill(with_memory(model, own), source, table[name], model)
        if on_loaded is not None:
            on_loaded(name)
    return len(names)


@torch.no_grad()
def fill(param: torch.nn.Parameter, source: HFTensors, rule: Rule, model: MegatronModule) -> None:
    """Fill a chunk's parameter with this rank's slice of its HF tensors; a divided parameter gets its rows of that."""
    part = read_part(source, rule, param, model)
    if part.shape != param.shape:
        raise InputError(
            f"{source.dir}: {rule.hf[0]} gives the shape {tuple(part.shape)}, config.json {tuple(param.shape)}"
        )
    put(param, part)


def read_part(source: HFTensors, rule: Rule, param: torch.nn.Parameter, model: MegatronModule) -> torch.Tensor:
    """Return this rank's part of a parameter, on the CPU, in the stored dtype."""
    axis, packing, group = parallel_axis(param), rule.packing, getattr(model.groups, rule.group)
    rank, size = group.rank(), group.size()
    if axis is None or size == 1:
        return packing.fuse([source.get(name) for name in rule.hf], 1)
    if packing.divides_names:
        share = len(rule.hf) // size
        return packing.fuse([source.get(name) for name in rule.hf[rank * share : (rank + 1) * share]], size)
    if packing.mixes_ranks:
        # This rank's part is no slice of the HF tensors, so each rank reads them whole.
        return packing.fuse([source.get(name) for name in rule.hf], 1).chunk(size, axis)[rank]
    runs = packing.runs(len(rule.hf))
    parts = [source.get_slice(name, axis, rank, size, runs[i]) for i, name in enumerate(rule.hf)]
    return packing.fuse(parts, size)


def parallel_axis(param: torch.nn.Parameter) -> int | None:
    """Return the axis along which ranks divide a parameter; None if each rank has it whole."""
    return param.partition_dim if getattr(param, "tensor_model_parallel", False) else None


def is_of_experts(param: torch.nn.Parameter) -> bool:
    """Whether expert-parallel ranks divide a parameter. megatron-core reads the same mark."""
    return not getattr(param, "allreduce", True)


def left_over(source: HFTensors, rules: Iterable[Rule], *, tied: bool) -> list[str]:
    """Return the names of a directory's tensors that no rule uses, sorted."""
    # Some directories store a tied weight a second time, as the output projection's.
    known = {name for rule in rules for name in rule.hf} | ({"lm_head.weight"} if tied else set())
    return sorted(source.names() - known)


def _check_leftovers(
    source: HFTensors, table: dict[str, Rule], model: MegatronModule, carried: tuple[str, ...]
) -> None:
    names = left_over(source, table.values(), tied=model.share_embeddings_and_output_weights)
    left = [name for name in names if not name.startswith(carried)]
    if left:
        raise InputError(f"{source.dir}: {len(left)} tensors have no place in the model, the first is {left[0]}")
