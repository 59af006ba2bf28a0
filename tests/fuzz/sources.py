"""For each builder, a source whose rows are mutations of valid rows, and a source that is one damaged file."""

import csv
import io
import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.hostile import changed, spoilt, text, value
from tests.helpers.json_rows import data_uri
from tests.helpers.raw_rows import BROKEN_EXIF, encode, grey16_png, jpeg_with_exif, picture

IMAGES = (
    encode(picture(1)),
    encode(picture(2), "JPEG"),
    encode(picture(3), "JPEG", progressive=True),
    encode(picture(4), "WEBP"),
    encode(picture(5), "WEBP", lossless=True),
    encode(picture(6), "GIF"),
    encode(picture(7), "TIFF"),
    encode(picture(8), "TIFF", compression="tiff_lzw"),
    encode(picture(9), "BMP"),
    encode(picture(10), "PPM"),
    encode(picture(11, mode="RGBA")),
    encode(picture(12, mode="P")),
    encode(picture(13, mode="CMYK"), "JPEG"),
    encode(picture(14), "JPEG2000"),
    encode(picture(15), "AVIF"),
    encode(picture(16), "GIF", save_all=True, append_images=[picture(17)]),
    grey16_png(np.arange(1024).reshape(32, 32) * 60),
    *(jpeg_with_exif(picture(18), block) for block in BROKEN_EXIF.values()),
)
Make = Callable[[random.Random, int, Path], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """The way in which one builder is fuzzed: its options, a function that writes a source with a number of rows, and
    the file to damage."""

    options: dict[str, Any]
    write: Make
    file: str


def image(rng: random.Random) -> bytes:
    """Return a valid image or a damaged one."""
    data = rng.choice(IMAGES)
    return data if rng.random() < 0.5 else spoilt(rng, data)


def _utf8(rng: random.Random, words: str | None) -> bytes | None:
    if words is None or rng.random() < 0.02:
        return None
    data = words.encode("utf-8", "surrogatepass")  # half of a surrogate pair is not valid UTF-8, but a file can hold it
    return spoilt(rng, data) if rng.random() < 0.05 else data


def _table(path: Path, rows: list[dict[str, Any]], schema: Callable[[pa.DataType], pa.Schema]) -> None:
    """Write rows of bytes under the schema whose texts are text. Nothing checks that they are text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seen, columns = schema(pa.string()), pa.Table.from_pylist(rows, schema(pa.binary())).combine_chunks().columns
    arrays = [column.chunk(0).view(field.type) for column, field in zip(columns, seen)]
    pq.write_table(pa.Table.from_arrays(arrays, schema=seen), path, row_group_size=50)


def _picture_struct(rng: random.Random) -> dict[str, Any] | None:
    choice = rng.random()
    if choice < 0.05:
        return None
    path = _utf8(rng, rng.choice(("a.png", text(rng)))) if rng.random() < 0.2 else None
    return {"bytes": None if choice < 0.1 else image(rng), "path": path}


def _struct(kind: pa.DataType) -> pa.StructType:
    return pa.struct({"bytes": pa.binary(), "path": kind})


def write_cauldron(rng: random.Random, count: int, source: Path) -> None:
    def schema(kind: pa.DataType) -> pa.Schema:
        pair = pa.struct({"user": kind, "assistant": kind, "source": kind})
        return pa.schema({"images": pa.list_(_struct(kind)), "texts": pa.list_(pair)})

    def pair() -> dict[str, Any] | None:
        words = {"user": "What is it?", "assistant": "seven", "source": "a"}
        changed_words = {k: text(rng) if rng.random() < 0.2 else v for k, v in words.items()}
        return None if rng.random() < 0.03 else {k: _utf8(rng, v) for k, v in changed_words.items()}

    rows = [
        {
            "images": None if rng.random() < 0.03 else [_picture_struct(rng) for _ in range(rng.randrange(3))],
            "texts": None if rng.random() < 0.03 else [pair() for _ in range(rng.randrange(4))],
        }
        for _ in range(count)
    ]
    _table(source / "s/train-0.parquet", rows, schema)


CORD = {
    "gt_parse": {"menu": [{"nm": "Nasi", "price": "9.000"}, {"nm": "Teh", "cnt": "1"}], "total": {"total_price": "9"}},
    "meta": {"version": "2.0", "split": "train", "image_id": 0},
    "valid_line": [],
}


def write_cord(rng: random.Random, count: int, source: Path) -> None:
    def truth() -> str:
        raw = json.dumps(changed(rng, CORD if rng.random() < 0.8 else {"gt_parses": [CORD["gt_parse"]] * 2}))
        return raw if rng.random() < 0.8 else text(rng)

    def schema(kind: pa.DataType) -> pa.Schema:
        return pa.schema({"image": _struct(kind), "ground_truth": kind})

    rows = [{"image": _picture_struct(rng), "ground_truth": _utf8(rng, truth())} for _ in range(count)]
    _table(source / "train-0.parquet", rows, schema)


def write_table(rng: random.Random, count: int, source: Path) -> None:
    def schema(kind: pa.DataType) -> pa.Schema:
        return pa.schema({"picture": pa.binary(), "ask": kind, "reply": pa.list_(kind)})

    def words() -> bytes | None:
        return _utf8(rng, text(rng) if rng.random() < 0.7 else "seven")

    rows = [
        {"picture": None if rng.random() < 0.1 else image(rng), "ask": words(), "reply": [words()] * rng.randrange(3)}
        for _ in range(count - 2 * (count // 3))
    ]
    _table(source / "s/0.parquet", rows, schema)
    (source / "s/a.png").write_bytes(image(rng))
    cells = [{"picture": "a.png", "ask": "What?", "reply": "b"} for _ in range(2 * (count // 3))]
    cells = [row | {rng.choice(list(row)): text(rng)} if rng.random() < 0.7 else row for row in cells]
    with (source / "s/1.csv").open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        writer = csv.DictWriter(file, list(cells[0]), quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(cells[: count // 3])
    rows = [changed(rng, row) if rng.random() < 0.5 else row for row in cells[count // 3 :]]
    (source / "s/2.jsonl").write_bytes(b"\n".join(_json_line(rng, row) for row in rows))


def mutated(rng: random.Random, row: Any) -> Any:
    """Return a row as it is, with changed values, or any other value."""
    return row if rng.random() < 0.2 else changed(rng, row) if rng.random() < 0.9 else value(rng)


def openai_row(rng: random.Random) -> Any:
    parts = [
        {"type": "text", "text": "Is "},
        {"type": "image_url", "image_url": {"url": data_uri(image(rng))}},
        {"type": "image", "image": rng.choice(("a.png", "b.png", data_uri(image(rng)), text(rng)))},
    ]
    rows = (
        [{"role": "system", "content": "a"}, {"role": "user", "content": parts}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": "<image>a?"}, {"role": "assistant", "content": "b", "weight": 1}],
        [{"role": "user", "content": "<image>a <ref-object>?"}, {"role": "assistant", "content": "<bbox> <bbox>"}],
    )
    chosen = rng.randrange(3)
    if rng.random() < 0.5:
        parts[2] = {"type": "text", "text": text(rng)}
    row = {"messages": rows[chosen], "id": 1} | ({"images": ["a.png"]} if chosen else {})
    if chosen == 2:
        row["objects"] = {"ref": ["b"], "bbox": [[1, 2, 30, 30], [2, 2.5, 3, 4]], "image_id": [0]}
    return mutated(rng, row)


def llava_row(rng: random.Random) -> Any:
    said = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "b"}]
    row = {"id": "1", "image": rng.choice(("a.png", "b.png", ["a.png"], text(rng))), "conversations": said}
    return mutated(rng, row)


def _json_line(rng: random.Random, row: Any) -> bytes:
    data = json.dumps(row, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    data = spoilt(rng, data) if rng.random() < 0.1 else data
    return data.replace(b"\n", b" ") or b"x"


def _json_writer(make: Callable[[random.Random], Any]) -> Make:
    def write(rng: random.Random, count: int, source: Path) -> None:
        """Write two thirds of the sources as lines, and the rest as an array."""
        source.mkdir(parents=True, exist_ok=True)
        for name in ("a.png", "b.png"):
            (source / name).write_bytes(image(rng))
        lines = [_json_line(rng, make(rng)) for _ in range(count - count // 3)]
        (source / "lines.jsonl").write_bytes(b"\n".join(line if line.strip() else b"x" for line in lines))
        (source / "array.json").write_text(json.dumps([make(rng) for _ in range(count // 3)]))

    return write


def write_tars(rng: random.Random, count: int, source: Path) -> None:
    (source / "s").mkdir(parents=True, exist_ok=True)
    with tarfile.open(source / "s/0.tar", "w", format=rng.choice((0, 1, 2))) as tar:
        for i in range(count):
            record = {"chat": [{"from": "human", "value": "<image>a?"}, {"from": "gpt", "value": "b"}]}
            record = changed(rng, record) if rng.random() < 0.7 else record
            members = [("png", image(rng)), ("json", _json_line(rng, record)), ("0.jpg", image(rng)), ("txt", b"x")]
            for field, data in rng.sample(members, rng.randrange(1, 4)):
                info = tarfile.TarInfo(f"{i:06d}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_images(rng: random.Random, count: int, source: Path) -> None:
    """Write images with texts; sometimes the image or the text is missing."""
    for i in range(count):
        stem, missing = source / f"{rng.choice(('', 'train/', 's/', 'val/s/'))}{i}", rng.random()
        stem.parent.mkdir(parents=True, exist_ok=True)
        if missing > 0.1:
            stem.with_suffix(rng.choice((".png", ".JPG", ".webp"))).write_bytes(image(rng))
        if not 0.1 < missing < 0.2:
            words = text(rng) if rng.random() < 0.5 else "seven"
            stem.with_suffix(".txt").write_bytes(_utf8(rng, words) or b"")
    (source / "notes.md").write_bytes(rng.randbytes(100))


def write_tasks(rng: random.Random, count: int, source: Path) -> None:
    """Write tasks of Label Studio in one array, which a damaged line would end."""
    source.mkdir(parents=True, exist_ok=True)
    (source / "a.png").write_bytes(IMAGES[0])
    (source / "b.png").write_bytes(image(rng))
    box = {"x": 1, "y": 2, "width": 30, "height": 40, "rotation": 0, "rectanglelabels": ["cat"]}
    result = {"type": "rectanglelabels", "value": box, "original_width": 40, "original_height": 32}
    annotations = [{"result": [result, {"type": "choices"}]}]
    tasks = [{"data": {"image": rng.choice(("a.png", "b.png"))}, "annotations": annotations} for _ in range(count)]
    (source / "array.json").write_text(json.dumps([mutated(rng, task) for task in tasks]))


KINDS: dict[str, Kind] = {
    "the_cauldron": Kind({"turns": "chat"}, write_cauldron, "s/train-0.parquet"),
    "cord_v2": Kind({}, write_cord, "train-0.parquet"),
    "table": Kind({"image": "picture", "question": "ask", "answer": "reply"}, write_table, "s/1.csv"),
    "openai_messages": Kind({}, _json_writer(openai_row), "array.json"),
    "llava": Kind({}, _json_writer(llava_row), "array.json"),
    "image_folder": Kind({"answer": "text_file", "question": "What?"}, write_images, "notes.md"),
    "detection": Kind({"layout": "label_studio", "question": "What?"}, write_tasks, "array.json"),
    "webdataset_tars": Kind({"messages": "json:chat"}, write_tars, "s/0.tar"),
}
