"""HuggingFaceM4/the_cauldron, or any directory of parquet files in its schema -> Sample.

The source is a directory or a URL of `<subset>/*.parquet`, or one such file. A subset is one or more files (websight
has 563); a file may be empty. A raw row:

    {"images": [{"bytes": b"\\x89PNG...", "path": None}],
     "texts": [{"user": "Which digit is this?", "assistant": "7", "source": "digits"},
               {"user": "Is it even or odd?",   "assistant": "odd", "source": "digits"}]}

becomes, with turns: chat, one sample of two turns, with the image slots before the first question:

    Sample(key="digits/00000012", images=(b"\\x89PNG...",), messages=(
        user "<image>Which digit is this?", assistant "7", user "Is it even or odd?", assistant "odd"))

With turns: split, each pair becomes a sample, with the keys digits/00000012-0 and digits/00000012-1 and all images.
Questions with as many `<image>` as the row has images keep them in position. Texts are stripped, and CRLF becomes LF.
An image without bytes is read from its path, if the path is below the source.

the_cauldron keeps one answer per question. If your own source has several right answers (ten annotators, say), a pair
may list them all in a field `references`. It is a list of texts, and null or absent if there are none:

    {"user": "What does the sign say?", "assistant": "Open.", "source": "mine", "references": ["open", "OPEN", "open"]}

They become the answer's Message.references, which only scores use. the_cauldron added a full stop to its answers, which
the original datasets do not have. If the metric would count it (ANLS, on DOCUMENTS), both spellings are references.

Left out: rows with a field that is null or not UTF-8, or with a null among the references (schema_error); rows without
a pair (no_text); images without bytes and without a file at their path (image_not_found); answers that contain
`<image>` (special_token_in_text); and all that Sample.check refuses.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from pydantic import Field

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError
from dataset_builders.readers.image_refs import MEDIA_PATTERNS, ImageReader
from dataset_builders.readers.parts import Builder, Part, SkippedRow, convert_rows, natural_order
from dataset_builders.readers.source_files import SourceFile, check_subset_name, list_files, nearest
from dataset_builders.readers.table_files import (
    check_columns,
    image_bytes,
    is_bytes,
    is_text,
    is_text_list,
    item_kind,
    iter_table_rows,
    list_table_parts,
    stripped,
    value_of,
)
from dataset_builders.storage.store import StorePath

_COLUMNS = ("images", "texts")
_TEXT_FIELDS = ("user", "assistant")
_REFERENCES = "references"
DOCUMENTS = ("docvqa", "infographic_vqa", "st_vqa")  # subsets with the metric ANLS, which counts a full stop


class CauldronOptions(StrictModel):
    """Options for the conversion of a raw row to samples."""

    turns: Literal["chat", "split"] = Field(
        description="chat: all question-answer pairs of a row in one conversation; split: one sample per pair"
    )


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the parquet files of these subsets (none means all), and of the image files in their folders."""
    return tuple(f"{top}/{end}" for top in tuple(subsets) or ("*",) for end in ("*.parquet", *MEDIA_PATTERNS))


def list_parts(source: StorePath, subsets: Sequence[str], options: CauldronOptions) -> list[Part]:
    """Return all parts of the source: subsets by name, files in numeric order, row groups in file order."""
    files = _files_of_subsets(source, subsets)
    return [part for subset in files for part in list_table_parts(files[subset], subset, None, _check_schema)]


def iter_part(
    part: Part, options: CauldronOptions, rows: Container[int] | None = None
) -> Iterator[Sample | SkippedRow]:
    """Yield samples and unusable rows of one part, in order of their keys. A few rows are in memory at a time."""
    reader, both_spellings = ImageReader(part), part.own_subset in DOCUMENTS

    def convert(key: str, record: pa.StructScalar) -> Iterator[Sample | SkippedRow]:
        texts = _pairs(record, both_spellings)
        images = tuple(image_bytes(image, i, reader) for i, image in enumerate(value_of(record, "images") or []))
        if options.turns == "chat":
            yield _sample(key, texts, images)
        else:
            yield from (_sample(f"{key}-{i}", [pair], images) for i, pair in enumerate(texts))

    return convert_rows(part, iter_table_rows(part, _COLUMNS, rows), convert)


BUILDER = Builder(options=CauldronOptions, patterns=patterns, list_parts=list_parts, iter_part=iter_part)


