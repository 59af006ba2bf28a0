"""LLaVA's JSON and ShareGPT's -> Sample.

The source is a directory of `<subset>.json` or `<subset>/*.json`, an array of rows; `.jsonl` and `.parquet` too. A raw
row:

    {"id": "000000033471", "image": "coco/train2017/000000033471.jpg",
     "conversations": [{"from": "human", "value": "<image>\\nWhat are the colors of the bus?"},
                       {"from": "gpt", "value": "White and red."}]}

becomes

    Sample(key="llava_mix/00000012", images=(b"\\xff\\xd8\\xff...",), messages=(
        user "<image>\\nWhat are the colors of the bus?", assistant "White and red."))

`image` is a path or a list of them, or `images` is, as LLaMA-Factory has it; relative to the file or to `image_root`,
a data URI, or an object's address (see image_refs.py). Slots stand where the marks are. A row with images and
no marks gets its slots first. A `system` field, or a first turn from system, is the system message. `user`,
`assistant`, `chatgpt` and `model` are read like `human` and `gpt`. The key is the row's number, so an `id` may occur
twice. Texts are stripped, and CRLF becomes LF.

Left out: marks without as many images (image_count_mismatch), two answers in a row or a question at the end (bad_role),
an empty answer (empty_target), a picture that is not there (image_not_found), turns of another shape (schema_error),
and whatever Sample.check refuses.
"""

from collections.abc import Container, Iterator, Sequence

from dataset_builders.contracts.sample import Sample, SkipSample
from dataset_builders.readers.conversation import from_sharegpt, images_of
from dataset_builders.readers.conversation_rows import (
    CONVERSATION_SUFFIXES,
    iter_conversation_rows,
    list_conversation_parts,
)
from dataset_builders.readers.image_refs import IMAGE_PATTERNS, ImageReader, ImageRefOptions, check_image_root
from dataset_builders.readers.parts import Builder, Part, SkippedRow
from dataset_builders.readers.row_files import subset_patterns
from dataset_builders.storage.store import StorePath


class LlavaOptions(ImageRefOptions):
    """How a raw row becomes a sample."""


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """The files of rows of these subsets, and every picture: a row may name any of them."""
    return (*subset_patterns(subsets, CONVERSATION_SUFFIXES), *IMAGE_PATTERNS)


def list_parts(source: StorePath, subsets: Sequence[str], options: LlavaOptions) -> list[Part]:
    """The parts of all files. Raises InputError as `list_conversation_parts`, and for an unknown image_root."""
    check_image_root(source, options.image_root)
    return list_conversation_parts(source, subsets, "conversations")


def iter_part(part: Part, options: LlavaOptions, rows: Container[int] | None = None) -> Iterator[Sample | SkippedRow]:
    """Samples and unusable rows of one part, in order. One row is in memory at a time.

    Raises:
        InputError: a malformed array, or a parquet file that breaks off.
    """
    reader = ImageReader(part, options.image_root)
    for row, record in iter_conversation_rows(part, rows):
        if isinstance(record, SkippedRow):
            yield record
            continue
        try:
            images = images_of(record, "image", "images") or []
            yield from_sharegpt(record, images).sample(part.key(row), reader.read)
        except SkipSample as skip:
            yield SkippedRow(part.key(row), skip.reason, skip.detail)


BUILDER = Builder(options=LlavaOptions, patterns=patterns, list_parts=list_parts, iter_part=iter_part)
