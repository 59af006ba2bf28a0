"""A user's own data with faults, and the line that names each fault."""

import gzip
import json
import shutil

from tests.helpers.own_data import (
    LAYOUTS,
    csv_paths,
    csv_semicolons,
    draw_rows,
    json_lines,
    llava_json,
    openai_jsonl,
    parquet_images,
)


def _drop_half_of_the_images(d, rows):
    csv_paths(d, rows)
    for row in rows[::2]:
        (d / "imgs" / f"{row.name}.png").unlink()


def _write(name, content):
    def write(d, rows):
        d.mkdir()
        (d / name).write_bytes(content if isinstance(content, bytes) else content(rows))

    return write


def _after(layout, change):
    def write(d, rows):
        layout(d, rows)
        change(d)

    return write


def _replace(name, *pairs):
    def change(d):
        text = (d / name).read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        (d / name).write_text(text)

    return change


def _broken_images(d, rows):
    csv_paths(d, rows)
    for row in rows[:5]:
        (d / "imgs" / f"{row.name}.png").write_bytes(row.image[:60])


_NUMBERS = [(f";{colour}", f";{number}") for number, colour in enumerate(("red", "blue", "green", "yellow"))]


def _jsonl(make):
    """Write a.jsonl, each line of which `make` makes from a row."""
    return _write("a.jsonl", lambda rows: "".join(json.dumps(make(row)) + "\n" for row in rows).encode())


def _line(row) -> dict:
    return {"question": row.question, "answer": row.answer}


def _said(role: str, text: str) -> dict:
    return {"role": role, "content": text}


