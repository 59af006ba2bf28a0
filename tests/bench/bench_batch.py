"""How long the data worker takes to make micro batches of samples that are in memory; pixels are not copied.

    taskset -c 1 python -m tests.bench.bench_batch

`make_micro_batch` as training calls it, bin after bin, one rank's part: segments and padding, input_ids, labels, loss
places, the places that context parallel gives to a rank, image places, the deal of images to ranks, and the runs and
frames from which positions follow. "Language's part" is without the images: what a rank beyond the first of a pipeline
makes. Positions of tokens and patches, taps and weights are made from these where the model asks for them, on its
device: the last column says by how many operations a bin in forward, each a kernel on a GPU.

The mix is that of `bench_train_step`, packed as plan_bins does. Patches are of 0 bytes, so all that is done to them is
done but the copy; in "with pixels" they are of 768. A batch is dropped when the next one is made, as in training.
Milliseconds are of the processor, one thread, of a whole pass over the bins: the fastest of many, for whatever else
runs on a machine only adds to it. All samples are in memory, most of them no longer in a cache; "just read" is when a
bin's samples were written right before, as they are in training. Grids have been seen before, but for "first pass".
"""

import argparse
import dataclasses
import platform
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dataset_builders.contracts.tokenized import TokenizedSample
from stages.pack import pack
from tests.bench.mix import IMAGE_TOKEN, MAX_PATCHES_PER_TOKEN, VOCABULARY, draw_kind
from tests.helpers.bins import make_sample
from trainer import positions
from trainer.batch import Geometry, make_micro_batch
from trainer.slices import RankSlice

SEQ_LEN = 8192
PATCH_BYTES = 768
NO_PIXELS = Geometry(IMAGE_TOKEN, 2, 48, 0)
COUNTS = (256, 512, 1024, 2048, 4096)
MAIN = 1024
READ = ("input_ids", "loss_mask", "image_grid_thw")
Bins = list[list[TokenizedSample]]


def draw_samples(count: int) -> list[TokenizedSample]:
    """The first `count` samples of the mix, without pixels."""
    rng, samples = np.random.default_rng(0), []
    while len(samples) < count:
        sample = make_sample(draw_kind(rng), NO_PIXELS, VOCABULARY, len(samples), f"mix/{len(samples):08d}")
        if len(sample.input_ids) <= SEQ_LEN:
            samples.append(sample)
    return samples


def packed(samples: Sequence[TokenizedSample], pad_multiple: int) -> Bins:
    """The samples in bins."""
    tokens = np.array([-(-len(s.input_ids) // pad_multiple) * pad_multiple for s in samples])
    bins = pack(tokens, np.array([len(s.patches) for s in samples]), SEQ_LEN, MAX_PATCHES_PER_TOKEN * SEQ_LEN)
    return [[samples[i] for i in np.flatnonzero(bins == number)] for number in range(int(bins.max()) + 1)]


def milliseconds(bins: Bins, geometry: Geometry, part: RankSlice, passes: int) -> float:
    """The fastest pass over the bins."""
    best = float("inf")
    for _ in range(passes):
        started = time.process_time()
        for samples in bins:
            make_micro_batch(samples, geometry, SEQ_LEN, part)
        best = min(best, time.process_time() - started)
    return 1e3 * best


def milliseconds_just_read(bins: Bins, geometry: Geometry, part: RankSlice, passes: int) -> float:
    """The fastest pass over bins whose samples were written to memory right before, as by the reader; that is not
    counted."""
    best = float("inf")
    for _ in range(passes):
        total = 0.0
        for samples in bins:
            read = [dataclasses.replace(s, **{name: getattr(s, name).copy() for name in READ}) for s in samples]
            started = time.process_time()
            make_micro_batch(read, geometry, SEQ_LEN, part)
            total += time.process_time() - started
        best = min(best, total)
    return 1e3 * best


def first_pass(bins: Bins, part: RankSlice) -> float:
    """One pass when no grid was seen before."""
    for kept in vars(positions).values():
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()
    return milliseconds(bins, NO_PIXELS, part, 1)


def with_pixels(bins: Bins) -> Bins:
    """The same samples with patches that take no memory but are copied like any others."""
    pixel = np.zeros(PATCH_BYTES, np.uint8)
    return [
        [dataclasses.replace(s, patches=np.broadcast_to(pixel, (len(s.patches), PATCH_BYTES))) for s in samples]
        for samples in bins
    ]


class Operations(TorchDispatchMode):
    """Counts what computes; views do not."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations(samples: Sequence[TokenizedSample], part: RankSlice) -> int:
    """How many a forward pass of all of the model does to a bin before it computes with it."""
    batch = make_micro_batch(samples, NO_PIXELS, SEQ_LEN, part)
    with Operations() as counter:
        for name in ("input_ids", "position_ids", "cu_seqlens", "loss_index", "labels", "image_index", "image_rows"):
            getattr(batch, name)
        batch.vision_cu_seqlens, batch.patch_positions()
    return counter.count


def row(samples: Sequence[TokenizedSample], cp: int, passes: int) -> list[str]:
    """One line of the table."""
    part = RankSlice(pad_multiple=2 * cp if cp > 1 else 1, cp=cp, vision_ranks=cp)
    bins = packed(samples, part.pad_multiple)
    cold = min(first_pass(bins, part) for _ in range(3))
    text = dataclasses.replace(part, has_vision=False)
    language, whole = (milliseconds(bins, NO_PIXELS, each, passes) for each in (text, part))
    read = [milliseconds_just_read(bins, NO_PIXELS, each, passes) for each in (text, part)]
    pixels = milliseconds(with_pixels(bins), dataclasses.replace(NO_PIXELS, patch_bytes=PATCH_BYTES), part, 3)
    counts = [len(samples), sum(len(s.input_ids) for s in samples), sum(len(s.patches) for s in samples), len(bins)]
    thousands = len(samples) / 1e3
    times = [language, language / thousands, read[0], whole, whole / thousands, read[1], cold, pixels]
    return [str(cp), *(f"{n:,}" for n in counts), *(f"{t:.1f}" for t in times), str(operations(bins[0], part))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = draw_samples(max(COUNTS))
    print(f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}, one thread.\n")
    heads = ["cp", "samples", "tokens", "patches", "bins", "language's part, ms", "a 1,000 samples", "just read"]
    heads += ["all but pixels, ms", "a 1,000 samples", "just read", "first pass", "with pixels", "operations"]
    print(f"| {' | '.join(heads)} |\n|{' ---: |' * len(heads)}")
    for count, cp in [*((count, 1) for count in COUNTS), (MAIN, 2), (MAIN, 4)]:
        print(f"| {' | '.join(row(samples[:count], cp, args.passes))} |", flush=True)


if __name__ == "__main__":
    main()
