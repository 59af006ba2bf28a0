"""Images or clips in folders, each with a text file, or in folders that name their classes -> Sample.

The source is a directory or a URL. With {answer: text_file, question: "Describe the image."}, the answer is the file of
the same name with the suffix `suffix`:

    train/pets/1.jpg  train/pets/1.txt: "A dog in the snow."      subset pets, split train

becomes

    Sample(key="pets/00000000", images=(b"\\xff\\xd8\\xff...",), messages=(
        user "<image>Describe the image.", assistant "A dog in the snow."))

With {answer: folder_name, question: "Which flower is it?"}, the answer is the image's folder, with `_` and `-` as
spaces:

    val/water_lily/7.png                                          subset data, held out, assistant "water lily"

A top folder whose name is in `train_splits` or `heldout_splits` is a split; convert chooses the split of other images.
For text_file, the subset is the top folder, or the folder directly below a split's folder; without a folder, and for
folder_name, the subset is `data`. Folders may be nested. The rows of a subset are numbered in natural order of their
files' names. Two images of the same name with different suffixes are two rows that share a text. Other files are not
rows. A video file is a row like an image, with `<video>` at the beginning of its question.

Left out: an image without a text file, a text that is not UTF-8, or an image without a folder that names its class
(schema_error); a text file without an image, or an image that is a link out of the source (image_not_found); a text
that contains `<image>` (special_token_in_text); an empty text (empty_target); and all that Sample.check refuses.
"""

import json
from collections.abc import Container, Iterator, Sequence
from typing import Literal

from pydantic import Field

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, Sample, SkipSample, Split, Video
from dataset_builders.errors import InputError
from dataset_builders.readers.annotations import YOLO_LINES
from dataset_builders.readers.box_places import BoxOptions, with_boxes
from dataset_builders.readers.image_refs import MAX_VIDEO_BYTES, ImageReader
from dataset_builders.readers.parts import Builder, Part, SkippedRow, splits_of
from dataset_builders.readers.source_files import (
    IMAGE_SUFFIXES,
    NUMBERED,
    VIDEO_SUFFIXES,
    SourceFile,
    choose_subsets,
    file_parts,
    list_files,
)
from dataset_builders.readers.table_files import stripped
from dataset_builders.storage.store import StorePath

_PART_ROWS = 512
_VIDEOS = tuple(f".{suffix}" for suffix in VIDEO_SUFFIXES)
# The last two of the images leave their rows out.
_IMAGES = (*(f".{suffix}" for suffix in (*IMAGE_SUFFIXES, "heic", "heif")), *_VIDEOS)


class ImageFolderOptions(BoxOptions):
    """The question about each image, and the source of its answer."""

    question: str = Field(min_length=1, description="the text that is asked about each image or video")
    answer: Literal["text_file", "folder_name"] = Field(
        description="text_file: the file of the same name beside the image; folder_name: the name of its folder"
    )
    suffix: str = Field(default="txt", pattern=r"^[A-Za-z0-9_.-]+$", description="the suffix of the text files")
    train_splits: tuple[str, ...] = Field(default=("train",), description="top folders to train on")
    heldout_splits: tuple[str, ...] = Field(
        default=("validation", "valid", "val", "test"), description="top folders that are held out"
    )


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """Return globs that match every file, since the options determine the suffix of text files."""
    return ("*", "**/*")


def list_parts(source: StorePath, subsets: Sequence[str], options: ImageFolderOptions) -> list[Part]:
    """Return all parts of the source, each with the names of its rows' files. The source is listed once."""
    if source.is_file():
        raise InputError(f"raw data {source} is a file; the builder image_folder reads a directory of images")
    rows_of: dict[str, list[SourceFile]] = {}
    files, ending = list_files(source, patterns(())), f".{options.suffix}"
    with_image = {_stem(file.name) for file in files if _is_image(file.name)}
    row_files = []  # every image, and every text file that has no image
    for file in files:
        is_text = options.answer == "text_file" and file.name.endswith(ending)
        if _is_image(file.name) or (is_text and file.name.removesuffix(ending) not in with_image):
            row_files.append(file)
    _check_folders(source, [file.name for file in row_files], options)
    for file in row_files:
        folders = _folders(file.name, options)
        is_named = options.answer == "text_file" and folders
        rows_of.setdefault(folders[0] if is_named else NUMBERED, []).append(file)
    if not rows_of:
        known = ", ".join(_IMAGES)
        raise InputError(f"raw data {source} holds no image or video; the builder image_folder reads {known}")
    return [
        part
        for subset, files in choose_subsets(source, subsets, rows_of)
        for part in file_parts(files, subset, lambda name: _split(name, options), _PART_ROWS)
    ]


