"""Pass 1 of convert: every raw row read and checked once; what is kept of it is a line of hashes and figures."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.contracts.files import atomic_path
from dataset_builders.contracts.sample import Sample, SkipSample
from dataset_builders.contracts.sample_record import to_fields
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.images import ImageInfo, ImageLimits, check_image
from dataset_builders.parts import Part, SkippedRow
from dataset_builders.registry import get_builder
from stages.workers import StageResources, run_tasks

SCAN_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("reason", pa.string()),  # null: usable so far
        ("detail", pa.string()),
        ("digest", pa.binary(32)),  # the sample's; null where there is a reason, as are all the following
        ("size", pa.int64()),  # bytes in a shard
        ("answer_chars", pa.list_(pa.int32())),
        ("images", pa.list_(pa.binary(32))),  # SHA-256 of the encoded bytes
        ("widths", pa.list_(pa.int32())),
        ("heights", pa.list_(pa.int32())),
        ("formats", pa.list_(pa.string())),
        ("modes", pa.list_(pa.string())),
        ("rotated", pa.list_(pa.bool_())),  # by EXIF
    ]
)
_TAR_BLOCK = 512
_REMEMBERED = 256  # checked images a worker remembers: neighbouring rows often show the same picture
_FLUSH_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanTask:
    """One part to scan, and where the result goes."""

    part: Part
    builder: str
    options: StrictModel
    limits: ImageLimits
    out: Path


def scan_part(task: ScanTask) -> int:
    """Write the part's scan table (SCAN_SCHEMA), whole or not at all; returns the raw rows read."""
    images = _ImageChecks(task.limits)
    with atomic_path(task.out) as tmp, pq.ParquetWriter(tmp, SCAN_SCHEMA) as writer:
        rows: list[dict[str, object]] = []
        for item in get_builder(task.builder).iter_part(task.part, task.options, None):
            rows.append(_scan(item, images))
            if len(rows) == _FLUSH_ROWS:
                writer.write_table(pa.Table.from_pylist(rows, SCAN_SCHEMA))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, SCAN_SCHEMA))
    return task.part.num_rows


def scan_all(tasks: Sequence[ScanTask], resources: StageResources) -> pa.Table:
    """Scan the parts that are not scanned yet; all scans as one table, with `part`, the part's number, in each row.

    Progress is reported in raw rows, up to half of twice their number: the second half is for writing.
    """
    rows = sum(task.part.num_rows for task in tasks)
    to_do = [task for task in tasks if not task.out.is_file()]
    done = rows - sum(task.part.num_rows for task in to_do)
    for _, num_rows in run_tasks(scan_part, to_do, resources.num_workers):
        done += num_rows
        resources.report(done, 2 * rows)
    tables = [pq.read_table(task.out) for task in tasks]
    numbered = [t.append_column("part", pa.array([i] * len(t), pa.int32())) for i, t in enumerate(tables)]
    return pa.concat_tables(numbered).combine_chunks()


class _ImageChecks:
    """check_image with a short memory."""

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits
        self._known: dict[bytes, ImageInfo] = {}

    def check(self, data: bytes) -> tuple[bytes, ImageInfo]:
        """(SHA-256, what it is); raises SkipSample."""
        digest = hashlib.sha256(data).digest()
        info = self._known.get(digest)
        if info is None:
            info = check_image(data, self.limits)
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[digest] = info
        return digest, info


def _scan(item: Sample | SkippedRow, images: _ImageChecks) -> dict[str, object]:
    if isinstance(item, SkippedRow):
        return {"key": item.key, "reason": item.reason, "detail": item.detail}
    checked: list[tuple[bytes, ImageInfo]] = []
    for i, data in enumerate(item.images):
        try:
            checked.append(images.check(data))
        except SkipSample as skip:
            return {"key": item.key, "reason": skip.reason, "detail": f"image {i}: {skip.detail}"}
    return {
        "key": item.key,
        "digest": bytes.fromhex(item.digest()),
        "size": _tar_size(item),
        "answer_chars": [len(m.text) for m in item.messages if m.role == "assistant"],
        "images": [digest for digest, _ in checked],
        "widths": [info.width for _, info in checked],
        "heights": [info.height for _, info in checked],
        "formats": [info.format for _, info in checked],
        "modes": [info.mode for _, info in checked],
        "rotated": [info.orientation != 1 for _, info in checked],
    }


def _tar_size(sample: Sample) -> int:
    """Bytes of the sample's members in a tar: a header block and whole blocks of content each."""
    sizes = (len(data) for data in to_fields(sample).values())
    return sum(_TAR_BLOCK + -(-size // _TAR_BLOCK) * _TAR_BLOCK for size in sizes)