def _files_of_subsets(source: StorePath, subsets: Sequence[str]) -> dict[str, list[SourceFile]]:
    """Return subset -> its parquet files, both in order."""
    chosen = [f"{name}/*.parquet" for name in subsets]  # so that only these folders of a store are listed
    files: dict[str, list[SourceFile]] = {}
    if source.is_file():
        subset = source.parent.name
        files, subsets = {subset: [SourceFile(source, f"{subset}/{source.name}")]}, subsets or (subset,)
    else:
        for file in list_files(source, chosen or ["*/*.parquet", "*.parquet"]):
            files.setdefault(file.name.rpartition("/")[0], []).append(file)
    if not files.keys() - {""} and not subsets:
        hint = f"; it is one subset: give {source.parent} and subsets=[{source.name}]" if files else ""
        raise InputError(f"raw data directory {source} holds no <subset>/*.parquet{hint}")
    files.pop("", None)
    for name in subsets:
        if name not in files:
            names = sorted({file.name.split("/")[0] for file in list_files(source, ["*/*.parquet"])})
            known = f"there are: {', '.join(names)}{nearest(name, names)}" if names else "it has no <subset>/*.parquet"
            raise InputError(f"no subset {name!r} in {source}; {known}")
    for name in files:
        check_subset_name(name, source / name)
    return {name: files[name] for name in sorted(files, key=natural_order)}


def _check_schema(path: StorePath, schema: pa.Schema) -> None:
    check_columns(path, schema, _COLUMNS, "the_cauldron")
    _check_struct(path, "images", schema.field("images").type, {"bytes": is_bytes})
    texts = schema.field("texts").type
    _check_struct(path, "texts", texts, dict.fromkeys(_TEXT_FIELDS, is_text))
    item = item_kind(texts)
    index = item.get_field_index(_REFERENCES) if pa.types.is_struct(item) else -1
    if index >= 0 and not is_text_list(item.field(index).type):
        raise InputError(
            f"{path}: field {_REFERENCES!r} of column 'texts' is {item.field(index).type}, not list<string>; "
            "write the answers as a list of texts, or leave the field out"
        )


def _check_struct(path: StorePath, column: str, kind: pa.DataType, fields: dict) -> None:
    """Raise InputError unless the column is a list of structs with these fields, or of nulls (every row empty)."""
    expected, item = f"list<struct<{', '.join(fields)}>>", item_kind(kind)
    if item is None or not (pa.types.is_struct(item) or pa.types.is_null(item)):
        raise InputError(f"{path}: column {column!r} is {kind}, not {expected}; see the schema of the_cauldron")
    if pa.types.is_null(item):
        return
    for name, is_right in fields.items():
        index = item.get_field_index(name)
        if index < 0 or not is_right(item.field(index).type):
            field_kind = "missing" if index < 0 else str(item.field(index).type)
            raise InputError(f"{path}: field {name!r} of column {column!r} is {field_kind}; {expected} was expected")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A question and its answer, stripped, with all answers that count as right."""

    question: str
    answer: str
    references: tuple[str, ...]


def _pairs(record: pa.StructScalar, both_spellings: bool) -> list[_Pair]:
    texts = value_of(record, "texts") or []
    for i, pair in enumerate(texts):
        for name in _TEXT_FIELDS:
            if not pair or pair[name] is None:
                raise SkipSample("schema_error", f"texts[{i}] has no {name!r}")
        if None in (pair.get(_REFERENCES) or ()):
            raise SkipSample("schema_error", f"texts[{i}] has a null among its references")
    if not texts:
        raise SkipSample("no_text", "texts is empty")
    pairs = []
    for pair in texts:
        answer = stripped(pair["assistant"])
        references = tuple(map(stripped, pair.get(_REFERENCES) or ()))
        pairs.append(
            _Pair(stripped(pair["user"]), answer, references or (_spellings(answer) if both_spellings else ()))
        )
    return pairs


def _sample(key: str, pairs: Sequence[_Pair], images: tuple[bytes, ...]) -> Sample | SkippedRow:
    own_slots = sum(pair.question.count(IMAGE_SLOT) for pair in pairs)
    messages = []
    for pair in pairs:
        messages.append(Message(role="user", text=pair.question))
        messages.append(Message(role="assistant", text=pair.answer, references=pair.references))
    if own_slots == 0:
        messages[0] = Message(role="user", text=IMAGE_SLOT * len(images) + messages[0].text)
    sample = Sample(key=key, messages=tuple(messages), images=images)
    try:
        if any(IMAGE_SLOT in pair.answer for pair in pairs):
            raise SkipSample("special_token_in_text", f"an answer holds {IMAGE_SLOT}")
        sample.check()
    except SkipSample as skip:
        return SkippedRow(key, skip.reason, skip.detail)
    return sample


def _spellings(answer: str) -> tuple[str, ...]:
    """Return the answer with and without its full stop; nothing if it has none."""
    is_ended = answer.endswith(".") and not answer.endswith("..") and len(answer) > 1
    return (answer, answer[:-1]) if is_ended else ()