def iter_part(
    part: Part, options: ImageFolderOptions, rows: Container[int] | None = None
) -> Iterator[Sample | SkippedRow]:
    """Yield samples and unusable rows of one part, in order. One image is in memory at a time."""
    reader = ImageReader(part, ".")  # names in a part are relative to the source
    for row, name in enumerate(part.files, part.first_row):
        if rows is not None and row not in rows:
            continue
        try:
            yield _sample(part.key(row), name, reader, options)
        except SkipSample as skip:
            yield SkippedRow(part.key(row), skip.reason, f"{name!r}: {skip.detail}")


BUILDER = Builder(
    options=ImageFolderOptions,
    patterns=patterns,
    list_parts=list_parts,
    iter_part=iter_part,
    has_splits=True,
    images_are_rows=True,
)


def _check_folders(source: StorePath, names: Sequence[str], options: ImageFolderOptions) -> None:
    """Raise InputError for a folder that is named like held-out data and would be trained on."""
    below: dict[str, dict[str, None]] = {}  # folder -> the folders in it
    for name in names:
        parts = name.split("/")[:-1]
        for i, part in enumerate(parts):
            below.setdefault("/".join(parts[:i]), {})[part] = None
    known = {*options.train_splits, *options.heldout_splits}
    for parent, folders in below.items():
        held = [name for name, split in splits_of(folders).items() if split == "heldout"]
        unknown = [name for name in held if parent or name not in known]
        if parent and unknown and len(splits_of(folders)) > len(held):
            raise InputError(
                f"{source}/{parent}/{unknown[0]} is named like held-out data, and its images would be trained on; give "
                f"{source}/{parent} as the data"
            )
        if not parent and unknown:
            names_of = json.dumps([*options.heldout_splits, *unknown])
            raise InputError(
                f"{source}/{unknown[0]} is named like held-out data, and its images would be trained on; set "
                f"options.heldout_splits: {names_of}, or add it to options.train_splits"
            )


def _sample(key: str, name: str, reader: ImageReader, options: ImageFolderOptions) -> Sample:
    if not _is_image(name):
        raise SkipSample("image_not_found", "a text without an image of the same name")
    if options.answer == "text_file":
        answer = _text(name, reader, options)
    elif folders := _folders(name, options):
        answer = folders[-1].replace("_", " ").replace("-", " ").strip()
    else:
        raise SkipSample("schema_error", "the image lies in no folder that names its class")
    is_video = name.lower().endswith(_VIDEOS)
    if found := [slot for slot in (IMAGE_SLOT, VIDEO_SLOT) if slot in answer]:
        raise SkipSample("special_token_in_text", f"the text holds {found[0]}")
    slot = VIDEO_SLOT if is_video else IMAGE_SLOT
    question = options.question.replace(IMAGE_SLOT, slot) if is_video else options.question
    question = question if slot in question else slot + question
    messages = (Message(role="user", text=stripped(question)), Message(role="assistant", text=answer))
    # The "./" keeps a name such as "data:1.jpg" from being read as a data URI or an address.
    if is_video:
        videos = (Video(data=reader.read(f"./{name}", MAX_VIDEO_BYTES)),)
        sample = Sample(key=key, messages=messages, images=(), videos=videos)
    else:
        images = (reader.read(f"./{name}"),)
        sample = Sample(key=key, messages=with_boxes(messages, images, options), images=images)
    sample.check()
    return sample


def _text(name: str, reader: ImageReader, options: ImageFolderOptions) -> str:
    text_name = f"{_stem(name)}.{options.suffix}"
    try:
        text = stripped(reader.read_path(f"./{text_name}").decode("utf-8-sig"))
        if YOLO_LINES.fullmatch(text):
            detail = (
                f"{text_name!r} holds boxes in YOLO's form, {text[:40]!r}, and no text; builder detection reads them"
            )
            raise SkipSample("schema_error", detail)
        return text
    except UnicodeDecodeError as error:
        raise SkipSample("schema_error", f"{text_name!r} is not UTF-8: {error.reason} at byte {error.start}") from None
    except SkipSample as skip:
        if skip.reason == "schema_error":
            raise
        raise SkipSample("schema_error", f"no caption file ({skip.detail})") from None


def _folders(name: str, options: ImageFolderOptions) -> list[str]:
    """Return the folders of a file below the source, without the folder of a split."""
    folders = name.split("/")[:-1]
    return folders[1:] if _split(name, options) is not None else folders


def _split(name: str, options: ImageFolderOptions) -> Split | None:
    top, slash, _ = name.partition("/")
    if slash and top in options.heldout_splits:
        return "heldout"
    return "train" if slash and top in options.train_splits else None


def _is_image(name: str) -> bool:
    return name.lower().endswith(_IMAGES)


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
