"""Rows of other tools that no builder reads as they are, such as those of TRL and Label Studio."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dataset_builders.readers.source_files import IMAGE_SUFFIXES
from dataset_builders.readers.text_files import CSV_SUFFIXES
from dataset_builders.recognise.columns import Columns, find_columns
from dataset_builders.recognise.rewrite import Rewrite, literal, new_rows

# Label Studio's columns beside the data and the answers, in JSON-MIN and CSV, and its address of a file.
_LABEL_STUDIO = ("id", "annotator", "annotation_id", "created_at", "updated_at", "lead_time", "agreement")
_LOCAL_FILES = "/data/local-files/?d="
_PLAIN_RESULTS = ("choices", "textarea", "taxonomy", "rating", "number")
_VALUES = ("text", "answer", "value", "label", "content", "caption", "name")  # fields that are an answer's text
_PLACE = re.compile(r"<loc\d{4}>")


def of_rows(rows: Sequence[Mapping[str, Any]], name: str) -> Rewrite | None:
    """Return how the rows of file `name`, which another tool wrote, are written anew; None if they need nothing."""
    first = rows[0] if rows else {}
    keys = {key for row in rows for key in row}
    if {"prompt", "completion"} <= keys and all(is_turns(first.get(key), "role") for key in ("prompt", "completion")):
        prompt = '[{**m, "weight": 0} if m["role"] == "assistant" else m for m in r["prompt"]]'
        others = '**{k: v for k, v in r.items() if k not in ("prompt", "completion")}'
        return new_rows("TRL's prompt and completion in turns", f'{{"messages": {prompt} + r["completion"], {others}}}')
    if any(_PLACE.search(str(row.get("suffix"))) for row in rows):
        return Rewrite("PaliGemma's places (<loc0123>) in suffix, which no builder reads; leave out such rows")
    if {"data", "annotations"} <= keys and isinstance(first.get("data"), dict):
        return _of_label_studio(rows)
    if {"annotation_id", "annotator"} <= keys:
        cell = f"urllib.parse.unquote(v.split({literal(_LOCAL_FILES)})[1]) if {literal(_LOCAL_FILES)} in str(v) else v"
        row = f"{{k: {cell} for k, v in r.items() if k not in {json.dumps(_LABEL_STUDIO)}}}"
        return new_rows("Label Studio's JSON-MIN or CSV, with its own columns and addresses", row)
    if "json" in keys and keys & {"__key__", *IMAGE_SUFFIXES} and isinstance(_parsed(first.get("json")), dict):
        key = f'"image" if k in {json.dumps(IMAGE_SUFFIXES)} else k'
        others = f'{{{key}: v for k, v in r.items() if k[:2] != "__" and k != "json"}}'
        what = "a WebDataset tar that `datasets` wrote as a table, with a column json"
        inner = 'r["json"]' if isinstance(first["json"], dict) else 'json.loads(r["json"])'
        return new_rows(what, f"{{**{others}, **{inner}}}")
    if name.endswith(CSV_SUFFIXES):
        for column in ("messages", "conversations"):
            if (turns := _turns_in_text(first.get(column))) is not None:
                cell = f'{turns}(v) if v[:1] in ("[", "{{") else v'
                return new_rows(
                    f"a CSV file with {column}, which are read from JSON", f"{{k: {cell} for k, v in r.items() if v}}"
                )
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


def _turns_in_text(text: Any) -> str | None:
    """Return the Python function that reads a cell of turns: JSON, or the form that pandas writes; None for others."""
    for read, name in ((json.loads, "json.loads"), (ast.literal_eval, "ast.literal_eval")):
        try:
            value = read(text) if isinstance(text, str) else None
        except (ValueError, SyntaxError, RecursionError):
            continue
        if is_turns(value, "role") or is_turns(value, "from"):
            return name
    return None


def _of_label_studio(rows: Sequence[Mapping[str, Any]]) -> Rewrite | None:
    """Return how the tasks of Label Studio's JSON become rows, if all their results are texts or choices."""
    results = [each for row in rows for note in row.get("annotations") or () for each in note.get("result", ())]
    what = "tasks of Label Studio's JSON"
    if not results or any(each.get("type") not in _PLAIN_RESULTS for each in results):
        kinds = ", ".join(sorted({str(each.get("type")) for each in results})) or "none"
        return Rewrite(f"{what} with results of the kind {kinds}, which are not read; export choices or texts")
    names = {each["from_name"] for each in results}
    key = 'x["from_name"]' if len(names) > 1 else '"answer"'
    cell = f"urllib.parse.unquote(v.split({literal(_LOCAL_FILES)})[-1]) if isinstance(v, str) else v"
    answers = f'{{{key}: next(iter(x["value"].values())) for x in r["annotations"][0]["result"]}}'
    row = f'{{**{{k: {cell} for k, v in r["data"].items()}}, **{answers}}}'
    what += " (tasks without a result are left out; of several annotations the first is taken)"
    return new_rows(
        what,
        row,
        'for r in d if r["annotations"] and r["annotations"][0]["result"]',
    )


def of_columns(rows: Sequence[Mapping[str, Any]]) -> Rewrite | None:
    """Return how a column of objects or lists becomes rows or texts, for rows that no map of columns reads."""
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) not in (None, "", [], {})]
        one = values[0] if values else None
        first = one[0] if isinstance(one, list) else one
        others = f"{{k: v for k, v in r.items() if k != {literal(name)}}}"
        items = [{**_without(row, name), **item} for row in rows for item in _objects(row.get(name))]
        if isinstance(found := find_columns(items), Columns) and found.options["question"] in first:
            what = f"column {name!a} holds several questions in each row"
            return new_rows(what, f"{{**{others}, **q}}", f"for r in d for q in r[{literal(name)}]")
        if isinstance(first, dict | list) and _would_answer(rows, name):
            field = next((key for key in _VALUES if key in first), None) if isinstance(first, dict) else None
            text = "json.dumps({}, ensure_ascii=False)" if field is None else f"{{}}[{literal(field)}]"
            taken = (
                f"[{text.format('a')} for a in r[{literal(name)}]]"
                if isinstance(one, list)
                else text.format(f"r[{literal(name)}]")
            )
            kind = f"{'lists of ' if isinstance(one, list) else ''}{'objects' if isinstance(first, dict) else 'lists'}"
            how = f"take their field {field!a}" if field else "take them as JSON"
            return new_rows(f"the answers of column {name!a} are {kind}; {how}", f"{{**r, {literal(name)}: {taken}}}")
    both = [name for name in ("questions", "answers") if rows and isinstance(rows[0].get(name), list)]
    if len(both) == 2:
        pair = '{**r, "questions": q, "answers": a}'
        return new_rows(
            "several questions and answers in each row",
            pair,
            'for r in d for q, a in zip(r["questions"], r["answers"])',
        )
    return None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _without(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def _would_answer(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether a column would be the answer if it held texts."""
    found = find_columns([{**row, name: "a text"} for row in rows])
    return isinstance(found, Columns) and found.options["answer"] == name