# Fault -> (function that writes it, text of one line of stderr or of the anomalies).
FAULTS = {
    "nothing": (lambda d, rows: d.mkdir(), "it holds no file; nearest layout: JSON lines like"),
    "images alone": (
        lambda d, rows: LAYOUTS["captions"][0](d, rows) or [f.unlink() for f in d.glob("*.txt")],
        "40 images and nothing that says what to learn about them; nearest layout: a text file with its caption",
    ),
    "half of the images are missing": (
        _drop_half_of_the_images,
        "20 of 40 rows are left out as image_not_found; the first: data/00000000: 'imgs/0000.png'",
    ),
    "images in another folder": (
        _after(csv_paths, lambda d: shutil.move(d / "imgs", d.parent / "elsewhere")),
        "40 of 40 rows are image_not_found as table",
    ),
    "damaged images": (_broken_images, "5 of 40 rows are left out as truncated_image"),
    "empty csv": (_write("a.csv", b""), "a.csv has no header line"),
    "header alone": (
        _write("a.csv", b"image,question,answer\n"),
        "nearest layout: a first line `image,question,answer`",
    ),
    "no header": (
        _write("a.csv", lambda rows: "".join(f"imgs/{r.name}.png,{r.question},{r.answer}\n" for r in rows).encode()),
        "a.csv: its first line is a row and no header; write the columns' names above it, for example image",
    ),
    "csv in utf-16": (
        _write("a.csv", "image,question,answer\na.png,b,c\n".encode("utf-16")),
        "a.csv is UTF-16; convert it to UTF-8",
    ),
    "csv of Western Windows": (
        _write("a.csv", "image;answer;Gr\u00f6\u00dfe\na.png;\u201egr\u00fcn\u201c;1\n".encode("cp1252")),
        "a.csv: the header is not UTF-8; save the file again as UTF-8",
    ),
    "splits in mixed order": (
        _write("a.csv", b"question,answer,split\n" + b"a?,b,train\nc?,d,test\n" * 10),
        "a.csv: column 'split' names the split of each row, in mixed order; sort the rows by it",
    ),
    "a split that no builder reads": (
        _after(openai_jsonl, _replace("chats.jsonl", ('{"messages"', '{"split": "test", "messages"'))),
        "'split' is 'test', and no option reads it; write a file for each split, without this key",
    ),
    "a drive of Windows": (
        _after(csv_paths, _replace("data.csv", ("imgs/", "C:\\imgs\\"))),
        "a path on a drive of Windows; name the image by its path below the data",
    ),
    "csv by gzip": (
        _write("a.csv", gzip.compress(b"image,question,answer\n")),
        "a.csv is compressed by gzip; unpack it",
    ),
    "open quote": (_write("a.csv", b'image,question,answer\na.png,"b,c\nd.png,e,f\n'), "close its quote"),
    "ragged rows": (_after(csv_paths, _replace("data.csv", (",red", ""))), "the row has 3 cells, the header 4"),
    "empty answers": (_after(csv_paths, _replace("data.csv", (",blue", ","))), "left out as empty_target"),
    "no answer column": (
        _after(csv_paths, _replace("data.csv", ("answer", "thing"), ("question", "note"), ("?", "."))),
        "no column looks like an answer among: id, image, note, thing",
    ),
    "column twice": (
        _after(csv_paths, _replace("data.csv", ("id,image", "answer,image"))),
        "has the column 'answer' 2 times; rename the others",
    ),
    "json cut": (
        _after(llava_json, lambda d: (d / "train.json").write_text((d / "train.json").read_text()[:-30])),
        "train.json",
    ),
    "json lines cut": (
        _after(json_lines, _replace("vqa.jsonl", ('"response"', '"response'))),
        "vqa.jsonl: its first rows cannot be read; row 0: json_parse_error: ",
    ),
    "json of one object": (
        _write("a.json", b'{"version": 1}'),
        "a.json: no column looks like a question, and none holds images or videos, among: version",
    ),
    "numbers of classes": (
        _after(csv_semicolons, _replace("list.csv", ("Prompt", "Note"), ("?", "."), *_NUMBERS)),
        "the answers are the numbers of classes",
    ),
    "json of numbers": (
        _write("a.jsonl", b"1\n2\n3\n"),
        "a.jsonl: its first rows cannot be read; row 0: schema_error: the row is a number, not an object",
    ),
    "images from the web": (
        _jsonl(lambda row: {**_line(row), "image": "https://x.org/1.png"}),
        "addresses of the web are not fetched",
    ),
    "paths out of the data": (_jsonl(lambda row: {**_line(row), "image": "../../etc/x.png"}), "image_not_found"),
    "roles that are none": (
        _jsonl(lambda row: {"messages": [_said("robot", row.question), _said("assistant", row.answer)]}),
        "40 of 40 rows are bad_role as openai_messages",
    ),
    "no answers": (
        _jsonl(lambda row: {"messages": [_said("user", row.question)]}),
        "40 of 40 rows are bad_role as openai_messages",
    ),
    "marks without images": (
        _after(llava_json, _replace("train.json", ("<image>", "<image><image>"))),
        "40 of 40 rows are image_count_mismatch as llava",
    ),
    "parquet cut": (
        _after(parquet_images, lambda d: [f.write_bytes(f.read_bytes()[:-9]) for f in d.glob("*.parquet")]),
        "is not a readable parquet file",
    ),
    "no parquet": (_write("a.parquet", b"hello"), "a.parquet is not a readable parquet file"),
    "tar without text": (
        _after(LAYOUTS["tar_captions"][0], lambda d: shutil.copy(d / "shard-000000.tar", d / "x.tgz")),
        "files that are not read: x.tgz",
    ),
    "no tar": (_write("a.tar", b"hello" * 300), "a.tar"),
    "one answer": (
        _after(csv_paths, _replace("data.csv", (",red", ",blue"), (",green", ",blue"), (",yellow", ",blue"))),
        "answers are 'blue': there is little to learn",
    ),
    "rows twice": (
        _after(json_lines, lambda d: (d / "vqa.jsonl").write_text((d / "vqa.jsonl").read_text() * 2)),
        "40 of 80 samples repeat one before them",
    ),
    "rows in a deep folder": (
        _after(json_lines, lambda d: shutil.copytree(d, d / "more" / "yet") and None),
        "files that are not read: more/yet/vqa.jsonl",
    ),
    "rows in a deep folder alone": (
        lambda d, rows: json_lines(d / "more" / "yet", rows),
        "data/more as the data",
    ),
    "a split in an inner folder": (
        lambda d, rows: LAYOUTS["split_class_folders"][0](d / "pets", rows),
        "pets/val is named like held-out data, and its images would be trained on; give ",
    ),
    "files of no kind": (_write("a.xyz", b"x"), "none of its files is read, for example a.xyz"),
    "images that no row names": (
        _after(
            LAYOUTS["text_alone"][0],
            lambda d: csv_paths(d / "more", draw_rows(1, 3)) or (d / "more" / "data.csv").unlink(),
        ),
        "no row uses one of the 3 image or video files",
    ),
    "more broken images than a run allows": (
        _after(
            LAYOUTS["class_folders"][0],
            lambda d: [f.write_bytes(b"") for f in sorted(d.rglob("*.*"))[:5] if f.is_file()],
        ),
        "5 of 40 rows cannot be used, and a run stops above convert.max_skip_fraction=0.05",
    ),
}
