"""Pass 1 of convert: reads and checks every raw row once, and writes one row of hashes and figures per sample."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from fontTools.unicodedata import script, script_name

from dataset_builders.contracts.boxes import BOX_SLOT
from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Sample, SkipSample, Video, to_fields
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import ImageInfo, ImageLimits, check_image
from dataset_builders.readers.parts import Part, SkippedRow
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.store import StorePath
from dataset_builders.videos.decode import VideoFacts, VideoLimits, probe
from stages.shared.artifacts.row_tables import read_columns, write_rows
from stages.shared.artifacts.workers import StageResources, run_tasks

_PICTURE = pa.struct(
    [
        ("sha256", pa.binary(32)),  # of the encoded bytes
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("format", pa.string()),  # Pillow's name; of a video file libavcodec's, such as h264
        ("mode", pa.string()),  # null for a video file
        ("rotated", pa.bool_()),  # by EXIF; null for a video file
    ]
)
_VIDEO = pa.struct(
    [
        ("frames", pa.int32()),  # between start and end
        ("seconds", pa.float64()),  # from the first to the last of them
        ("has_audio", pa.bool_()),
        ("is_file", pa.bool_()),  # False: a list of frames
    ]
)
# One row per sample, usable or not. If there is a reason, all fields after `detail` are null. Question fields have one
# entry per user message, answer fields one entry per assistant message.
SCAN_SCHEMA = pa.schema(
    [
        ("key", pa.large_string()),
        ("reason", pa.string()),  # null: usable so far
        ("detail", pa.large_string()),
        ("digest", pa.binary(32)),  # the sample's digest
        ("size", pa.int64()),  # bytes in a shard
        ("pictures", pa.list_(_PICTURE)),  # one for each of `Sample.files`
        ("videos", pa.list_(_VIDEO)),
        ("checksums", pa.list_(pa.uint64())),  # xxh3_64 of each file's bytes
        ("question_chars", pa.list_(pa.int32())),  # without slots of images, videos and boxes
        ("answer_chars", pa.list_(pa.int32())),
        ("answers", pa.list_(pa.string())),  # the first ANSWER_CHARS characters
        ("answer_hashes", pa.list_(pa.uint64())),  # xxh3_64 of each entry of `answers`
        ("scripts", pa.list_(pa.string())),
        ("letters", pa.list_(pa.int64())),  # number of letters of each script, in all messages
        ("box_places", pa.int32()),  # places for boxes in its texts
        ("labels", pa.list_(pa.string())),  # of each box; empty for a box without one
    ]
)
PLAN_COLUMNS = ("key", "reason", "detail", "digest", "size", "pictures")
ANSWER_CHARS = 60
_TAR_BLOCK = 512
_SLOTS = re.compile("|".join((IMAGE_SLOT, VIDEO_SLOT, BOX_SLOT)))
_ASCII_OTHER = bytes(code for code in range(128) if not chr(code).isalpha())
_REMEMBERED = 256  # checked images, and videos, that a worker remembers: neighbouring rows often show the same


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanTask:
    """One part to scan, and the path of the result."""

    part: Part
    rows: np.ndarray | None  # (m,) int64: the rows of the subset to read; None: all rows of the part
    builder: str
    options: StrictModel
    limits: VideoLimits  # of images, too
    decode: bool  # whether images and videos are decoded; False: only their headers are read
    out: StorePath

    @property
    def num_rows(self) -> int:
        return self.part.num_rows if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True)
class Scan:
    """The columns of all parts that the plan needs. Nothing else in memory grows with the source."""

    table: pa.Table  # PLAN_COLUMNS; one row per sample, in order
    starts: np.ndarray  # (parts + 1,) int64: start index of each part's rows in the table, and the table's length

    def __len__(self) -> int:
        return len(self.table)

    def part_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the (m,) part numbers of (m,) row numbers."""
        return np.searchsorted(self.starts, rows, side="right") - 1


def scan_path(work: StorePath, number: int) -> StorePath:
    return work / "scan" / f"{number:06d}.parquet"


