"""Writing a model's weights as an HF directory's safetensors, from any layout, tensor by tensor.

Rank 0 writes. For each tensor of the table, in HF's order, the ranks that hold its slices send them. So rank 0 holds
the tensors of one file (5 GB at most) at a time, and no rank holds the whole model. The bytes are the same for every
layout.
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from safetensors.torch import save_file

from dataset_builders.contracts.manifest import FileEntry, file_entry
from dataset_builders.storage.files import write_json
from trainer.checkpoint.hf_read import INDEX, HFTensors, is_of_experts, left_over, parallel_axis
from trainer.model.rules import Rule, global_names, stored_rules
from trainer.parallel.mesh import Mesh

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
    carried = left_over(source, rules, tied=chunks[0].share_embeddings_and_output_weights)
    names_of_table = (name for rule in rules for name in rule.hf)
    stored = {name: source.header(name) for name in (*names_of_table, *carried)}
    sizes = {name: shape.numel() * dtype.itemsize for name, (dtype, shape) in stored.items()}
    files = _plan_files(sizes, file_bytes)
    if mesh.is_main:
        out_dir.mkdir(parents=True, exist_ok=True)
    unchanged = ((name, source.get(name) if mesh.is_main else None) for name in carried)
    stream = itertools.chain(hf_tensors(chunks, mesh, rules) if tensors is None else tensors, unchanged)
    entries: list[Future[FileEntry]] = []
    with ThreadPoolExecutor(1, "digest") as pool:
        for file, names in files.items():
            of_file = dict(itertools.islice(stream, len(names)))
            if mesh.is_main:
                ready = {name: _as_stored(tensor, *stored[name]) for name, tensor in of_file.items()}
                save_file(ready, out_dir / file, metadata={"format": "pt"})
                # While the next file's tensors are gathered, this one is digested; its bytes are still in the page
                # cache.
                entries.append(pool.submit(file_entry, out_dir, file))
    total = sum(sizes.values())
    if mesh.is_main and len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(out_dir / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [entry.result() for entry in entries]


def _as_stored(tensor: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return a tensor as its directory stores it; an expert's matrices may be transposed there, see `EitherWay`."""
    return (tensor if tensor.shape == shape else tensor.transpose(1, 2)).to("cpu", dtype).contiguous()


def _plan_files(sizes: dict[str, int], file_bytes: int) -> dict[str, list[str]]:
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
    everybody: list[dict[str, _Slice]] = [mine]
    if mesh.world_size > 1:
        everybody = [{} for _ in range(mesh.world_size)]
        dist.all_gather_object(everybody, mine)
    owners: dict[str, list[_Slice]] = {}
    # By rank, which is the order of a parameter's slices.
    for name, part in itertools.chain.from_iterable(held.items() for held in everybody):
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
    runs = rule.packing.runs(len(rule.hf))
    return [_joined(same, runs[number], axis) for number, same in enumerate(zip(*parts))]


def _joined(slices: Sequence[torch.Tensor], runs: Sequence[int], axis: int) -> torch.Tensor:
    """Join the ranks' slices of an HF tensor; each rank has a part of every run."""
    sizes = [slices[0].size(axis) * run // sum(runs) for run in runs]
    by_run = zip(*(part.split(sizes, axis) for part in slices))
    return torch.cat([part for run in by_run for part in run], axis)
