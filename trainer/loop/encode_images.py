"""The features of distinct images: each rank writes some of the shards.

The batches in which a shard's images are encoded depend only on its table, so that the numbers do not depend on the
number of ranks. A finished shard is not written again.
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from pkgutil import resolve_name

import numpy as np
import pyarrow.parquet as pq
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from dataset_builders.contracts.features import FEATURE_INDEX, FIELD, images_name, index_name, shard_name, write_table
from dataset_builders.contracts.manifest import FeatureType, load_manifest
from dataset_builders.contracts.shard_io import ShardWriter, finished_shard, read_record
from dataset_builders.contracts.tokenized import TokenizedSample, Visual, read_pixel_store
from dataset_builders.records.pixel_codecs import decode_sample
from trainer.checkpoint.hf_weights import load_hf_weights
from trainer.contract.result import TrainResult
from trainer.contract.run import EncodeRun
from trainer.data.balance import spread_images
from trainer.data.micro_batch import Geometry, MicroBatch, geometry_of, make_micro_batch
from trainer.data.reader import PREFETCH_DEPTH, prefetch
from trainer.layers.modules.choice import choose_modules
from trainer.model.family import Family
from trainer.model.registry import read_model
from trainer.model.shape import ModelShape
from trainer.parallel.mesh import Mesh

BATCH_PATCHES = 16_384  # patches that are encoded at once; a larger image is a batch of its own

log = logging.getLogger("athanor.trainer")


def encode(run: EncodeRun, mesh: Mesh) -> TrainResult:
    """Write this rank's share of the unfinished shards; the shards are dealt to the ranks by their patches."""
    # Only rank 0 lists the unfinished shards: a slower rank could see one that was finished meanwhile, and differ.
    left = mesh.from_main([n for n in range(run.num_shards) if finished_shard(run.features_dir, shard_name(n)) is None])
    tables = [run.features_dir / images_name(number) for number in left]
    patches = [sum(pq.read_table(table, columns=["patches"])["patches"].to_pylist()) for table in tables]
    mine = [left[place] for place in spread_images(patches, mesh.world_size)[mesh.rank]]
    family, shape = read_model(run.hf_dir)
    encoder, geometry = _encoder(run, mesh, family, shape), geometry_of(shape)
    log.info("%d of %d shards of features are left to make", len(left), run.num_shards)
    for done, number in enumerate(mine, start=1):
        images = pq.read_table(run.features_dir / images_name(number)).to_pylist()
        _write_shard(run, geometry, number, images, encoder, mesh.device)
        log.info("%s: %d of %d", shard_name(number), done, len(mine))
    mesh.any(True)  # no rank ends while another one works
    return TrainResult(status="finished", step=0)


class ImageEncoder(torch.nn.Module):
    """A family's vision encoder, whole on this rank. Its weights have the same names as in the model."""

    def __init__(self, vision: torch.nn.Module, is_tied: bool, mesh: Mesh) -> None:
        super().__init__()
        self.vision, self.groups = vision, ProcessGroupCollection(tp=mesh.alone)
        self.share_embeddings_and_output_weights = is_tied  # so that loading accepts a stored tied weight

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the features of the batch's images, (tokens, (1 + L) * D)."""
        return self.vision(batch)


def _encoder(run: EncodeRun, mesh: Mesh, family: Family, shape: ModelShape) -> ImageEncoder:
    modules = choose_modules(run.execution.modules, mesh.device)
    dtype = getattr(torch, run.precision)
    vision = resolve_name(family.encoder)(shape.vision, run.execution.parallel, dtype, modules, mesh)
    encoder = ImageEncoder(vision, shape.language.tie_word_embeddings, mesh)
    load_hf_weights(encoder, run.hf_dir, family.weight_rules(shape), family.copied)
    pixels = read_pixel_store(run.tokenized_dir, load_manifest(run.tokenized_dir).stats)
    patch_format = pixels.config.patch_format
    vision.patch_embed.set_normalisation(patch_format.image_mean, patch_format.image_std)
    return encoder.to(mesh.device).eval()