def scan_part(task: ScanTask) -> int:
    """Write the part's scan table (SCAN_SCHEMA) atomically; return the number of raw rows read."""
    checks = _Checks(task.limits, task.decode)
    rows = None if task.rows is None else set(task.rows.tolist())
    items = get_builder(task.builder).iter_part(task.part, task.options, rows)
    write_rows(task.out, (_scan_row(item, checks) for item in _nothing_lost(task.part, rows, items)), SCAN_SCHEMA)
    return task.num_rows


def scan_all(tasks: Sequence[ScanTask], resources: StageResources) -> Scan:
    """Scan the parts that are not scanned yet, and read the columns that the plan needs from all parts."""
    total_rows = sum(task.num_rows for task in tasks)
    to_do = [task for task in tasks if not task.out.is_file()]
    finished_rows = total_rows - sum(task.num_rows for task in to_do)
    for _, num_rows in run_tasks(scan_part, to_do, resources):
        finished_rows += num_rows
        resources.report(finished_rows, 2 * total_rows)  # the second half is for pass 2
    tables = [read_columns(task.out, PLAN_COLUMNS) for task in tasks]
    starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64)
    return Scan(pa.concat_tables(tables), starts)


def _nothing_lost(
    part: Part, chosen: set[int] | None, items: Iterator[Sample | SkippedRow]
) -> Iterator[Sample | SkippedRow]:
    """Yield the same items, and check that they are all rows of the part, or all `chosen` ones. InputError: the rows
    read differ from the rows counted; AssertionError: a key occurs twice, or is not of the part's subset."""
    expected = range(part.first_row, part.first_row + part.num_rows) if chosen is None else chosen
    row, rows, keys = -1, 0, set()
    for item in items:
        number = part.row(item.key)
        if number != row:
            row, rows, keys = number, rows + 1, set()
        assert item.key not in keys, f"{part.name}: the key {item.key} comes twice"
        keys.add(item.key)
        assert item.key.startswith(f"{part.subset}/"), f"{part.name}: {item.key} is not a key of {part.subset}"
        if rows > len(expected) or row not in expected:
            raise _miscounted(part, f"row {part.row_in_file(item.key)} is read, which is not among them")
        yield item
    if rows != len(expected):
        last = "none" if row < 0 else f"row {part.row_in_file(item.key)}"
        wanted = "" if chosen is None else f" of {len(chosen)} chosen ones"
        raise _miscounted(part, f"{rows}{wanted} are read, the last one is {last}")


def _miscounted(part: Part, what: str) -> InputError:
    counted = f"{part.num_rows} rows from row {part.file_row} on were counted"
    way_out = "if the file did not change meanwhile, report it with the rows around there"
    return InputError(f"{part.path}: {counted}, but {what}; run the same command again, and {way_out}")


class _Checks:
    """`check_image` and `probe` with a cache of recent results."""

    def __init__(self, limits: VideoLimits, decode: bool) -> None:
        self.limits, self.decode = limits, decode
        self._image_limits = ImageLimits(max_pixels=limits.max_pixels, min_side=limits.min_side)
        self._known: dict[object, ImageInfo | VideoFacts] = {}

    def image(self, data: bytes) -> dict[str, object]:
        """Return an image as a struct of _PICTURE; raise SkipSample if it cannot be used."""
        digest = hashlib.sha256(data).digest()
        info = self._once(digest, lambda: check_image(data, self._image_limits, self.decode))
        facts = {name: getattr(info, name) for name in ("width", "height", "format", "mode")}
        return {"sha256": digest, **facts, "rotated": info.orientation != 1}

    def video(self, video: Video) -> tuple[list[dict[str, object]], dict[str, object]]:
        """Return the files of a video as structs of _PICTURE, and a struct of _VIDEO."""
        files = [self.image(frame) for frame in video.frames]
        # Frames are decoded by then.
        decode = self.decode and not video.frames
        digest = hashlib.sha256(video.data).digest()
        which = (*(file["sha256"] for file in files), digest, video.start, video.end, video.timestamps)
        facts = self._once(which, lambda: probe(video, self.limits, decode))
        if not video.frames:
            files = [{"sha256": digest, "width": facts.width, "height": facts.height, "format": facts.codec}]
        return files, {
            "frames": len(facts.times),
            "seconds": facts.times[-1] - facts.times[0],
            "has_audio": facts.has_audio,
            "is_file": not video.frames,
        }

    def _once(self, which: object, check: Callable[[], Any]) -> Any:
        if which not in self._known:
            found = check()
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[which] = found
        return self._known[which]


