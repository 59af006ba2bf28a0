"""The time in which the data worker makes micro batches of samples that are in memory.

    taskset -c 1 python -m tests.bench.bench_batch

`make_micro_batch` is called as in training, bin after bin, for one rank's part. "Language's part" is without the
images:
the part of a rank beyond the first of a pipeline. In "all but pixels" patches have 0 bytes, so that all work on them is
done except the copy; in "with pixels" they have 768. A batch is dropped when the next one is made, as in training.

The mix is that of `bench_train_step`, packed as plan_bins does. Milliseconds are CPU time of one thread for a whole
pass
over the bins. The fastest of many passes counts, because other work on the machine only adds time. "just read" means
that
a bin's samples were written to memory right before, as in training.
"""

import argparse
import dataclasses
import platform
import time
from collections.abc import Sequence

import numpy as np
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from stages.plan_bins.pack import pack
from tests.bench.host import version_text
from tests.bench.mix import MAX_PATCHES_PER_TOKEN, VOCABULARY, draw_kind
from tests.helpers.bins import make_sample
from trainer.data.micro_batch import Geometry, make_micro_batch
from trainer.data.slices import RankSlice

SEQ_LEN = 8192
PATCH_BYTES = 768
NO_PIXELS = Geometry(VOCABULARY.stop, 2, 0)  # the image token is no word
COUNTS = (256, 512, 1024, 2048, 4096)
MAIN = 1024
READ = ("input_ids", "loss_mask", "image_grid_thw")
Bins = list[list[TokenizedSample]]


def draw_samples(count: int) -> list[TokenizedSample]:
    """Return the first `count` samples of the mix, without pixels."""
    rng, samples = np.random.default_rng(0), []
    while len(samples) < count:
        sample = make_sample(draw_kind(rng), NO_PIXELS, VOCABULARY, len(samples), f"mix/{len(samples):08d}")
        if len(sample.input_ids) <= SEQ_LEN:
            samples.append(sample)
    return samples


def packed(samples: Sequence[TokenizedSample], pad_multiple: int) -> Bins:
    """Return the samples packed into bins."""
    tokens = np.array([-(-len(s.input_ids) // pad_multiple) * pad_multiple for s in samples])
    bins = pack(tokens, np.array([len(s.patches) for s in samples]), SEQ_LEN, MAX_PATCHES_PER_TOKEN * SEQ_LEN)
    return [[samples[i] for i in np.flatnonzero(bins == number)] for number in range(int(bins.max()) + 1)]


def milliseconds(bins: Bins, geometry: Geometry, part: RankSlice, passes: int) -> float:
    """Return the time of the fastest pass over the bins."""
    best = float("inf")
    for _ in range(passes):
        started = time.process_time()
        for samples in bins:
            make_micro_batch(samples, geometry, SEQ_LEN, part)
        best = min(best, time.process_time() - started)
    return 1e3 * best


def milliseconds_just_read(bins: Bins, geometry: Geometry, part: RankSlice, passes: int) -> float:
    """Return the time of the fastest pass over bins whose samples were written to memory right before, as the reader
    does. The writing is not counted."""
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


def with_pixels(bins: Bins) -> Bins:
    """Return the same samples with patches that take no memory but are copied like others."""
    pixel = np.zeros(PATCH_BYTES, np.uint8)
    return [
        [dataclasses.replace(s, patches=np.broadcast_to(pixel, (len(s.patches), PATCH_BYTES))) for s in samples]
        for samples in bins
    ]


def row(samples: Sequence[TokenizedSample], cp: int, passes: int) -> list[str]:
    """Return one line of the table."""
    part = RankSlice(pad_multiple=2 * cp if cp > 1 else 1, cp=cp, vision_ranks=cp, vision_shares=cp)
    bins = packed(samples, part.pad_multiple)
    text = dataclasses.replace(part, has_vision=False)
    language, whole = (milliseconds(bins, NO_PIXELS, each, passes) for each in (text, part))
    read = milliseconds_just_read(bins, NO_PIXELS, part, passes)
    pixels = milliseconds(with_pixels(bins), dataclasses.replace(NO_PIXELS, patch_bytes=PATCH_BYTES), part, 3)
    counts = [len(samples), sum(len(s.input_ids) for s in samples), sum(len(s.patches) for s in samples), len(bins)]
    times = [language, whole, read, read / len(bins), pixels]
    return [str(cp), *(f"{n:,}" for n in counts), *(f"{t:.2f}" if t < 10 else f"{t:.1f}" for t in times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = draw_samples(max(COUNTS))
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {version_text('torch')}, one thread.\n")
    heads = ["cp", "samples", "tokens", "patches", "bins", "language's part, ms", "all but pixels, ms", "just read"]
    heads += ["just read, a bin", "with pixels"]
    print(f"| {' | '.join(heads)} |\n|{' ---: |' * len(heads)}")
    for count, cp in [*((count, 1) for count in COUNTS), (MAIN, 2), (MAIN, 4)]:
        print(f"| {' | '.join(row(samples[:count], cp, args.passes))} |", flush=True)


if __name__ == "__main__":
    main()
