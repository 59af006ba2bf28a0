"""Rows of other tools that no builder reads as they are, such as those of TRL and Label Studio: what they are, and the
command of `rewrite.py` that writes them anew.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import dirname, relpath
from pathlib import PurePosixPath
from typing import Any

from dataset_builders.readers.parts import HELDOUT, TRAIN, split_of, words_of
from dataset_builders.readers.source_files import IMAGE_SUFFIXES, MEDIA_SUFFIXES, SourceFile, open_at
from dataset_builders.readers.text_files import CSV_SUFFIXES, MAX_ROW_BYTES
from dataset_builders.recognise import rewrite
from dataset_builders.recognise.columns import Columns, are_questions, find_columns
from dataset_builders.recognise.rewrite import parsed_cell
from dataset_builders.storage.store import is_local

RUN = "; run: "  # before a command, which ends its message
_ROWS = 40
_PLAIN_RESULTS = ("choices", "textarea", "taxonomy", "rating", "number")
_VALUES = ("text", "answer", "value", "label", "content", "caption", "name")  # fields that are an answer's text


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Rows that have to be written anew."""

    what: str  # the form of the rows, in words for the user
    form: str = ""  # a form of `rewrite.py`; empty: no command can know the rows
    arguments: tuple[str, ...] = ()  # the texts that the form needs


def advice(rewrites: Mapping[Rewrite, Sequence[SourceFile]]) -> str:
    """Return what the files of each form hold, and the commands that write them anew."""
    whats = []
    for each, files in rewrites.items():
        names = ", ".join(file.name for file in files[:3]) + (" ..." if len(files) > 3 else "")
        whats.append(f"{names}: {each.what}")
    commands = [command(each, files) for each, files in rewrites.items() if each.form]
    where = "" if all(is_local(file.path) for files in rewrites.values() for file in files) else " on a copy here"
    way_out = f"; write the rows anew{where}{RUN}{' && '.join(commands)}" if commands else ""
    return "; ".join(dict.fromkeys(whats)) + way_out


def command(each: Rewrite, files: Sequence[SourceFile]) -> str:
    """Return a line for the shell. The old files stay, as NAME.old."""
    paths = [str(file.path) if is_local(file.path) else file.path.name for file in files]
    words = [sys.executable, "-m", rewrite.__name__, each.form, *(f"--with={text}" for text in each.arguments)]
    return shlex.join([*words, *paths])


def move_away(files: Sequence[SourceFile]) -> str:
    """Return the way out for files without rows beside files of good rows."""
    moved = " && ".join(f"mv {shlex.quote(str(file.path))} {shlex.quote(f'{file.path}.old')}" for file in files)
    return f"; mend it, or if it holds no rows, move it away; run: {moved}"


def of_rows(rows: Sequence[Mapping[str, Any]], name: str) -> Rewrite | None:
    """Return how the rows of file `name`, which another tool wrote, are written anew; None if they need nothing."""
    first = rows[0] if rows else {}
    keys = {key for row in rows for key in row}
    if {"prompt", "completion"} <= keys and all(is_turns(first.get(key), "role") for key in ("prompt", "completion")):
        return Rewrite("TRL's prompt and completion in turns", "trl")
    if {"data", "annotations"} <= keys and isinstance(first.get("data"), dict):
        results = [each for row in rows for note in row.get("annotations") or () for each in note.get("result", ())]
        what = "tasks of Label Studio's JSON"
        if not results or any(each.get("type") not in _PLAIN_RESULTS for each in results):
            kinds = ", ".join(sorted({str(each.get("type")) for each in results})) or "none"
            return Rewrite(
                f"{what} with results of the kind {kinds}, which are not read; export choices, texts or rectangles"
            )
        what += " (tasks without a result are left out; of several annotations the first is taken)"
        return Rewrite(what, "label_studio_tasks")
    if {"annotation_id", "annotator"} <= keys:
        return Rewrite("Label Studio's JSON-MIN or CSV, with its own columns and addresses", "label_studio")
    if "json" in keys and keys & {"__key__", *MEDIA_SUFFIXES} and isinstance(_parsed(first.get("json")), dict):
        return Rewrite("a WebDataset tar that `datasets` wrote as a table, with a column json", "webdataset_table")
    if name.endswith(CSV_SUFFIXES):
        for column in ("messages", "conversations"):
            turns = parsed_cell(first.get(column))
            if is_turns(turns, "role") or is_turns(turns, "from"):
                return Rewrite(f"a CSV file with {column}, which are read from JSON", "turns_in_text")
    return None


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str | bytes) else value
    except (ValueError, RecursionError):
        return None