class ImageReader:
    """A reader of the images of one shard of features, batch by batch. Safe to use from several threads."""

    def __init__(self, run: EncodeRun, geometry: Geometry, images: Sequence[dict]) -> None:
        self._geometry = geometry
        self._dir, self._images = run.tokenized_dir, images
        self._pixels = read_pixel_store(run.tokenized_dir, load_manifest(run.tokenized_dir).stats)
        self.batches = list(_batches([image["patches"] for image in images]))

    def read(self, number: int) -> MicroBatch:
        """Return the images of a batch, each as a sample that holds only this image."""
        images, samples = self._images[self.batches[number].start : self.batches[number].stop], []
        # The rows of one sample are consecutive and share one read of its record.
        for _, of_sample in groupby(images, key=lambda image: (image["shard"], image["offset"])):
            first, *others = of_sample
            sample = self._sample(first)
            visuals = [*zip(sample.visuals(), sample.is_video)]
            samples += [self._alone(image["digest"], *visuals[image["number"]]) for image in (first, *others)]
        return make_micro_batch(samples, self._geometry, sum(len(each.input_ids) for each in samples))

    def _sample(self, image: dict) -> TokenizedSample:
        path = self._dir / image["shard"]
        fields = read_record(path, image["offset"], image["size"], (), image["checksum"], image["key"])
        return decode_sample(image["key"], fields, self._pixels)

    def _alone(self, digest: bytes, visual: Visual, is_video: bool) -> TokenizedSample:
        geometry = self._geometry
        tokens = len(visual.patches) // geometry.spatial_merge_size**2
        return TokenizedSample(
            key=digest.hex(),
            input_ids=np.full(tokens, geometry.video_token_id if is_video else geometry.image_token_id, np.int32),
            loss_mask=np.zeros(tokens, np.uint8),
            image_grid_thw=visual.grid[None],
            is_video=np.array([is_video]),
            patches=visual.patches,
            later_patches=visual.later_patches,
        )


def _batches(patches: Sequence[int]) -> Iterator[range]:
    first = total = 0
    for place, count in enumerate(patches):
        if place > first and total + count > BATCH_PATCHES:
            yield range(first, place)
            first, total = place, 0
        total += count
    yield range(first, len(patches))


def _write_shard(
    run: EncodeRun,
    geometry: Geometry,
    number: int,
    images: Sequence[dict],
    encoder: torch.nn.Module,
    device: torch.device,
) -> None:
    """Write a shard's records and its index, and last the entry that marks the shard as finished."""
    reader = ImageReader(run, geometry, images)
    columns: dict[str, list] = {name: [] for name in FEATURE_INDEX.names}
    pin = device.type == "cuda"
    batches = prefetch(reader, iter(range(len(reader.batches))), PREFETCH_DEPTH, pin, run.execution.loader_workers)
    with ShardWriter(run.features_dir, shard_name(number)) as writer:
        for batch in batches:
            with torch.no_grad():
                computed = encoder(batch.to(device))
            stored, errors = _stored(computed, run.dtype)
            tokens = batch.sample_lengths
            for key, rows, error in zip(batch.keys, stored.split(tokens), errors.split(tokens)):
                record = writer.write(key, {FIELD: rows.contiguous().view(torch.uint8).numpy().tobytes()})
                row = (record.offset, record.size, record.checksum, len(rows), float(error.max()))
                for column, value in zip(columns.values(), row):
                    column.append(value)
        write_table(run.features_dir / index_name(number), columns, FEATURE_INDEX)
        # The split of the samples in which the shard's images first occur.
        writer.commit("heldout" if images[0]["shard"].startswith("heldout/") else "train")


def _stored(computed: torch.Tensor, dtype: FeatureType) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, width) in the stored type, and (tokens,) the largest rounding error of each token; on the CPU."""
    stored = computed.to(getattr(torch, dtype))
    errors = (stored.to(torch.float32) - computed.to(torch.float32)).abs().amax(dim=1)
    return stored.cpu(), errors.cpu()
