"""Rows that no builder reads, and the command that writes them anew: the forms that other tools export.

A command reads each file with Python, keeps the file as NAME.old, and writes rows that `athanor init` reads.
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
from dataset_builders.readers.source_files import IMAGE_SUFFIXES, SourceFile, open_at
from dataset_builders.readers.table_files import ARROW_SUFFIXES
from dataset_builders.readers.text_files import CSV_SUFFIXES, JSON_SUFFIXES, MAX_ROW_BYTES, csv_header
from dataset_builders.recognise.columns import Columns, find_columns
from dataset_builders.storage.store import is_local

_ROWS = 40
RUN = "; run: "  # before a command, which ends its message


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Rows that have to be written anew."""

    what: str  # the form of the rows, in words for the user
    # A Python expression of the new files, name -> rows, over `d`, the old rows or JSON value, `p`, the old file's
    # name, and `n`, the new one's. Empty: no command can know the rows.
    files: str = ""


def move_away(files: Sequence[SourceFile]) -> str:
    """Return the way out for files without rows beside files of good rows."""
    moved = " && ".join(f"mv {shlex.quote(str(file.path))} {shlex.quote(f'{file.path}.old')}" for file in files)
    return f"; mend it, or if it holds no rows, move it away; run: {moved}"


def plain_names(path: str) -> str:
    """Return the command that writes a tar anew, with `_` for each dot of a name but the last."""
    name = 'os.path.splitext(m.name)[0].replace(".", "_") + os.path.splitext(m.name)[1]'
    code = (
        'import os, sys, tarfile; p = sys.argv[1]; os.rename(p, p + ".old"); '
        'a, b = tarfile.open(p + ".old"), tarfile.open(p, "w"); '
        f"[b.addfile(m.replace(name={name}), a.extractfile(m)) for m in a if m.isfile()]; b.close()"
    )
    return " ".join(shlex.quote(word) for word in (sys.executable, "-c", code, path))


def literal(text: str) -> str:
    """Return a text as Python writes it, with double quotes where they do, since the shell takes single ones."""
    return json.dumps(text) if text.isascii() else ascii(text)


def new_rows(what: str, row: str, loops: str = "for r in d") -> Rewrite:
    """Return a rewrite of one file to one, from the Python expression of a new row and the loops around it."""
    return Rewrite(what, f"{{n: [{row} {loops}]}}")


def advice(rewrites: Mapping[Rewrite, Sequence[SourceFile]]) -> str:
    """Return what the files of each form hold, and the commands that write them anew."""
    whats = []
    for rewrite, files in rewrites.items():
        names = ", ".join(file.name for file in files[:3]) + (" ..." if len(files) > 3 else "")
        whats.append(f"{names}: {rewrite.what}")
    commands = [_command(rewrite, files) for rewrite, files in rewrites.items() if rewrite.files]
    where = "" if all(is_local(file.path) for files in rewrites.values() for file in files) else " on a copy here"
    way_out = f"; write the rows anew{where}; run: {' && '.join(commands)}" if commands else ""
    return "; ".join(dict.fromkeys(whats)) + way_out


