"""The cost of comparing every record with its checksum: bins are read with and without the check, in rotation.

    taskset -c 1 python -m tests.bench.bench_check [--samples N] [--passes N] [--folder DIRECTORY]

`BinReader.read` is called as in training, bin after bin of the mix of `bench_train_step`, with pixels as bytes (codec
u8, for which reading is cheapest and the check weighs most). "As before" is the reader from before 2026-11-23, which
compared nothing on a disk: it read a record member by member, and skipped the pixels for a rank without a vision
encoder.

From memory: the shard is in the page cache. The figure is CPU milliseconds of one thread, the fastest of many passes.
From the disk: the shard is dropped from the page cache before each pass. The figure is wall-clock milliseconds of the
fastest pass.
"""

import argparse
import dataclasses
import hashlib
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable, Container
from pathlib import Path

import numpy as np
import torch
import xxhash

from dataset_builders.contracts import shard_io
from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.shard_io import ShardWriter, read_record
from dataset_builders.contracts.tokenized import PixelConfig, PixelStore, TokenizedSample
from dataset_builders.pictures.pixel_codecs import encode_sample
from dataset_builders.storage.store import StorePath
from stages.plan_bins.pack import pack
from tests.bench.mix import MAX_PATCHES_PER_TOKEN, VOCABULARY, draw_kind
from tests.helpers.bins import make_sample, write_plan
from tests.helpers.reference import PIXELS
from trainer.data import reader as reader_module
from trainer.data.micro_batch import Geometry
from trainer.data.reader import BinReader
from trainer.data.slices import RankSlice

SHARD = "train/shard-00000.tar"
SEQ_LEN = 8192
PATCH_BYTES = 768
GEOMETRY = Geometry(VOCABULARY.stop, 2, PATCH_BYTES)  # the image token is no word
CHECKSUMS: dict[str, Callable[[bytes], object]] = {
    "xxh3_64 (in every index)": xxhash.xxh3_64_intdigest,
    "xxh3_128": xxhash.xxh3_128_intdigest,
    "crc32 (zlib)": zlib.crc32,
    "SHA-256 (of shards and files)": lambda data: hashlib.sha256(data).digest(),
    "BLAKE2b": lambda data: hashlib.blake2b(data).digest(),
}


