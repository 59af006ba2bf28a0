"""A program that writes rows of other tools in a form that builders read. The messages of `athanor init` name it.

    python -m dataset_builders.recognise.rewrite trl data/train.jsonl data/val.jsonl
    python -m dataset_builders.recognise.rewrite list --with=/data/items data/rows.json

The form says how rows are taken out of each file; `--help` has all forms. The old file stays, as NAME.old. JSON becomes
JSON lines of the same name, CSV becomes NAME.csv.jsonl, and a table becomes parquet.
"""

import argparse
import ast
import csv
import json
import os
import re
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.readers.annotations import local_path
from dataset_builders.readers.source_files import IMAGE_SUFFIXES
from dataset_builders.readers.table_files import ARROW_SUFFIXES
from dataset_builders.readers.text_files import CSV_SUFFIXES, csv_header

# Label Studio's columns beside the data and the answers, in JSON-MIN and CSV.
LABEL_STUDIO = ("id", "annotator", "annotation_id", "created_at", "updated_at", "lead_time", "agreement")

Row = dict[str, Any]


def trl(rows: list[Row]) -> Iterator[Row]:
    """Join prompt and completion to messages; answers of the prompt are not trained on."""
    for row in rows:
        prompt = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in row["prompt"]]
        others = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        yield {"messages": prompt + row["completion"], **others}


def label_studio(rows: list[Row]) -> Iterator[Row]:
    """Leave out the columns of Label Studio's JSON-MIN or CSV, and name its local files by their paths."""
    for row in rows:
        kept = {name: value for name, value in row.items() if name not in LABEL_STUDIO}
        yield {name: _path(value) for name, value in kept.items()}


def label_studio_tasks(tasks: list[Row]) -> Iterator[Row]:
    """Take the first annotation of each of Label Studio's tasks; tasks without a result are left out."""
    results_of = [(task, task["annotations"][0]["result"] if task["annotations"] else []) for task in tasks]
    is_one = len({result["from_name"] for _, results in results_of for result in results}) == 1
    for task, results in results_of:
        if results:
            data = {name: _path(value) for name, value in task["data"].items()}
            answers = {
                "answer" if is_one else result["from_name"]: next(iter(result["value"].values())) for result in results
            }
            yield {**data, **answers}


def _path(value: Any) -> Any:
    return local_path(value) if isinstance(value, str) else value


def webdataset_table(rows: list[Row]) -> Iterator[Row]:
    """Take the fields of the column json, and name the column of the image image."""
    for row in rows:
        others = {name: value for name, value in row.items() if not name.startswith("__") and name != "json"}
        inner = row["json"] if isinstance(row["json"], dict) else json.loads(row["json"])
        yield {**{"image" if name in IMAGE_SUFFIXES else name: value for name, value in others.items()}, **inner}


def turns_in_text(rows: list[Row]) -> Iterator[Row]:
    """Parse each cell of lists or objects, as JSON or in the form that pandas writes."""
    for row in rows:
        yield {name: parsed_cell(value) for name, value in row.items() if value}


def parsed_cell(text: Any) -> Any:
    """Return the list or object that a cell holds, as JSON or as the Python expression that pandas writes."""
    if isinstance(text, str) and text[:1] in ("[", "{"):
        for parse in (json.loads, ast.literal_eval):
            try:
                return parse(text)
            except (ValueError, SyntaxError, RecursionError):
                continue
    return text


def items(rows: list[Row], name: str) -> Iterator[Row]:
    """Make a row of each object in the lists of column NAME."""
    for row in rows:
        yield from ({**{key: value for key, value in row.items() if key != name}, **item} for item in row[name])


def pairs(rows: list[Row]) -> Iterator[Row]:
    """Make a row of each pair of the lists questions and answers."""
    for row in rows:
        for question, answer in zip(row["questions"], row["answers"]):
            yield {**row, "questions": question, "answers": answer}