def _command(rewrite: Rewrite, files: Sequence[SourceFile]) -> str:
    """Return a line for the shell. The old files stay, as NAME.old."""
    name = files[0].name
    lines = '"".join(json.dumps(r) + "\\n" for r in v)'
    imports, new, write = "json", "p", f'open(f, "w").write({lines})'
    if name.endswith(CSV_SUFFIXES):
        cell = f'open(p, encoding="utf-8-sig", newline=""), delimiter={literal(csv_header(files[0].path).delimiter)}'
        imports, new = "csv, json", 'p + ".jsonl"'
        read = f"csv.field_size_limit(2**30) and list(csv.DictReader({cell}))"
    elif not name.endswith(JSON_SUFFIXES):
        imports, new = "json, pyarrow as pa, pyarrow.parquet as pq", 'p.removesuffix(".parquet") + ".parquet"'
        write = "pq.write_table(pa.Table.from_pylist(v), f)"
        read = "pq.read_table(p).to_pylist()"
        if name.endswith(ARROW_SUFFIXES):
            read = (
                '(pa.ipc.open_file if open(p, "rb").read(6) == b"ARROW1" else pa.ipc.open_stream)'
                "(pa.OSFile(p)).read_all().to_pylist()"
            )
    else:
        is_whole = name.endswith(".json") and not isinstance(whole_json(files[0]), Lines)
        read = 'json.load(open(p, "rb"))' if is_whole else '[json.loads(l) for l in open(p, "rb") if l.strip()]'
    code = (
        f"import ast, os, sys, urllib.parse, {imports}; [(d := {read}, n := {new}, s := {rewrite.files}, "
        f'os.rename(p, p + ".old"), [{write} for f, v in s.items()]) for p in sys.argv[1:]]'
    )
    paths = (str(file.path) if is_local(file.path) else file.path.name for file in files)
    return " ".join(shlex.quote(word) for word in (sys.executable, "-c", code, *paths))


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
        return Rewrite("one object of over 64 MiB", "{n: max((v for v in d.values() if isinstance(v, list)), key=len)}")
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
    if ("questions",) in lists and "question_id" in value["questions"][0] and not _has_answer(value["questions"][0]):
        return Rewrite("VQAv2's questions without answers; docs/data-formats.md has a script that joins them")
    for parent in dict.fromkeys(path[:-1] for path in lists):
        splits = [path[-1] for path in lists if path[:-1] == parent and _is_split(path[-1])]
        if len(splits) > 1:
            name = 'os.path.join(os.path.dirname(p), k + ".jsonl")'
            files = f"{{{name}: d{_place(parent)}[k] for k in {json.dumps(splits)}}}"
            return Rewrite(f"one object with the splits {', '.join(map(ascii, splits))}", files)
    if lists:
        path = max(lists, key=lambda path: len(lists[path]))
        others = ", ".join(ascii(".".join(each)) for each in lists if each != path)
        what = f"one object with a list {'.'.join(path)!a}"
        return Rewrite(f"{what}, which is taken, and {others}" if others else what, f"{{n: d{_place(path)}}}")
    return _of_columns_of_a_table(value)


def _of_columns_of_a_table(value: Mapping[str, Any]) -> Rewrite | None:
    """Return how an object of columns, or of rows by their keys, becomes rows."""
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        return new_rows("a table of pandas (orient split)", 'dict(zip(d["columns"], r))', 'for r in d["data"]')
    sizes = {len(each) if isinstance(each, list | dict) else 0 for each in value.values()}
    if len(value) > 1 and len(sizes) == 1 and all(isinstance(each, list) and each for each in value.values()):
        return new_rows("one object with a list for each column", "dict(zip(d, r))", "for r in zip(*d.values())")
    if not all(isinstance(each, dict) and each for each in value.values()):
        return None
    inner = {tuple(each) for each in value.values()}
    if len(value) > 1 and len(inner) == 1 and all(key.isdecimal() for key in inner.pop()):
        loop = "for r in zip(*(c.values() for c in d.values()))"
        return new_rows("one object with an object for each column, as pandas writes it", "dict(zip(d, r))", loop)
    return new_rows("one object with a row under each key", '{"key": k, **r}', "for k, r in d.items()")