def is_turns(value: Any, field: str) -> bool:
    """Whether a value is a list of objects with this field."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and field in value[0]


def of_columns(rows: Sequence[Mapping[str, Any]]) -> Rewrite | None:
    """Return how a column of objects or lists becomes rows or texts, for rows that no map of columns reads."""
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) not in (None, "", [], {})]
        one = values[0] if values else None
        first = one[0] if isinstance(one, list) else one
        lists = [row for row in rows if isinstance(row.get(name), list)]
        items = [
            {**{key: value for key, value in row.items() if key != name}, **item}
            for row in lists
            for item in row[name]
            if isinstance(item, dict)
        ]
        if isinstance(found := find_columns(items), Columns) and found.options["question"] in first:
            return Rewrite(f"column {name!a} holds several questions in each row", "items", (name,))
        # Whether the column would be the answer if it held texts.
        found = find_columns([{**row, name: "a text"} for row in rows]) if isinstance(first, dict | list) else ""
        if isinstance(found, Columns) and found.options["answer"] == name:
            field = next((key for key in _VALUES if key in first), None) if isinstance(first, dict) else None
            kind = f"{'lists of ' if isinstance(one, list) else ''}{'objects' if isinstance(first, dict) else 'lists'}"
            how = f"take their field {field!a}" if field else "take them as JSON"
            arguments = (name, field) if field else (name,)
            return Rewrite(f"the answers of column {name!a} are {kind}; {how}", "answers", arguments)
    if rows and all(isinstance(rows[0].get(name), list) for name in ("questions", "answers")):
        return Rewrite("several questions and answers in each row", "pairs")
    return None


class Lines(list):
    """The values of a file of JSON lines, as far as they were read."""


def whole_json(file: SourceFile) -> Any:
    """Return the value of a JSON file of 64 MiB at most, or its first lines as `Lines`; None if it is neither."""
    with open_at(file.path) as stream:
        data = stream.read(MAX_ROW_BYTES + 1)
    try:
        if file.name.endswith(".json") and len(data) <= MAX_ROW_BYTES:
            return json.loads(data)
    except (ValueError, RecursionError):
        pass
    try:
        return Lines(json.loads(line) for line in data.splitlines()[:_ROWS] if line.strip())
    except (ValueError, RecursionError):
        return None


def of_json(file: SourceFile, images: Sequence[str]) -> Rewrite | None:
    """Return how the rows of a JSON file that holds no objects are written anew; None if nothing is known about it."""
    value = whole_json(file)
    if value is None and is_local(file.path) and file.path.stat().st_size > MAX_ROW_BYTES:
        return Rewrite("one object of over 64 MiB", "list")
    if isinstance(value, list) and value and all(isinstance(row, list) and row for row in value[:_ROWS]):
        return _of_lists(value[:_ROWS], file, images)
    if isinstance(value, dict) and value:
        return _of_object(value, file, images)
    return None


def _of_object(value: Mapping[str, Any], file: SourceFile, images: Sequence[str]) -> Rewrite | None:
    """Return how rows are taken out of one object."""
    lists = dict(_lists_in(value))
    if {("images",), ("annotations",)} <= lists.keys():
        return _of_coco(value, file, images)
    question = value["questions"][0] if ("questions",) in lists else {}
    if "question_id" in question and not any("answer" in name for name in question):
        return Rewrite("VQAv2's questions without answers; docs/data-formats.md has a script that joins them")
    for parent in dict.fromkeys(path[:-1] for path in lists):
        names = [path[-1] for path in lists if path[:-1] == parent and split_of(path[-1]) is not None]
        splits = [name for name in names if name.replace("_", "").replace("-", "").isalnum()]
        if len(splits) > 1:
            pointers = tuple(_pointer([*parent, name]) for name in splits)
            return Rewrite(f"one object with the splits {', '.join(map(ascii, splits))}", "splits", pointers)
    if lists:
        path = max(lists, key=lambda path: len(lists[path]))
        others = ", ".join(ascii(".".join(each)) for each in lists if each != path)
        what = f"one object with a list {'.'.join(path)!a}"
        return Rewrite(f"{what}, which is taken, and {others}" if others else what, "list", (_pointer(path),))
    return _of_columns_of_a_table(value)


def _of_columns_of_a_table(value: Mapping[str, Any]) -> Rewrite | None:
    """Return how an object of columns, or of rows by their keys, becomes rows."""
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        return Rewrite("a table of pandas (orient split)", "pandas_split")
    sizes = {len(each) if isinstance(each, list | dict) else 0 for each in value.values()}
    if len(value) > 1 and len(sizes) == 1 and all(isinstance(each, list) and each for each in value.values()):
        return Rewrite("one object with a list for each column", "columns")
    if not all(isinstance(each, dict) and each for each in value.values()):
        return None
    inner = {tuple(each) for each in value.values()}
    if len(value) > 1 and len(inner) == 1 and all(key.isdecimal() for key in inner.pop()):
        return Rewrite("one object with an object for each column, as pandas writes it", "columns")
    return Rewrite("one object with a row under each key", "keys")


def _of_coco(value: Mapping[str, Any], file: SourceFile, images: Sequence[str]) -> Rewrite:
    """Return how COCO's captions become rows. Its boxes do not."""
    if "caption" not in value["annotations"][0]:
        return Rewrite("COCO's annotations without captions, or boxes without categories, which are not read")
    names = [str(image.get("file_name")) for image in value["images"][:_ROWS]]
    folders = sorted({dirname(name) for name in images})
    there = [each for each in folders if {f"{each}/{name}".removeprefix("/") for name in names} <= set(images)]
    own = words_of(file.name) & {*TRAIN, *HELDOUT}
    there = [each for each in there if len(there) == 1 or words_of(each) & own]
    start = f"{relpath(there[0] or '.', dirname(file.name) or '.')}/".removeprefix("./") if len(there) == 1 else ""
    return Rewrite("COCO's captions, apart from the names of their images", "coco_captions", (start,))


