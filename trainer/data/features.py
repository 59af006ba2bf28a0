"""A reader of image features as tensors, from an artifact that holds them."""

from collections.abc import Sequence

import torch

from dataset_builders.contracts.bins import Bin
from dataset_builders.contracts.features import FeaturePlace, FeatureShards
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath


class FeatureReader:
    """A thread-safe reader of the features of images."""

    def __init__(self, directory: StorePath, width: int) -> None:
        self._shards = FeatureShards(directory)
        if self._shards.store.width != width:
            raise InputError(
                f"{directory} holds features of {self._shards.store.width} numbers an image token, and this model "
                f"takes {width}: they are of another model; run the encode_images stage with this one"
            )
        self.dtype = getattr(torch, self._shards.store.dtype)

    def of_bin(self, refs: Bin) -> "BinFeatures":
        """Return the features of a bin's images, without reading them yet."""
        places = [self._shards.places(ref.shard, ref.offset, ref.num_images) for ref in refs]
        return BinFeatures(self, [place for of_sample in places for place in of_sample])

    def read(self, places: Sequence[FeaturePlace]) -> torch.Tensor:
        """Return the concatenated features of these images, (tokens, width)."""
        data = bytearray().join(self._shards.read(place) for place in places)
        empty = torch.empty(0, dtype=self.dtype)
        return (torch.frombuffer(data, dtype=self.dtype) if data else empty).view(-1, self._shards.store.width)


class BinFeatures:
    """The features of the images of one bin."""

    def __init__(self, reader: FeatureReader, places: Sequence[FeaturePlace]) -> None:
        self._reader, self._places = reader, places

    def __call__(self, images: Sequence[int]) -> torch.Tensor:
        """Return the features, (tokens, width), of the images with these indices in the bin."""
        return self._reader.read([self._places[image] for image in images])
