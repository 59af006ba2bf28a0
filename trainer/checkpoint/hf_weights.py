"""HF directories: reading their safetensors into a model, and writing a model's weights as safetensors, in any layout.

Reading: each rank reads only its slices (its pipeline rank's layers, and its tensor-parallel slice of each layer); no
converted copy is made.

Writing: rank 0 writes. For each tensor of the table, in HF's order, the ranks that hold its slices send them. So rank 0
holds the tensors of one file (5 GB at most) at a time, and no rank holds the whole model. The bytes are the same for
every layout.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dataset_builders.contracts.manifest import FileEntry, file_entry
from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.files import read_object, write_json
from trainer.model.rules import Rule, global_names, stored_rules
from trainer.parallel.mesh import Mesh
from trainer.parallel.meta_parameters import copy_into, materialised

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
    copied: tuple[str, ...] = (),
    on_loaded: Callable[[str], None] | None = None,
) -> int:
    """Fill every parameter of this rank's chunk from `hf_dir`, except adapters, and return their number.

    Args:
        copied: name prefixes of tensors that the model does not use and that are not an error.
        on_loaded: called with the table's name of each parameter after it is filled.
    """
    source = HFTensors(hf_dir)
    table = {rule.ours: rule for rule in stored_rules(rules, source.names())}
    unused = left_over(source, table.values(), tied=model.share_embeddings_and_output_weights)
    unknown = [name for name in unused if not name.startswith(copied)]
    if unknown:
        raise InputError(f"{source.dir}: {len(unknown)} tensors have no place in the model, the first is {unknown[0]}")
    # Only names: an iterator over the parameters would keep replaced ones in memory.
    named = zip(global_names(model), model.named_parameters(), strict=True)
    names = [(name, own) for (name, _), (own, _) in named if ".adapter." not in name]
    for name, own in names:
        # Memory comes just before the numbers, so that at most one parameter waits to be replaced by `on_loaded`.
        fill(materialised(model, own), source, table[name], model)
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
    copy_into(param, part)


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


FILE_BYTES = 5_000_000_000
HFStream = Iterator[tuple[str, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class _Slice:
    """A rank's slice of a parameter, or the whole parameter if `axis` is None."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None