def as_before(
    path: StorePath, offset: int, size: int, without: Container[str], checksum: int, key: str
) -> dict[str, bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        return dict(field for _, field in shard_io._members(path, file, offset + size, without))


def unchecked(path: StorePath, offset: int, size: int, without: Container[str], checksum: int, key: str):
    return read_record(path, offset, size, without, None, key)


READERS = {"as before": as_before, "without the check": unchecked, "with the check": read_record}


def bins_of_the_mix(count: int) -> list[list[TokenizedSample]]:
    """Return the first `count` samples of the mix, without pixels, packed as plan_bins does."""
    rng, samples, without = np.random.default_rng(0), [], dataclasses.replace(GEOMETRY, patch_bytes=0)
    while len(samples) < count:
        sample = make_sample(draw_kind(rng), without, VOCABULARY, len(samples), f"mix/{len(samples):08d}")
        samples += [sample] if len(sample.input_ids) <= SEQ_LEN else []
    sizes = np.array([(len(sample.input_ids), len(sample.patches)) for sample in samples]).T
    numbers = pack(*sizes, SEQ_LEN, MAX_PATCHES_PER_TOKEN * SEQ_LEN)
    return [[samples[i] for i in np.flatnonzero(numbers == number)] for number in range(int(numbers.max()) + 1)]


def write_data(directory: Path, count: int) -> None:
    """Write one shard with samples of the mix and random pixels, and its plan."""
    rng, rows, numbers = np.random.default_rng(0), [], []
    pixels = PixelStore(codec="u8", config=PixelConfig(min_pixels=1, max_pixels=1 << 20, patch_format=PIXELS))
    with ShardWriter(directory, SHARD) as writer:
        for number, samples in enumerate(bins_of_the_mix(count)):
            for sample in samples:
                patches = rng.integers(0, 256, (len(sample.patches), PATCH_BYTES), dtype=np.uint8)
                fields = encode_sample(dataclasses.replace(sample, patches=patches), "u8", {})
                record = writer.write(sample.key, fields)
                sizes = {"num_tokens": len(sample.input_ids), "num_loss_tokens": int(sample.loss_mask.sum())}
                sizes |= {"num_patches": len(patches), "num_images": len(sample.image_grid_thw)}
                place = {"subset": "mix", "split": "train", "shard": SHARD}
                rows.append({**dataclasses.asdict(record), **place, **sizes})
                numbers.append(number)
        entry = writer.commit("train")
    write_plan(directory, rows, numbers)
    stats = {"pixels": pixels.model_dump(mode="json")}
    facts = {"stage": "tokenize", "version": 1, "fingerprint": "0" * 16, "config": {}, "parents": {}}
    Manifest(**facts, shards=[entry], stats=stats).write(directory)


def fastest(
    directory: Path, part: RankSlice, passes: int, clock: Callable[[], float], before: Callable[[], None]
) -> dict[str, float]:
    """Return the milliseconds per bin of each reader, in the fastest of its passes. The readers run in rotation."""
    best = dict.fromkeys(READERS, float("inf"))
    for _ in range(passes):
        for name, read in READERS.items():
            reader_module.read_record = read
            reader = BinReader(directory, directory, "train", GEOMETRY, SEQ_LEN, part)
            reader.read(0)
            before()
            started = clock()
            for number in range(len(reader.bins)):
                reader.read(number)
            best[name] = min(best[name], 1e3 * (clock() - started) / len(reader.bins))
    reader_module.read_record = read_record
    return best


def forget(shard: Path) -> None:
    """Drop a file from the page cache."""
    with shard.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row(name: str, times: dict[str, float]) -> str:
    old, without, checked = times.values()
    share, against = f"{checked / without - 1:+.1%}", f"{checked / old - 1:+.1%}"
    return f"| {name} | {old:.2f} | {without:.2f} | {checked:.2f} | {share} | {against} |"


def rate(function: Callable[[bytes], object], data: bytes, rounds: int = 9) -> float:
    """Return the GB per CPU second of the fastest round."""
    best, count = float("inf"), max(1, (64 << 20) // len(data))
    for _ in range(rounds):
        started = time.process_time()
        for _ in range(count):
            function(data)
        best = min(best, time.process_time() - started)
    return count * len(data) / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, numpy {np.__version__}, xxhash {xxhash.VERSION}, one thread.\n")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        directory = Path(folder)
        write_data(directory, args.samples)
        size = (directory / SHARD).stat().st_size
        bins = len(BinReader(directory, directory, "train", GEOMETRY, SEQ_LEN, RankSlice(pad_multiple=1)).bins)
        print(f"{args.samples} samples, {bins} bins of {size / bins / 1e6:.1f} MB; milliseconds a bin\n")
        print("| | as before | without the check | with the check | the check | against before |")
        print("|" + " --- |" + " ---: |" * 5)
        whole, text = RankSlice(pad_multiple=1), RankSlice(pad_multiple=1, has_vision=False)
        for name, part in (("from memory, processor", whole), ("the same, a rank without vision", text)):
            print(row(name, fastest(directory, part, args.passes, time.process_time, lambda: None)), flush=True)
        cold = fastest(directory, whole, args.passes, time.perf_counter, lambda: forget(directory / SHARD))
        print(row("from the disk, clock", cold), flush=True)
    print("\n| GB/s | a record of 2 MB | 64 MB |\n| --- | ---: | ---: |")
    data = np.random.default_rng(0).bytes(64 << 20)
    for name, function in CHECKSUMS.items():
        print(f"| {name} | {rate(function, data[: 2 << 20]):.1f} | {rate(function, data):.1f} |", flush=True)


if __name__ == "__main__":
    main()
