"""The loss of the held-out bins: one number for the curve, and one line per sample."""

import torch
import torch.distributed as dist

from dataset_builders.storage.files import write_text
from trainer.contract.answer import HeldoutRow
from trainer.contract.names import HELDOUT_JSONL
from trainer.contract.run import RunConfig
from trainer.data.order import heldout_bins
from trainer.data.reader import PREFETCH_DEPTH, BinReader, prefetch
from trainer.loop.share_model import Chunk
from trainer.loop.step import run_micro_batches
from trainer.objectives.sft import Totals
from trainer.parallel.mesh import Mesh


def heldout_loss(
    chunks: list[Chunk], reader: BinReader, mesh: Mesh, run: RunConfig, name: str = HELDOUT_JSONL
) -> float | None:
    """Return the mean loss over the loss tokens of all held-out bins; None if there are no bins. Rank 0 writes the mean
    loss of every held-out sample, in order of their keys. A collective."""
    if not reader.bins:
        return None
    # The interleaved schedule of virtual stages needs a multiple of the pipeline's ranks.
    multiple = mesh.groups.pp.size() if len(chunks) > 1 else 1
    numbers = heldout_bins(len(reader.bins), mesh.dp_rank, mesh.dp, multiple)
    totals = Totals.zero(mesh.device)
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        pin = mesh.device.type == "cuda"
        batches = prefetch(reader, iter(numbers), PREFETCH_DEPTH, pin, run.execution.loader_workers)
        reports = run_micro_batches(
            chunks, batches, len(numbers), mesh, totals, forward_only=True, return_per_token_outputs=True
        )
    clock = chunks[0].module.clock
    clock.switch(None)
    clock.take()
    rows = _by_sample(reader, numbers, reports, mesh)
    if mesh.is_main:
        write_text(run.output_dir / name, "".join(row.model_dump_json() + "\n" for row in rows))
    loss_sum, loss_tokens = totals.over_ranks(mesh)[:2].tolist()
    return loss_sum / max(1, loss_tokens)


def _by_sample(reader: BinReader, numbers: list[int | None], reports: list[dict], mesh: Mesh) -> list[HeldoutRow]:
    """Return one row per sample. Context-parallel ranks each have some of its tokens, tensor-parallel ranks all."""
    mine: list[tuple[str, float, int]] = []
    if mesh.groups.tp.rank() == 0:
        for number, report in zip(numbers, reports):  # only the last pipeline rank has reports
            if number is not None:
                losses = report["losses"].cpu().split(report["loss_lengths"])
                mine += [(r.key, float(part.double().sum()), len(part)) for r, part in zip(reader.bins[number], losses)]
    everybody = [mine]
    if mesh.world_size > 1:
        everybody = [[] for _ in range(mesh.world_size)]
        dist.all_gather_object(everybody, mine)
    sums: dict[str, tuple[float, int]] = {}
    for key, loss, count in (row for rows in everybody for row in rows):
        before = sums.get(key, (0.0, 0))
        sums[key] = before[0] + loss, before[1] + count
    return [HeldoutRow(key=k, loss=loss / n if n else None, loss_tokens=n) for k, (loss, n) in sorted(sums.items())]