def answers(rows: list[Row], name: str, field: str = "") -> Iterator[Row]:
    """Make texts of the objects or lists in column NAME: their field FIELD, or JSON."""

    def text(value: Any) -> Any:
        return value[field] if field else json.dumps(value, ensure_ascii=False)

    for row in rows:
        value = row[name]
        yield {**row, name: [text(item) for item in value] if isinstance(value, list) else text(value)}


def list_at(value: Row, pointer: str = "") -> list[Row]:
    """Take the list at a JSON pointer, such as /data/items; without one, the longest list of the object."""
    if not pointer:
        return max((each for each in value.values() if isinstance(each, list)), key=len)
    for name in pointer.split("/")[1:]:
        value = value[name.replace("~1", "/").replace("~0", "~")]
    return value


def keys(value: dict[str, Row]) -> Iterator[Row]:
    """Make a row of the object under each key."""
    return ({"key": key, **row} for key, row in value.items())


def columns(value: dict[str, Any]) -> Iterator[Row]:
    """Make rows of an object that has a list, or an object by row numbers, for each column."""
    cells = (list(each.values()) if isinstance(each, dict) else each for each in value.values())
    return (dict(zip(value, row)) for row in zip(*cells))


def pandas_split(value: Row) -> Iterator[Row]:
    """Make rows of a table of pandas, orient split."""
    return (dict(zip(value["columns"], row)) for row in value["data"])


def header(rows: list[list]) -> Iterator[Row]:
    """Make rows of lists, of which the first has the names."""
    return (dict(zip(rows[0], row)) for row in rows[1:])


def lists(rows: list[list], *fields: str) -> Iterator[Row]:
    """Make rows of lists by fields such as answer={1}; image=images/{2}.png is a text around an item."""
    for row in rows:
        new: Row = {}
        for name, _, text in (field.partition("=") for field in fields):
            alone = re.fullmatch(r"\{(\d+)\}", text)
            new[name] = row[int(alone[1])] if alone else text.format(*row)
        yield new


def coco_captions(value: Row, folder: str = "") -> Iterator[Row]:
    """Join COCO's captions with the names of their images, which lie in FOLDER."""
    names = {image["id"]: folder + image["file_name"] for image in value["images"]}
    return ({"image": names[row["image_id"]], "caption": row["caption"]} for row in value["annotations"])


def without(rows: list[Row], text: str) -> Iterator[Row]:
    """Leave TEXT out of every text of a row: images are then named by their paths below the data."""
    return (_changed(row, lambda value: value.replace(text, "") if isinstance(value, str) else value) for row in rows)


def take_images(rows: list[Row], folder: str) -> Iterator[Row]:
    """Take in the images that the rows of a table in FOLDER name by their paths."""

    def taken(value: Any) -> Any:
        is_struct = isinstance(value, dict) and value.get("path") and not value.get("bytes")
        is_name = isinstance(value, str) and value.lower().endswith(IMAGE_SUFFIXES)
        if not is_struct and not is_name:
            return value
        return {"bytes": Path(folder, value["path"] if is_struct else value).read_bytes(), "path": None}

    for row in rows:
        yield {
            name: [taken(item) for item in value] if isinstance(value, list) else taken(value)
            for name, value in row.items()
        }


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with `change` applied to each value in it that is no list and no object."""
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list) else change(value)


# Form -> the function that makes rows of a file's rows, or of its JSON value, and of the texts that `--with` gives.
# Three forms are no functions of this kind: splits writes several files, take_images reads files beside the table, and
# tar_names writes a tar.
_FUNCTIONS = (
    *(answers, coco_captions, columns, header, items, keys, label_studio, label_studio_tasks, lists, pairs),
    *(pandas_split, trl, turns_in_text, webdataset_table, without),
)
FORMS: dict[str, Callable[..., Iterable[Row]]] = {"list": list_at, **{each.__name__: each for each in _FUNCTIONS}}


def write_anew(path: str, form: str, arguments: list[str]) -> list[str]:
    """Write a file's rows anew, keep the old file as NAME.old, and return the names of the new files."""
    if os.path.exists(f"{path}.old"):
        raise ValueError(f"{path}.old is there already; move it away")  # or the oldest file would be lost
    if form == "tar_names":
        rename_members(path, f"{path}.new")
        os.rename(path, f"{path}.old")
        os.rename(f"{path}.new", path)
        return [path]
    value = read_value(path)
    if form == "splits":
        new = {
            os.path.join(os.path.dirname(path), f"{each.rpartition('/')[2]}.jsonl"): list_at(value, each)
            for each in arguments
        }
    elif form == "take_images":
        new = {_new_name(path): list(take_images(value, os.path.dirname(path)))}
    else:
        new = {_new_name(path): list(FORMS[form](value, *arguments))}
    if not all(new.values()):
        raise ValueError("no row would be left")
    os.rename(path, f"{path}.old")
    for name, rows in new.items():
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), name)
        else:
            Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return list(new)