def _scan_row(item: Sample | SkippedRow, checks: _Checks) -> dict[str, object]:
    if isinstance(item, SkippedRow):
        # Half a surrogate pair, which UTF-8 cannot store, is replaced by its escape, as in SkipSample.
        detail = item.detail.encode("utf-8", "backslashreplace").decode()
        return {"key": item.key, "reason": item.reason, "detail": detail}
    pictures: list[dict[str, Any]] = []
    videos = []
    what = ""
    try:
        for i, data in enumerate(item.images):
            what = f"image {i}"
            pictures.append(checks.image(data))
        for i, video in enumerate(item.videos):
            what = f"video {i}"
            files, about = checks.video(video)
            pictures += files
            videos.append(about)
    except SkipSample as skip:
        return {"key": item.key, "reason": skip.reason, "detail": f"{what}: {skip.detail}"}
    places = [place for message in item.messages for place in message.boxes]
    for place in places:  # the builder measured by the header, this is the decoded image
        size = (pictures[place.image]["width"], pictures[place.image]["height"])
        if place.size != size:
            detail = (
                f"boxes for image {place.image} of {place.size[0]} x {place.size[1]} px, which is {size[0]} x {size[1]}"
            )
            return {"key": item.key, "reason": "bad_box", "detail": detail}
    digests = [picture["sha256"].hex() for picture in pictures]
    # In a tar, each member has one header block and whole blocks of content.
    sizes = (len(data) for data in to_fields(item, digests).values())
    texts = [(m.role, _SLOTS.sub("", m.text)) for m in item.messages]
    beginnings = [m.text[:ANSWER_CHARS] for m in item.messages if m.role == "assistant"]
    scripts = count_scripts("\n".join(text for _, text in texts))
    return {
        "key": item.key,
        "digest": bytes.fromhex(item.digest(digests)),
        "size": sum(_TAR_BLOCK + -(-size // _TAR_BLOCK) * _TAR_BLOCK for size in sizes),
        "pictures": pictures,
        "videos": videos,
        "checksums": [xxhash.xxh3_64_intdigest(data) for data in item.files],
        "question_chars": [len(text) for role, text in texts if role == "user"],
        "answer_chars": [len(text) for role, text in texts if role == "assistant"],
        "answers": beginnings,
        "answer_hashes": [xxhash.xxh3_64_intdigest(text.encode()) for text in beginnings],
        "scripts": list(scripts),
        "letters": list(scripts.values()),
        "box_places": len(places),
        "labels": [box.label for place in places for box in place.boxes],
    }


def count_scripts(text: str) -> dict[str, int]:
    """Return Unicode's name of a script (Latin, Han, Cyrillic, ...) -> number of its letters in the text.

    Letters are the general categories L*; digits, signs and combining marks count for no script.
    """
    latin = len(text.encode("ascii", "ignore").translate(None, _ASCII_OTHER))
    counts = Counter({"Latin": latin} if latin else {})
    if not text.isascii():
        for character, number in Counter(text).items():
            if character > "\x7f" and (name := _script_of(character)) is not None:
                counts[name] += number
    return dict(counts)


@lru_cache(maxsize=1 << 16)
def _script_of(character: str) -> str | None:
    """Return the script of a letter outside ASCII; None for any other character."""
    if not unicodedata.category(character).startswith("L"):
        return None
    return script_name(script(character)).replace("_", " ")
