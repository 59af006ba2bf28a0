"""Bins -> TokenizedSamples -> MicroBatch, read ahead by threads."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dataset_builders.contracts.bins import Bin, BinPlan, read_bins
from dataset_builders.contracts.features import FeaturePlace, FeatureShards
from dataset_builders.contracts.manifest import load_manifest
from dataset_builders.contracts.sample import Split
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import TokenizedSample, read_pixel_store
from dataset_builders.errors import DamagedFile, InputError
from dataset_builders.records.pixel_codecs import PIXEL_FIELDS, decode_sample
from dataset_builders.storage.store import StorePath
from trainer.data.micro_batch import Features, Geometry, MicroBatch, make_micro_batch
from trainer.data.slices import RankSlice

PREFETCH_DEPTH = 4  # micro batches read ahead


class BinReader:
    """A thread-safe reader of a rank's part of the bins of one split, as micro batches."""

    def __init__(
        self,
        tokenized_dir: StorePath,
        bins_dir: StorePath,
        split: Split,
        geometry: Geometry,
        seq_len: int,
        part: RankSlice,
        features: "FeatureReader | None" = None,
    ) -> None:
        self.bins: BinPlan = read_bins(bins_dir, split)
        self.pixels = read_pixel_store(tokenized_dir, load_manifest(tokenized_dir).stats)
        self.patch_format = self.pixels.config.patch_format
        self._dir, self._geometry = tokenized_dir, geometry
        self._seq_len, self._part, self._features = seq_len, part, features

    def samples(self, number: int) -> list[TokenizedSample]:
        """Return the samples of one bin, in order."""
        has_pixels = self._part.has_pixels and self._features is None
        # No pixels are read if this rank encodes no images or reads their features.
        omitted = () if has_pixels else PIXEL_FIELDS[self.pixels.codec]
        samples = []
        for ref in self.bins[number]:
            fields = read_record(self._dir / ref.shard, ref.offset, ref.size, omitted, ref.checksum, ref.key)
            samples.append(decode_sample(ref.key, fields, self.pixels))
        return samples

    def read(self, number: int | None) -> MicroBatch:
        """Return this rank's part of one bin; for None, of a bin that is all padding.

        Raises:
            InputError: the tokenized samples do not form a bin; the text names the directory and the sample.
            DamagedFile: a record differs from the record that was written.
        """
        samples = [] if number is None else self.samples(number)
        refs = () if number is None else self.bins[number]
        features = self._features.of_bin(refs) if self._features and self._part.has_vision else None
        try:
            return make_micro_batch(samples, self._geometry, self._seq_len, self._part, features)
        except DamagedFile:
            raise
        except ValueError as error:
            raise InputError(f"{self._dir}: {error}") from error

    def keys(self, numbers: Sequence[int]) -> list[str]:
        return [ref.key for number in numbers for ref in self.bins[number]]


def prefetch(
    reader: BinReader, numbers: Iterator[int | None], depth: int, pin: bool, num_workers: int = 1
) -> Iterator[MicroBatch]:
    """Yield the micro batches of these bins, in order whatever the number of threads; `depth` of them are read ahead,
    at least one per thread. An error of the reader is raised here when its micro batch would be yielded."""
    stopping = threading.Event()

    def load(number: int | None) -> MicroBatch | None:
        if stopping.is_set():
            return None
        batch = reader.read(number)
        return batch.packed(pin=True) if pin else batch

    with ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="bins") as pool:
        queue: deque[Future] = deque()
        try:
            for number in numbers:
                queue.append(pool.submit(load, number))
                # A generator: nothing is read ahead before the first batch is asked for.
                if len(queue) > max(depth, num_workers):
                    yield queue.popleft().result()
            while queue:
                yield queue.popleft().result()
        finally:
            stopping.set()  # the pool's end waits for queued bins, which are then not read


class FeatureReader:
    """A thread-safe reader of the features of images, from the artifact of the encode_images stage."""

    def __init__(self, directory: StorePath, width: int) -> None:
        self._shards = FeatureShards(directory)
        if self._shards.store.width != width:
            raise InputError(
                f"{directory} holds features of {self._shards.store.width} numbers an image token, and this model "
                f"takes {width}: they are of another model; run the encode_images stage with this one"
            )
        self.dtype = getattr(torch, self._shards.store.dtype)

    def of_bin(self, refs: Bin) -> Features:
        """Return a function that reads the features of a bin's images, given their indices in the bin."""
        places = [place for ref in refs for place in self._shards.places(ref.shard, ref.offset, ref.num_images)]
        return lambda images: self.read([places[image] for image in images])

    def read(self, places: Sequence[FeaturePlace]) -> torch.Tensor:
        """Return the concatenated features of these images, (tokens, width)."""
        data = bytearray().join(self._shards.read(place) for place in places)
        empty = torch.empty(0, dtype=self.dtype)
        return (torch.frombuffer(data, dtype=self.dtype) if data else empty).view(-1, self._shards.store.width)
