"""OpenAI's messages as JSON lines, a JSON array or parquet, and similar formats of other tools -> Sample.

The source is a directory of `<subset>/*.jsonl` or `<subset>.jsonl`; `.json` and `.parquet` too. A raw row of OpenAI's
fine-tuning format, which SkyRL's converter of the_cauldron writes with {"type": "image", "image": "data:..."} parts:

    {"messages": [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [
            {"type": "text", "text": "Is "},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0..."}},
            {"type": "text", "text": " a cat?"}]},
        {"role": "assistant", "content": "Yes", "weight": 1}]}

becomes

    Sample(key="pets/00000012", images=(b"\\x89PNG...",), messages=(
        system "Answer in one word.", user "Is <image> a cat?", assistant "Yes"))

A row of ms-swift or LLaMA-Factory, with its images in a separate field and marks in the text, becomes the same sample.
Without any mark, the images come before the first question. TRL's {"type": "image"} parts, which name no image, take
the images of that field in order:

    {"messages": [{"role": "user", "content": "Is <image> a cat?"}, {"role": "assistant", "content": "Yes"}],
     "images": ["pictures/1.png"]}

The role `developer` is read as `system`. Parts of a text are joined without a separator. An answer with weight 0
(ms-swift: loss false, and other marks, see unread.py) is context and is not trained on. An answer's reasoning is in
`reasoning_content` (or `reasoning`), or in a block `<think>...</think>` at the start of its text. Texts are stripped,
and CRLF becomes LF. An image is a data URI, a path relative to the file or to `image_root`, or an object's address (see
image_refs.py). Of other fields, those that would change what is trained leave the row out (unread.py).

Left out: a line that is not JSON (json_parse_error); fields of another type, an image in an answer, tools, videos or
audio in the row (schema_error); tool calls, tool and function roles, an answer that follows no question, a system
message that is not first, no answer at the end (bad_role); a literal `<image>` that is not a mark
(special_token_in_text); a missing image (image_not_found); and all that Sample.check refuses.
"""

from collections.abc import Container, Iterator, Sequence

from dataset_builders.contracts.sample import Sample, SkipSample
from dataset_builders.readers.conversation import from_openai, images_of
from dataset_builders.readers.conversation_rows import (
    CONVERSATION_SUFFIXES,
    iter_conversation_rows,
    list_conversation_parts,
)
from dataset_builders.readers.image_refs import IMAGE_PATTERNS, ImageReader, ImageRefOptions, check_image_root
from dataset_builders.readers.parts import Builder, Part, SkippedRow
from dataset_builders.readers.row_files import subset_patterns
from dataset_builders.storage.store import StorePath


class OpenAIOptions(ImageRefOptions):
    """Options for the conversion of a raw row to a sample."""


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the files of these subsets, and of every image file: a row may name any of them."""
    return (*subset_patterns(subsets, CONVERSATION_SUFFIXES), *IMAGE_PATTERNS)


def list_parts(source: StorePath, subsets: Sequence[str], options: OpenAIOptions) -> list[Part]:
    """Return the parts of all files, in order of subsets, files and rows."""
    check_image_root(source, options.image_root)
    return list_conversation_parts(source, subsets, "messages")


def iter_part(part: Part, options: OpenAIOptions, rows: Container[int] | None = None) -> Iterator[Sample | SkippedRow]:
    """Yield samples and unusable rows of one part, in order. A few rows are in memory at a time."""
    reader = ImageReader(part, options.image_root)
    for row, record in iter_conversation_rows(part, rows):
        try:
            if isinstance(record, SkippedRow):
                raise SkipSample(record.reason, record.detail)
            yield from_openai(record, images_of(record)).sample(part.key(row), reader.read)
        except SkipSample as skip:
            yield SkippedRow(part.key(row), skip.reason, skip.detail)


BUILDER = Builder(options=OpenAIOptions, patterns=patterns, list_parts=list_parts, iter_part=iter_part)
