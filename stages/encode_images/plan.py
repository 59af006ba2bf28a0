"""The assignment of distinct images to feature shards, in the order of the samples.

images/00000.parquet             the images of a shard, which the trainer reads
samples/train/shard-00000.arrow  the records of the images of each sample of a tokenized shard
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow.parquet as pq

from dataset_builders.contracts.features import (
    IMAGE_SCHEMA,
    SAMPLE_SCHEMA,
    FeaturePlace,
    images_name,
    samples_name,
    write_table,
)
from dataset_builders.contracts.sample import Split
from dataset_builders.storage.store import StorePath, make_dir
from stages.encode_images.scan import ScanTask
from stages.shared.artifacts.row_tables import write_rows


@dataclass(slots=True)
class ImagePlan:
    """The distinct images seen so far, and the current shard. Takes about 250 bytes per distinct image."""

    directory: StorePath
    limit: int  # patches in a shard, at most; a larger image has a shard of its own
    places: dict[bytes, FeaturePlace] = field(default_factory=dict)
    num_shards: int = 0
    uses: int = 0  # number of images seen, including repetitions
    _rows: list[dict] = field(default_factory=list)
    _patches: int = 0
    _split: Split | None = None

    def add(self, image: dict, split: Split) -> FeaturePlace:
        """Return the record address of an image; a new image gets the next one."""
        self.uses += 1
        known = self.places.get(image["digest"])
        if known is not None:
            return known
        if self._rows and (self._patches + image["patches"] > self.limit or split != self._split):
            self.flush()
        place = FeaturePlace(self.num_shards, len(self._rows))
        self.places[image["digest"]] = place
        self._rows.append(image)
        self._patches, self._split = self._patches + image["patches"], split
        return place

    def flush(self) -> None:
        """Write the table of the current shard, if it has an image."""
        if self._rows:
            path = self.directory / images_name(self.num_shards)
            make_dir(path.parent)
            write_rows(path, self._rows, IMAGE_SCHEMA)
            self._rows, self._patches, self.num_shards = [], 0, self.num_shards + 1


def plan_images(tasks: Sequence[ScanTask], directory: StorePath, limit: int) -> ImagePlan:
    """Write the tables of all feature shards, of at most `limit` patches, and of all tokenized shards. Each task is a
    tokenized shard whose table of images exists."""
    plan = ImagePlan(directory, limit)
    for task in tasks:
        columns: dict[str, list] = {name: [] for name in SAMPLE_SCHEMA.names}
        for image in pq.read_table(task.out).to_pylist():
            place = plan.add(image, task.shard.split)
            if image["number"] == 0:  # the first image of the next sample
                for column, value in zip(columns.values(), (image["offset"], [], [])):
                    column.append(value)
            columns["shards"][-1].append(place.shard)
            columns["rows"][-1].append(place.row)
        write_table(directory / samples_name(task.shard.name), columns, SAMPLE_SCHEMA)
    plan.flush()
    return plan