def rename_members(old: str, new: str) -> None:
    """Write a tar anew, with `_` for each dot of a member's name but the last."""
    with tarfile.open(old) as source, tarfile.open(new, "w") as target:
        for member in source:
            if member.isfile():
                stem, suffix = os.path.splitext(member.name)
                target.addfile(member.replace(name=stem.replace(".", "_") + suffix), source.extractfile(member))


def read_value(path: str) -> Any:
    """Return all rows of a table, a CSV file or JSON lines, or the value of a JSON file."""
    if path.endswith(CSV_SUFFIXES):
        csv.field_size_limit(1 << 30)
        with open(path, encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file, delimiter=csv_header(Path(path)).delimiter))
    if path.endswith(".parquet"):
        return pq.read_table(path).to_pylist()
    if path.endswith(ARROW_SUFFIXES):
        with pa.OSFile(path) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file).read_all().to_pylist()
    data = Path(path).read_bytes()
    if path.endswith(".json"):
        try:
            return json.loads(data)
        except ValueError:  # JSON lines, whatever the name says
            pass
    return [json.loads(line) for line in data.split(b"\n") if line.strip()]


def _new_name(path: str) -> str:
    if path.endswith(CSV_SUFFIXES):
        return f"{path}.jsonl"
    is_table = path.endswith((".parquet", *ARROW_SUFFIXES))
    return f"{path.removesuffix('.parquet')}.parquet" if is_table else path


def main() -> int:
    described = "\n".join(f"  {name:20}{' '.join(each.__doc__.split())}" for name, each in sorted(FORMS.items()))
    described += "\n  splits              Write a file for each list at a JSON pointer, named after its last key."
    described += "\n  take_images         Take in the images that the rows of a table name by their paths."
    described += "\n  tar_names           Write a tar anew, with _ for each dot of a member's name but the last."
    parser = argparse.ArgumentParser(
        prog="python -m dataset_builders.recognise.rewrite",
        description="Write rows of other tools anew, as rows that builders read. The old file stays, as NAME.old.",
        epilog=f"forms:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("form", choices=[*FORMS, "splits", "take_images", "tar_names"], metavar="FORM")
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument(
        "--with", dest="arguments", action="append", default=[], metavar="TEXT", help="what the form needs, in order"
    )
    args = parser.parse_args()
    for path in args.files:
        try:
            names = write_anew(path, args.form, args.arguments)
        # Whatever a file lacks for a form shows itself in the form's own lines; nothing was written then.
        except (OSError, ValueError, LookupError, TypeError, AttributeError, tarfile.TarError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            print(
                f"{path} cannot be read as {args.form} ({why}); it is as it was; --help has all forms", file=sys.stderr
            )
            return 2
        print(f"{', '.join(names)} written; the old file is {path}.old")
    return 0


if __name__ == "__main__":
    sys.exit(main())
