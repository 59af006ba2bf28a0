"""Recognition of the image, question and answer members of a WebDataset tar."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dataset_builders.readers.source_files import IMAGE_SUFFIXES
from dataset_builders.recognise.columns import CLASSIFY, DESCRIBE, find_columns

_TEXTS = ("txt", "caption", "text", "cls")


def tar_options(groups: Sequence[Mapping[str, bytes]]) -> dict[str, Any] | str:
    """Return options of the builder `webdataset_tars` for a tar's first samples, or why there are none."""
    fields = list(dict.fromkeys(field for group in groups for field in group))
    if not fields:
        return "it holds no sample"
    options: dict[str, Any] = {}
    if not all(any(field.rpartition(".")[2] in IMAGE_SUFFIXES for field in group) for group in groups):
        options["text_only"] = True
    if "json" in fields and (json_options := _of_json(groups)) is not None:
        return json_options if isinstance(json_options, str) else options | json_options
    text = next((field for field in _TEXTS if field in fields), None)
    if text is None:
        return f"no member with text (json, {', '.join(_TEXTS)}) among: {', '.join(fields)}"
    return options | {"question": f"constant:{CLASSIFY if text == 'cls' else DESCRIBE}", "answer": text}


def _of_json(groups: Sequence[Mapping[str, bytes]]) -> dict[str, Any] | str | None:
    records = [record for group in groups if (record := _record(group)) is not None]
    if any(isinstance(record, list) for record in records):
        return {"messages": "json"}
    for name in ("messages", "conversations"):
        if any(record.get(name) for record in records):
            return {"messages": f"json:{name}"}
    columns = find_columns([{**record, "image": b""} for record in records])
    if isinstance(columns, str):
        return None
    question = columns.options["question"]
    if question.startswith("{"):
        joined = question.replace("\n", " ")
        return (
            f"its question is joined from several fields ({joined}), which no option does; write messages in its json"
        )
    is_fixed = question.startswith("<image>")
    source = f"constant:{question.removeprefix('<image>')}" if is_fixed else f"json:{question}"
    return {"question": source, "answer": f"json:{columns.options['answer']}"}


def _record(group: Mapping[str, bytes]) -> Any:
    try:
        value = json.loads(group.get("json", b""))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None
