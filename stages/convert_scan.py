"""Pass 1 of convert: every raw row read and checked once; what is kept of it is a line of hashes and figures."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from dataset_builders.contracts.files import atomic_path
from dataset_builders.contracts.sample import IMAGE_SLOT, Sample, SkipSample
from dataset_builders.contracts.sample_record import to_fields
from dataset_builders.contracts.store import StorePath, local_copy
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.images import ImageInfo, ImageLimits, check_image
from dataset_builders.parts import Part, SkippedRow
from dataset_builders.registry import get_builder
from stages.script_counts import count_scripts
from stages.workers import StageResources, run_tasks

_PICTURE = pa.struct(
    [
        ("sha256", pa.binary(32)),  # of the encoded bytes
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("format", pa.string()),
        ("mode", pa.string()),
        ("rotated", pa.bool_()),  # by EXIF
    ]
)
# A row for each sample, usable or not. Where there is a reason, all fields after `detail` are null. Fields of turns
# have an entry for each user message (question) or assistant message (answer).
SCAN_SCHEMA = pa.schema(
    [
        ("key", pa.large_string()),
        ("reason", pa.string()),  # null: usable so far
        ("detail", pa.large_string()),
        ("digest", pa.binary(32)),  # the sample's
        ("size", pa.int64()),  # bytes in a shard
        ("pictures", pa.list_(_PICTURE)),
        ("checksums", pa.list_(pa.uint64())),  # xxh3_64 of each image's bytes
        ("question_chars", pa.list_(pa.int32())),  # without image slots
        ("question_words", pa.list_(pa.int32())),  # between white space
        ("answer_chars", pa.list_(pa.int32())),
        ("answer_words", pa.list_(pa.int32())),
        ("answers", pa.list_(pa.string())),  # the first ANSWER_CHARS characters
        ("answer_hashes", pa.list_(pa.uint64())),  # xxh3_64 of those
        ("scripts", pa.list_(pa.string())),
        ("letters", pa.list_(pa.int64())),  # of each of `scripts`, in all messages
    ]
)
PLAN_COLUMNS = ("key", "reason", "detail", "digest", "size", "pictures")
ANSWER_CHARS = 60
_TAR_BLOCK = 512
_REMEMBERED = 256  # checked images a worker remembers: neighbouring rows often show the same picture
_FLUSH_ROWS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanTask:
    """One part to scan, and where the result goes.

    Attributes:
        decode: whether images are decoded, or only their headers read.
    """

    part: Part
    builder: str
    options: StrictModel
    limits: ImageLimits
    decode: bool
    out: StorePath


@dataclass(frozen=True, slots=True)
class Scan:
    """What the plan sees of all parts: PLAN_COLUMNS of every sample, in order. It is all that grows with the source.

    Attributes:
        table: a row a sample.
        starts: (parts + 1,) int64: where each part's rows begin in the table, and the table's end.
    """

    table: pa.Table
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    def part_of(self, rows: np.ndarray) -> np.ndarray:
        """(m,) row numbers -> (m,) part numbers."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def each(self, of_parts: Sequence[int]) -> np.ndarray:
        """A value a part -> (n,) int8, a value a row."""
        return np.repeat(np.array(of_parts, np.int8), np.diff(self.starts))


def scan_path(work: StorePath, number: int) -> StorePath:
    """Where the scan of part `number` lies while convert works."""
    return work / "scan" / f"{number:06d}.parquet"


def scan_part(task: ScanTask) -> int:
    """Write the part's scan table (SCAN_SCHEMA), whole or not at all; returns the raw rows read."""
    images = _ImageChecks(task.limits, task.decode)
    items = get_builder(task.builder).iter_part(task.part, task.options, None)
    with atomic_path(task.out) as tmp, pq.ParquetWriter(tmp, SCAN_SCHEMA) as writer:
        lines: list[dict[str, object]] = []
        for item in _nothing_lost(task.part, items):
            lines.append(_scan(item, images))
            if len(lines) == _FLUSH_ROWS:
                writer.write_table(pa.Table.from_pylist(lines, SCAN_SCHEMA))
                lines = []
        writer.write_table(pa.Table.from_pylist(lines, SCAN_SCHEMA))
    return task.part.num_rows


def scan_all(tasks: Sequence[ScanTask], resources: StageResources) -> Scan:
    """Scan the parts that are not scanned yet, and read what the plan needs of all of them.

    Progress is reported in raw rows, up to half of twice their number: the second half is for writing.
    """
    rows = sum(task.part.num_rows for task in tasks)
    to_do = [task for task in tasks if not task.out.is_file()]
    done = rows - sum(task.part.num_rows for task in to_do)
    for _, num_rows in run_tasks(scan_part, to_do, resources):
        done += num_rows
        resources.report(done, 2 * rows)
    tables = [read_scan(task.out, PLAN_COLUMNS) for task in tasks]
    starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64)
    return Scan(pa.concat_tables(tables), starts)


