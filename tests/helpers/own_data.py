"""A user's own data in common layouts: images of one colour, whose name is the answer."""

import csv
import io
import json
import random
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from tests.helpers.drawn_pictures import encoded

COLOURS = {"red": (215, 38, 30), "green": (30, 160, 60), "blue": (40, 70, 210), "yellow": (240, 210, 40)}
QUESTIONS = ("Which colour is it?", "What colour do you see?", "Name the colour of the square.")


@dataclass(frozen=True, slots=True)
class Row:
    """An image, a question about it, its answer."""

    name: str
    image: bytes
    question: str
    answer: str


def draw_rows(seed: int, number: int) -> list[Row]:
    """Draw rows of squares in one of four colours, in many sizes and positions, on grey."""
    rng = random.Random(seed)
    return [_row(rng, f"{i:04}", rng.choice(list(COLOURS))) for i in range(number)]


def _row(rng: random.Random, name: str, colour: str) -> Row:
    image = Image.new("RGB", (rng.randint(64, 128), rng.randint(64, 128)), (rng.randint(90, 160),) * 3)
    draw = ImageDraw.Draw(image)
    x, y, side = rng.randint(0, 20), rng.randint(0, 20), rng.randint(24, 44)
    draw.rectangle((x, y, x + side, y + side), fill=COLOURS[colour])
    return Row(name, encoded(image), rng.choice(QUESTIONS), colour)


def write_images(folder: Path, rows: Sequence[Row]) -> None:
    for row in rows:
        file = folder / f"{row.name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(row.image)