def _pointer(path: Sequence[str]) -> str:
    """Return a JSON pointer (RFC 6901): /data/items."""
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in path)


def _lists_in(value: Mapping[str, Any], depth: int = 3) -> Iterator[tuple[tuple[str, ...], list[dict]]]:
    """Yield (keys that lead there, list) for each list of objects in an object."""
    for name, each in value.items():
        if isinstance(each, list) and each and isinstance(each[0], dict):
            yield (name,), each
        elif isinstance(each, dict) and depth > 1:
            yield from (((name, *path), found) for path, found in _lists_in(each, depth - 1))


def _of_lists(rows: Sequence[list], file: SourceFile, images: Sequence[str]) -> Rewrite:
    """Return how rows that are lists become objects: by their header, or by what their values look like."""
    what = f"its rows are lists of {len(rows[0])} values and no objects"
    header, *rest = rows
    named = [dict(zip(header, row)) for row in rest] if all(isinstance(cell, str) for cell in header) else []
    if len(named) > 1 and isinstance(find_columns(named), Columns):
        return Rewrite(what, "header")
    columns = {str(i): [row[i] for row in rows] for i in range(min(map(len, rows)))}
    image = next(
        ((name, place) for name, each in columns.items() if (place := _image_of(name, each, file, images))), ("", "")
    )
    texts = [
        name for name, each in columns.items() if name != image[0] and all(isinstance(value, str) for value in each)
    ]
    question = next((name for name in texts if are_questions(columns[name])), None)
    if question is None and len(texts) == 2:  # a question is longer than its answer
        short, long = sorted(texts, key=lambda name: len(" ".join(columns[name])))
        question = long if len(" ".join(columns[long])) > 2 * len(" ".join(columns[short])) else None
    answers = [name for name in texts if name != question]
    if len(answers) != 1 or not (question or image[1]):
        return Rewrite(
            f'{what}; write each as an object like {{"image": "1.jpg", "question": "How many?", "answer": "two"}}'
        )
    fields = [f"image={image[1]}"] if image[1] else []
    fields += [f"question={{{question}}}"] if question else []
    return Rewrite(what, "lists", (*fields, f"answer={{{answers[0]}}}"))


def _image_of(column: str, values: Sequence[Any], file: SourceFile, images: Sequence[str]) -> str:
    """Return a row's image as {2} or images/{2}.png, from the column's names of files or ids; empty if it has none."""
    if all(str(value).rpartition(".")[2].lower() in IMAGE_SUFFIXES for value in values):
        return f"{{{column}}}"
    stems: dict[tuple[str, str], set[str]] = {}
    for path in map(PurePosixPath, images):
        stems.setdefault((str(path.parent), path.suffix), set()).add(path.stem)
    folder = dirname(file.name) or "."
    fits = [place for place, names in stems.items() if {str(value) for value in values} <= names]
    near = [place for place in fits if PurePosixPath(place[0]).is_relative_to(folder)]
    chosen = near or fits
    if len(chosen) != 1:
        return ""
    start = f"{relpath(chosen[0][0], folder)}/".removeprefix("./")
    before, after = (text.replace("{", "{{").replace("}", "}}") for text in (start, chosen[0][1]))
    return f"{before}{{{column}}}{after}"