def read_scan(path: StorePath, columns: Sequence[str]) -> pa.Table:
    """Some columns of one part's scan."""
    with pq.ParquetFile(local_copy(path)) as file:
        return file.read(columns=list(columns))


def assert_parts_apart(parts: Sequence[Part]) -> None:
    """No two parts hold the same row of a subset, so that no two samples have the same key."""
    spans = sorted((part.subset, part.first_row, part.num_rows, part.name) for part in parts)
    for (subset, first, rows, name), (next_subset, next_first, _, next_name) in pairwise(spans):
        assert subset != next_subset or first + rows <= next_first, f"{name} and {next_name} share keys of {subset}"


def _nothing_lost(part: Part, items: Iterator[Sample | SkippedRow]) -> Iterator[Sample | SkippedRow]:
    """The items as they come, once it is sure that every raw row gave one and that no key comes twice."""
    row, rows, keys = -1, 0, set()
    for item in items:
        number = part.row(item.key)
        if number != row:
            row, rows, keys = number, rows + 1, set()
        assert item.key not in keys, f"{part.name}: the key {item.key} comes twice"
        keys.add(item.key)
        assert item.key.startswith(f"{part.subset}/"), f"{part.name}: {item.key} is no key of {part.subset}"
        assert rows <= part.num_rows and part.first_row <= row < part.first_row + part.num_rows, f"{part.name}: {row}"
        yield item
    assert rows == part.num_rows, f"{part.name}: {part.num_rows} raw rows, but the builder tells of {rows}"


class _ImageChecks:
    """check_image with a short memory."""

    def __init__(self, limits: ImageLimits, decode: bool) -> None:
        self.limits, self.decode = limits, decode
        self._known: dict[bytes, ImageInfo] = {}

    def check(self, data: bytes) -> tuple[bytes, ImageInfo]:
        """(SHA-256, what it is); raises SkipSample."""
        digest = hashlib.sha256(data).digest()
        info = self._known.get(digest)
        if info is None:
            info = check_image(data, self.limits, self.decode)
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[digest] = info
        return digest, info


def _scan(item: Sample | SkippedRow, images: _ImageChecks) -> dict[str, object]:
    if isinstance(item, SkippedRow):
        return {"key": item.key, "reason": item.reason, "detail": _storable(item.detail)}
    checked: list[tuple[bytes, ImageInfo]] = []
    for i, data in enumerate(item.images):
        try:
            checked.append(images.check(data))
        except SkipSample as skip:
            return {"key": item.key, "reason": skip.reason, "detail": _storable(f"image {i}: {skip.detail}")}
    digests = [digest.hex() for digest, _ in checked]
    return {
        "key": item.key,
        "digest": bytes.fromhex(item.digest(digests)),
        "size": _tar_size(item, digests),
        "pictures": [_picture(digest, info) for digest, info in checked],
        "checksums": [xxhash.xxh3_64_intdigest(data) for data in item.images],
        **_text_figures(item),
    }


def _picture(digest: bytes, info: ImageInfo) -> dict[str, object]:
    return {
        "sha256": digest,
        "width": info.width,
        "height": info.height,
        "format": info.format,
        "mode": info.mode,
        "rotated": info.orientation != 1,
    }


def _text_figures(sample: Sample) -> dict[str, object]:
    questions = [m.text.replace(IMAGE_SLOT, "") for m in sample.messages if m.role == "user"]
    answers = [m.text for m in sample.messages if m.role == "assistant"]
    scripts = count_scripts("\n".join(m.text.replace(IMAGE_SLOT, "") for m in sample.messages))
    cut = [answer[:ANSWER_CHARS] for answer in answers]
    return {
        "question_chars": [len(text) for text in questions],
        "question_words": [len(text.split()) for text in questions],
        "answer_chars": [len(text) for text in answers],
        "answer_words": [len(text.split()) for text in answers],
        "answers": cut,
        "answer_hashes": [xxhash.xxh3_64_intdigest(text.encode()) for text in cut],
        "scripts": list(scripts),
        "letters": list(scripts.values()),
    }


def _storable(text: str) -> str:
    """Text that UTF-8 can say: half a surrogate pair becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _tar_size(sample: Sample, digests: Sequence[str]) -> int:
    """Bytes of the sample's members in a tar: a header block and whole blocks of content each."""
    sizes = (len(data) for data in to_fields(sample, digests).values())
    return sum(_TAR_BLOCK + -(-size // _TAR_BLOCK) * _TAR_BLOCK for size in sizes)