def _of_coco(value: Mapping[str, Any], file: SourceFile, images: Sequence[str]) -> Rewrite:
    """Return how COCO's captions become rows. Its boxes do not."""
    if "caption" not in value["annotations"][0]:
        return Rewrite(
            "COCO's boxes, as `supervision` writes them, which no builder reads; write questions and answers"
        )
    names = [str(image.get("file_name")) for image in value["images"][:_ROWS]]
    folders = sorted({dirname(name) for name in images})
    there = [each for each in folders if {f"{each}/{name}".removeprefix("/") for name in names} <= set(images)]
    own = words_of(file.name) & {*TRAIN, *HELDOUT}
    there = [each for each in there if len(there) == 1 or words_of(each) & own]
    start = f"{relpath(there[0] or '.', dirname(file.name) or '.')}/".removeprefix("./") if len(there) == 1 else ""
    names_of = f'{{i["id"]: {literal(start)} + i["file_name"] for i in d["images"]}}'
    row = '{"image": m[r["image_id"]], "caption": r["caption"]}'
    what = "COCO's captions, apart from the names of their images"
    return new_rows(what, row, f'for m in [{names_of}] for r in d["annotations"]')


def _has_answer(row: Mapping[str, Any]) -> bool:
    return any("answer" in name for name in row)


def _place(path: Sequence[str]) -> str:
    return "".join(f"[{literal(name)}]" for name in path)


def _is_split(name: str) -> bool:
    return split_of(name) is not None and name.replace("_", "").replace("-", "").isalnum()


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
        return new_rows(what, "dict(zip(d[0], r))", "for r in d[1:]")
    columns = {str(i): [row[i] for row in rows] for i in range(min(map(len, rows)))}
    image = next(
        ((name, place) for name, each in columns.items() if (place := _image_of(name, each, file, images))), ("", "")
    )
    texts = [
        name for name, each in columns.items() if name != image[0] and all(isinstance(value, str) for value in each)
    ]
    question = next((name for name in texts if _ask(columns[name])), None)
    if question is None and len(texts) == 2:  # a question is longer than its answer
        short, long = sorted(texts, key=lambda name: len(" ".join(columns[name])))
        question = long if len(" ".join(columns[long])) > 2 * len(" ".join(columns[short])) else None
    answers = [name for name in texts if name != question]
    if len(answers) != 1 or not (question or image[1]):
        return Rewrite(
            f'{what}; write each as an object like {{"image": "1.jpg", "question": "How many?", "answer": "two"}}'
        )
    fields = [f'"image": {image[1]}'] if image[1] else []
    fields += [f'"question": r[{question}]'] if question else []
    return new_rows(what, "{" + ", ".join([*fields, f'"answer": r[{answers[0]}]']) + "}")


def _ask(texts: Sequence[str]) -> bool:
    return sum(text.strip().endswith("?") for text in texts) > len(texts) / 2


def _image_of(column: str, values: Sequence[Any], file: SourceFile, images: Sequence[str]) -> str:
    """Return the Python expression of a row's image, from the column's names of files, or ids; empty if it has none."""
    if all(str(value).rpartition(".")[2].lower() in IMAGE_SUFFIXES for value in values):
        return f"r[{column}]"
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
    return f"{literal(start)} + str(r[{column}]) + {literal(chosen[0][1])}"


def of_paths(start: str) -> Rewrite:
    """Return how rows name their images by the paths below the data, which follow `start` in their paths."""
    old = json.dumps(start)[1:-1]  # as in the text of a JSON row
    return new_rows(f"names of images begin with {start!a}", f'json.loads(json.dumps(r).replace({literal(old)}, ""))')


def of_outside() -> Rewrite:
    """Return how a table takes in the images that it names outside of the data."""
    place = 'os.path.join(os.path.dirname(p), v["path"] if isinstance(v, dict) else v)'
    named = f"isinstance(v, str) and v.lower().endswith({json.dumps(IMAGE_SUFFIXES)[1:-1].join('()')})"
    taken = f'{{"bytes": open({place}, "rb").read(), "path": None}}'
    struct = 'isinstance(v, dict) and v.get("path") and not v.get("bytes")'
    each = f"[e(x) for x in v] if isinstance(v, list) else {taken} if {struct} or {named} else v"
    files = f"(e := lambda v: {each}) and {{n: [{{k: e(v) for k, v in r.items()}} for r in d]}}"
    return Rewrite("images outside of the data", files)
