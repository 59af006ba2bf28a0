"""naver-clova-ix/cord-v2 (receipts and their parses), or any parquet files in its schema -> Sample.

The source is a directory or a URL with `train-*.parquet`, `validation-*.parquet`, `test-*.parquet` in it or one folder
below, or one such file. A raw row:

    {"image": {"bytes": b"\\x89PNG...", "path": None},
     "ground_truth": '{"gt_parse": {"menu": {"nm": "Nasi", "price": "9.000"}}, "meta": {...}, "valid_line": [...]}'}

becomes, with target: json,

    Sample(key="cord_v2_train/00000012", images=(b"\\x89PNG...",), messages=(
        user "<image><the prompt>", assistant '{"menu":{"nm":"Nasi","price":"9.000"}}'))

With target: donut, the answer has the tags of `cord_target.py`, which also parses both forms. The parse is kept as it
is: a menu of one item is the item itself, not a list. Some rows have `gt_parses` instead, a list of parses that are all
right. The first parse is trained on. With parses: all, each parse becomes a sample, with the keys
cord_v2_train/00000012-0 and so on.

The split comes from the file's name, and each split is a subset: cord_v2_train, cord_v2_validation, cord_v2_test.
`heldout_splits` lists the splits that are held out. The words' boxes (valid_line, roi) are not used.

Left out: ground_truth that is not JSON, has a key twice or is nested too deep (json_parse_error); ground_truth that is
null, not UTF-8, not an object, without gt_parse and gt_parses, with an empty gt_parses, or with a parse that is not an
object (schema_error); a parse without a field (empty_target); a parse without a form in tags (schema_error), or with a
tag or `<image>` in its text (special_token_in_text); no image (schema_error, image_not_found).
"""

import re
from collections.abc import Container, Iterator, Sequence
from typing import Literal

import pyarrow as pa
from pydantic import Field

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample, Split
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError
from dataset_builders.readers.image_refs import MEDIA_PATTERNS, ImageReader
from dataset_builders.readers.parts import Builder, Part, SkippedRow, convert_rows
from dataset_builders.readers.source_files import SourceFile, list_files, nearest
from dataset_builders.readers.table_files import (
    check_columns,
    image_bytes,
    is_bytes,
    is_text,
    iter_table_rows,
    list_table_parts,
    value_of,
)
from dataset_builders.sources.cord_target import InnerTag, NoTagForm, Tree, from_json, to_json, to_tags
from dataset_builders.storage.store import StorePath

SourceSplit = Literal["train", "validation", "test"]
SPLITS: tuple[SourceSplit, ...] = ("train", "validation", "test")
PROMPTS = {
    "json": "Read this receipt and give its content as JSON.",
    "donut": "Read this receipt and give its content in tags.",
}
_COLUMNS = ("image", "ground_truth")
_SPLIT = re.compile(rf"({'|'.join(SPLITS)})([-_.].*)?\.parquet")