def save_hf_weights(
    chunks: Sequence[MegatronModule],
    mesh: Mesh,
    rules: Sequence[Rule],
    source_dir: Path,
    out_dir: Path,
    file_bytes: int = FILE_BYTES,
    tensors: HFStream | None = None,
) -> list[FileEntry]:
    """Write the weights as safetensors, in the dtypes of `source_dir`; a collective.

    Args:
        tensors: the model's tensors, in the table's order; None: gather the tensors that the chunks hold.

    Returns:
        The entry of each weight file; empty on all ranks except the main one.
    """
    source = HFTensors(source_dir)
    rules = stored_rules(rules, source.names())
    # Tensors that the model does not use, and that reading skipped, are written last and unchanged.
    copied = left_over(source, rules, tied=chunks[0].share_embeddings_and_output_weights)
    names_of_table = (name for rule in rules for name in rule.hf)
    stored = {name: source.header(name) for name in (*names_of_table, *copied)}
    sizes = {name: shape.numel() * dtype.itemsize for name, (dtype, shape) in stored.items()}
    files = _divide_into_files(sizes, file_bytes)
    if mesh.is_main:
        out_dir.mkdir(parents=True, exist_ok=True)
    unchanged = ((name, source.get(name) if mesh.is_main else None) for name in copied)
    stream = itertools.chain(hf_tensors(chunks, mesh, rules) if tensors is None else tensors, unchanged)
    entries: list[Future[FileEntry]] = []
    with ThreadPoolExecutor(1, "digest") as pool:
        for file, names in files.items():
            of_file = dict(itertools.islice(stream, len(names)))
            if mesh.is_main:
                ready = {}
                for name, tensor in of_file.items():
                    dtype, shape = stored[name]
                    # The source may store an expert's matrices transposed, see `EitherWay`.
                    tensor = tensor if tensor.shape == shape else tensor.transpose(1, 2)
                    ready[name] = tensor.to("cpu", dtype).contiguous()
                save_file(ready, out_dir / file, metadata={"format": "pt"})
                # While the next file's tensors are gathered, this one is digested; its bytes are still in the page
                # cache.
                entries.append(pool.submit(file_entry, out_dir, file))
    total = sum(sizes.values())
    if mesh.is_main and len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(out_dir / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [entry.result() for entry in entries]


def _divide_into_files(sizes: dict[str, int], file_bytes: int) -> dict[str, list[str]]:
    """Return file names with their tensors, in order. No file exceeds `file_bytes` unless a single tensor does."""
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def hf_tensors(chunks: Sequence[MegatronModule], mesh: Mesh, rules: Sequence[Rule]) -> HFStream:
    """Yield HF tensors in the table's order: whole on rank 0, None on every other rank."""
    params = dict(_held(chunks, mesh))
    owners = _owners(params, mesh)
    for rule in rules:
        slices = [_to_main(params.get(rule.ours), part, mesh) for part in owners[rule.ours]]
        whole = _join(rule, slices, owners[rule.ours][0].axis) if mesh.is_main else rule.hf
        yield from ((name, tensor if mesh.is_main else None) for name, tensor in zip(rule.hf, whole))


def _held(chunks: Sequence[MegatronModule], mesh: Mesh) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that this rank sends, without copies of parameters that another rank sends."""
    groups = mesh.groups
    for chunk in chunks:
        for name, param in global_names(chunk):
            if is_of_experts(param):
                is_copy = groups.expt_dp.rank() > 0
            else:
                is_copy = groups.dp_cp.rank() > 0 or (parallel_axis(param) is None and groups.tp.rank() > 0)
            if not is_copy and not getattr(param, "shared", False):
                yield name, param


def _owners(params: dict[str, torch.nn.Parameter], mesh: Mesh) -> dict[str, list[_Slice]]:
    """Return the ranks that hold the slices of every parameter, in the order of the slices."""
    mine = {n: _Slice(mesh.rank, tuple(p.shape), p.dtype, parallel_axis(p)) for n, p in params.items()}
    owners: dict[str, list[_Slice]] = {}
    # By rank, which is the order of a parameter's slices.
    for name, part in itertools.chain.from_iterable(held.items() for held in mesh.gather(mine)):
        owners.setdefault(name, []).append(part)
    return owners


def _to_main(param: torch.nn.Parameter | None, part: _Slice, mesh: Mesh) -> torch.Tensor | None:
    if mesh.is_main and part.rank == 0:
        return param.detach()
    if mesh.is_main:
        received = torch.empty(part.shape, dtype=part.dtype, device=mesh.device)
        dist.recv(received, part.rank)
        return received
    if part.rank == mesh.rank:
        dist.send(param.detach().contiguous(), 0)
    return None


def _join(rule: Rule, slices: list[torch.Tensor], axis: int | None) -> list[torch.Tensor]:
    """Join the slices of one of our parameters into whole HF tensors."""
    if rule.packing.divides_names:
        share = len(rule.hf) // len(slices)
        return [tensor for part in slices for tensor in rule.packing.split(part, share, len(slices))]
    if rule.packing.mixes_ranks:
        return rule.packing.split(torch.cat(slices, axis or 0), len(rule.hf), 1)
    parts = [rule.packing.split(part, len(rule.hf), len(slices)) for part in slices]
    if axis is None or len(slices) == 1:
        return parts[0]
    tensors = []
    for of_ranks, runs in zip(zip(*parts), rule.packing.runs(len(rule.hf))):
        # Each rank has a part of every run.
        sizes = [of_ranks[0].size(axis) * run // sum(runs) for run in runs]
        by_run = zip(*(part.split(sizes, axis) for part in of_ranks))
        tensors.append(torch.cat([part for run in by_run for part in run], axis))
    return tensors