def _lines(file: Path, rows: Sequence[object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _table(file: Path, header: Sequence[str], rows: Sequence[Sequence[str]], **dialect: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, **dialect).writerows([header, *rows])


def llava_json(d: Path, rows: Sequence[Row]) -> None:
    write_images(d / "images", rows)
    said = [
        {
            "id": row.name,
            "image": f"{row.name}.png",
            "conversations": [
                {"from": "human", "value": f"<image>\n{row.question}"},
                {"from": "gpt", "value": row.answer},
            ],
        }
        for row in rows
    ]
    (d / "train.json").write_text(json.dumps(said))


def llava_parquet(d: Path, rows: Sequence[Row]) -> None:
    said = [[{"from": "human", "value": row.question}, {"from": "gpt", "value": row.answer}] for row in rows]
    d.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": [_struct(row) for row in rows], "conversations": said}), d / "train.parquet")


def openai_jsonl(d: Path, rows: Sequence[Row]) -> None:
    write_images(d / "pictures", rows)
    _lines(d / "chats.jsonl", [{"messages": _messages(row, f"pictures/{row.name}.png")} for row in rows])


def swift_jsonl(d: Path, rows: Sequence[Row]) -> None:
    write_images(d / "img", rows)
    said = [
        {
            "messages": [
                {"role": "user", "content": f"<image>{row.question}"},
                {"role": "assistant", "content": row.answer},
            ],
            "images": [f"img/{row.name}.png"],
        }
        for row in rows
    ]
    _lines(d / "data.jsonl", said)


def csv_paths(d: Path, rows: Sequence[Row]) -> None:
    write_images(d / "imgs", rows)
    cells = [(row.name, f"imgs/{row.name}.png", row.question, row.answer) for row in rows]
    _table(d / "data.csv", ("id", "image", "question", "answer"), cells)


def csv_semicolons(d: Path, rows: Sequence[Row]) -> None:
    write_images(d / "files", rows)
    cells = [(f"{row.name}.png", row.question, row.answer) for row in rows]
    _table(d / "list.csv", ("File Name", "Prompt", "Label"), cells, delimiter=";")


def csv_of_excel(d: Path, rows: Sequence[Row]) -> None:
    """Write a CSV file as Excel does, with German names, a byte order mark, `sep=;` and paths of Windows."""
    write_images(d / "Bilder 1", rows)
    cells = [(f"Bilder 1\\{row.name}.png", row.question, row.answer) for row in rows]
    file = d / "Pr\u00fcfung Mai.csv"
    _table(file, ("Bild", "Frage", "Antwort"), cells, delimiter=";")
    file.write_bytes(b"\xef\xbb\xbfsep=;\r\n" + file.read_bytes())


def json_lines(d: Path, rows: Sequence[Row]) -> None:
    write_images(d / "images", rows)
    _lines(
        d / "vqa.jsonl",
        [{"image_path": f"images/{row.name}.png", "query": row.question, "response": row.answer} for row in rows],
    )


def parquet_images(d: Path, rows: Sequence[Row]) -> None:
    d.mkdir(parents=True, exist_ok=True)
    columns = {"image": [_struct(row) for row in rows], "question": [row.question for row in rows]}
    columns["answers"] = [[row.answer, row.answer.title()] for row in rows]
    pq.write_table(pa.table(columns), d / "train-00000-of-00001.parquet", row_group_size=20)


def arrow_dataset(d: Path, rows: Sequence[Row]) -> None:
    """Write the layout of `datasets.save_to_disk`: an Arrow stream, JSON files about it, and a cache."""
    folder = d / "train"
    folder.mkdir(parents=True)
    table = pa.table({"image": [_struct(row) for row in rows], "label": [row.answer for row in rows]})
    for name, some in (("data-00000-of-00001", table), ("cache-afa8b123ab68dffa", table[:9])):
        with pa.ipc.new_stream(folder / f"{name}.arrow", table.schema) as out:
            out.write_table(some)
    for name, content in (("train/state.json", {"_fingerprint": "x"}), ("dataset_dict.json", {"splits": ["train"]})):
        (d / name).write_text(json.dumps(content))


def captions(d: Path, rows: Sequence[Row]) -> None:
    write_images(d, rows)
    for row in rows:
        (d / f"{row.name}.txt").write_text(f"A {row.answer} square.\n")


def class_folders(d: Path, rows: Sequence[Row]) -> None:
    for row in rows:
        write_images(d / row.answer, [row])


def split_class_folders(d: Path, rows: Sequence[Row]) -> None:
    for i, row in enumerate(rows):
        write_images(d / ("val" if i % 5 == 0 else "train") / row.answer, [row])


def caption_table(d: Path, rows: Sequence[Row]) -> None:
    """Write the layout of `datasets`' ImageFolder: metadata.csv in the directory of the images."""
    write_images(d, rows)
    _table(d / "metadata.csv", ("file_name", "text"), [(f"{row.name}.png", f"a {row.answer} square") for row in rows])


def tar_captions(d: Path, rows: Sequence[Row]) -> None:
    _tar(d / "shard-000000.tar", [(row.name, {"png": row.image, "txt": row.answer.encode()}) for row in rows])


def tar_json(d: Path, rows: Sequence[Row]) -> None:
    records = [json.dumps({"question": row.question, "answer": row.answer}).encode() for row in rows]
    members = [(row.name, {"png": row.image, "json": record}) for row, record in zip(rows, records)]
    _tar(d / "000000.tar", members)


def cauldron(d: Path, rows: Sequence[Row]) -> None:
    (d / "squares").mkdir(parents=True)
    texts = [[{"user": row.question, "assistant": row.answer, "source": "squares"}] for row in rows]
    table = pa.table({"images": [[_struct(row)] for row in rows], "texts": texts})
    pq.write_table(table, d / "squares" / "train-00000-of-00001.parquet")


def text_alone(d: Path, rows: Sequence[Row]) -> None:
    cells = [(f"{row.question} It is the {i}th and {row.answer}.", row.answer) for i, row in enumerate(rows)]
    _table(d / "faq.csv", ("Question", "Answer"), cells)


# Layout -> (function that writes it, the builder that reads it).
LAYOUTS: dict[str, tuple[Callable[[Path, Sequence[Row]], None], str]] = {
    "llava_json": (llava_json, "llava"),
    "llava_parquet": (llava_parquet, "llava"),
    "openai_jsonl": (openai_jsonl, "openai_messages"),
    "swift_jsonl": (swift_jsonl, "openai_messages"),
    "csv_paths": (csv_paths, "table"),
    "csv_semicolons": (csv_semicolons, "table"),
    "csv_of_excel": (csv_of_excel, "table"),
    "json_lines": (json_lines, "table"),
    "parquet_images": (parquet_images, "table"),
    "arrow_dataset": (arrow_dataset, "table"),
    "caption_table": (caption_table, "table"),
    "text_alone": (text_alone, "table"),
    "captions": (captions, "image_folder"),
    "class_folders": (class_folders, "image_folder"),
    "split_class_folders": (split_class_folders, "image_folder"),
    "tar_captions": (tar_captions, "webdataset_tars"),
    "tar_json": (tar_json, "webdataset_tars"),
    "cauldron": (cauldron, "the_cauldron"),
}


def _struct(row: Row) -> dict[str, object]:
    return {"bytes": row.image, "path": f"{row.name}.png"}


def _messages(row: Row, url: str) -> list[dict[str, object]]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": row.question}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": row.answer}]


def _tar(file: Path, samples: Sequence[tuple[str, dict[str, bytes]]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, fields in samples:
            for field, data in fields.items():
                info = tarfile.TarInfo(f"{name}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