class CordOptions(StrictModel):
    """Options for the conversion of a receipt to samples."""

    target: Literal["json", "donut"] = Field(
        default="json", description="json: the parse as compact JSON; donut: as the tags of Donut"
    )
    prompt: str = Field(
        default="",
        pattern=r"^[^<>]*$",
        description="the question of every sample, after the image; empty: one that names the target",
    )
    parses: Literal["first", "all"] = Field(
        default="first", description="of a row with several right parses: the first one, or one sample per parse"
    )
    heldout_splits: tuple[SourceSplit, ...] = Field(
        default=("validation", "test"),
        description="splits of the source that are held out, the others are trained on; none: convert chooses itself",
    )


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the parquet files of these subsets (cord_v2_train, ...; none means all), and of image files."""
    names = [f"{split}*.parquet" for split in _splits(subsets)] if subsets else ["*.parquet"]
    return (*(f"{folder}{name}" for name in names for folder in ("", "*/")), *MEDIA_PATTERNS)


def list_parts(source: StorePath, subsets: Sequence[str], options: CordOptions) -> list[Part]:
    """Return all parts of the source: train, validation, test; files in numeric order, row groups in file order."""
    files_of: dict[str, list[SourceFile]] = {split: [] for split in SPLITS}
    for file in list_files(source, ("*.parquet", "*/*.parquet")):
        split = _SPLIT.fullmatch(file.path.name)
        if split is None:
            raise InputError(
                f"{file.path}: its name says no split; rename it to train-, validation- or test-...parquet"
            )
        files_of[split[1]].append(file)
    if not any(files_of.values()):
        raise InputError(f"raw data {source} holds no train-, validation- or test-...parquet, nor a folder with them")
    parts = []
    for split in _splits(subsets):
        if subsets and not files_of[split]:
            raise InputError(f"no subset {subset_of(split)!r} in {source}: it holds no {split}-...parquet")
        held = options.heldout_splits
        our_split: Split | None = None if not held else "heldout" if split in held else "train"
        parts += list_table_parts(files_of[split], subset_of(split), our_split, _check_schema)
    return parts


def iter_part(part: Part, options: CordOptions, rows: Container[int] | None = None) -> Iterator[Sample | SkippedRow]:
    """Yield samples and unusable rows of one part, in order of their keys. A few rows are in memory at a time."""
    reader = ImageReader(part)

    def convert(key: str, record: pa.StructScalar) -> Iterator[Sample | SkippedRow]:
        parses = _parses(value_of(record, "ground_truth"))
        image = image_bytes(value_of(record, "image"), 0, reader)
        if options.parses == "first" or len(parses) == 1:
            yield _sample(key, parses[0], image, options)
        else:
            yield from (_sample(f"{key}-{i}", parse, image, options) for i, parse in enumerate(parses))

    return convert_rows(part, iter_table_rows(part, _COLUMNS, rows), convert)


BUILDER = Builder(options=CordOptions, patterns=patterns, list_parts=list_parts, iter_part=iter_part, has_splits=True)


def subset_of(split: SourceSplit) -> str:
    return f"cord_v2_{split}"


def _splits(subsets: Sequence[str]) -> list[SourceSplit]:
    known = [subset_of(split) for split in SPLITS]
    for name in subsets:
        if name not in known:
            raise InputError(f"no subset {name!r} in cord_v2; there are: {', '.join(known)}{nearest(name, known)}")
    return [split for split in SPLITS if not subsets or subset_of(split) in subsets]


def _check_schema(path: StorePath, schema: pa.Schema) -> None:
    check_columns(path, schema, _COLUMNS, "cord-v2")
    image, truth = schema.field("image").type, schema.field("ground_truth").type
    index = image.get_field_index("bytes") if pa.types.is_struct(image) else -1
    if index < 0 or not is_bytes(image.field(index).type):
        raise InputError(f"{path}: column 'image' is {image}, not struct<bytes, path>; see the schema of cord-v2")
    if not is_text(truth):
        raise InputError(f"{path}: column 'ground_truth' is {truth}, not text; see the schema of cord-v2")


def _parses(text: object) -> list[dict[str, Tree]]:
    """Return all right parses of a row; there is at least one."""
    if text is None:
        raise SkipSample("schema_error", "ground_truth is null")
    try:
        truth = from_json(text)
    except ValueError as error:
        raise SkipSample("json_parse_error", f"ground_truth: {str(error)[:200]}") from None
    if not isinstance(truth, dict):
        raise SkipSample("schema_error", f"ground_truth is no object: {text[:80]!r}")
    if "gt_parses" not in truth and "gt_parse" not in truth:
        raise SkipSample("schema_error", f"neither gt_parse nor gt_parses; there are: {', '.join(truth)[:120]}")
    parses = truth["gt_parses"] if "gt_parses" in truth else [truth["gt_parse"]]
    if not isinstance(parses, list) or not parses:
        raise SkipSample("schema_error", "gt_parses is no list with a parse in it")
    for i, parse in enumerate(parses):
        if not isinstance(parse, dict):
            raise SkipSample("schema_error", f"parse {i} is no object: {str(parse)[:80]!r}")
    return parses


def _sample(key: str, parse: dict[str, Tree], image: bytes, options: CordOptions) -> Sample | SkippedRow:
    try:
        prompt = options.prompt or PROMPTS[options.target]
        answer = Message(role="assistant", text=_target(parse, options))
        messages = (Message(role="user", text=IMAGE_SLOT + prompt), answer)
        sample = Sample(key=key, messages=messages, images=(image,))
        sample.check()
    except SkipSample as skip:
        return SkippedRow(key, skip.reason, skip.detail)
    return sample


def _target(parse: dict[str, Tree], options: CordOptions) -> str:
    if not parse:
        raise SkipSample("empty_target", "the parse has no field")
    try:
        text = to_json(parse) if options.target == "json" else to_tags(parse)
    except InnerTag as error:
        raise SkipSample("special_token_in_text", str(error)) from None
    except NoTagForm as error:
        raise SkipSample("schema_error", f"no form in tags: {str(error)[:200]}") from None
    if IMAGE_SLOT in text:
        raise SkipSample("special_token_in_text", f"the parse holds {IMAGE_SLOT}")
    return text
