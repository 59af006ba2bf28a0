"""LLaVA's JSON and ShareGPT's -> Sample.

The source is a directory of `<subset>.json` or `<subset>/*.json`, each an array of rows; `.jsonl` and `.parquet` are
read too. A raw row:

    {"id": "000000033471", "image": "coco/train2017/000000033471.jpg",
     "conversations": [{"from": "human", "value": "<image>\\nWhat are the colors of the bus?"},
                       {"from": "gpt", "value": "White and red."}]}

becomes

    Sample(key="llava_mix/00000012", images=(b"\\xff\\xd8\\xff...",), messages=(
        user "<image>\\nWhat are the colors of the bus?", assistant "White and red."))

`image`, or `images` as in LLaMA-Factory, is an image or a list of images. An image is a path relative to the file or to
`image_root`, a data URI, or an object's address (see image_refs.py). Slots are at the marks; in a row with images and
without marks, the slots come first. A `system` field, or a first turn from system, is the system message. The role
`user` is read like `human`, and `assistant`, `chatgpt` and `model` like `gpt`. The key is the row's number, so an `id`
may occur twice. Texts are stripped, and CRLF becomes LF.

Left out: a number of marks that differs from the number of images (image_count_mismatch), two consecutive answers or a
question at the end (bad_role), an empty answer (empty_target), a missing image (image_not_found), turns of another
shape (schema_error), and all that Sample.check refuses.
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
    """Options for the conversion of a raw row to a sample."""


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """Return globs of these subsets' row files, and of every image file: a row may name any of them."""
    return (*subset_patterns(subsets, CONVERSATION_SUFFIXES), *IMAGE_PATTERNS)


def list_parts(source: StorePath, subsets: Sequence[str], options: LlavaOptions) -> list[Part]:
    """Return the parts of all files, in order of subsets, files and rows."""
    check_image_root(source, options.image_root)
    return list_conversation_parts(source, subsets, "conversations")


def iter_part(part: Part, options: LlavaOptions, rows: Container[int] | None = None) -> Iterator[Sample | SkippedRow]:
    """Yield samples and unusable rows of one part, in order. One row is in memory at a time."""
    reader = ImageReader(part, options.image_root)
    for row, record in iter_conversation_rows(part, rows):
        if isinstance(record, SkippedRow):
            yield record
            continue
        try:
            images = images_of(record) or []
            yield from_sharegpt(record, images).sample(part.key(row), reader.read)
        except SkipSample as skip:
            yield SkippedRow(part.key(row), skip.reason, skip.detail)


BUILDER = Builder(options=LlavaOptions, patterns=patterns, list_parts=list_parts, iter_part=iter_part)
