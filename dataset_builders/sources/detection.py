"""Images with boxes of classes -> Sample: COCO's instances, YOLO's text files, Label Studio's rectangles.

layout: coco or label_studio. The source is a directory of `<subset>.json` or `<subset>/*.json`, or one such file
(`annotations.py` has their forms); a row is an image of COCO, or a task. The boxes of an image, say

    {"images": [{"id": 7, "file_name": "7.jpg", "width": 640, "height": 480}],
     "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
     "annotations": [{"image_id": 7, "category_id": 1, "bbox": [10, 20, 300, 400]}]}

become, with the default question,

    Sample(key="annotations/00000007", images=(b"\\xff\\xd8\\xff...",), messages=(
        user '<image>Locate every instance that belongs to the following categories: "cat, dog". Report bbox
              coordinates in JSON format.',
        assistant "<boxes>" with a list of one box: 10, 20, 310, 420, cat))

layout: yolo. The source is a directory of images, each with a text file, in which a line is an object: the number of
its class, then the box's middle, width and height in shares of the image's sides.

    train/images/7.jpg   train/labels/7.txt      also images/train/7.jpg with labels/train/7.txt, or both in one folder
    data.yaml            with `names`, or classes.txt with a name a line

An image without a text file has no objects, as for YOLO's trainer.

{labels} in the question stands for all classes. With {label}, each class of the image is a turn of its own, and so are
`absent` classes that the image does not have. An image without boxes is a sample with an empty list. The rows of YOLO
are numbered in natural order of the images' names, in the subset `data`.

Boxes are of the image as shown, after EXIF. Where EXIF turns an image, a file's own width and height tell whether its
boxes were measured before or after; where they cannot (a half turn, a mirror, a square), `boxes_of` must say so for
COCO. Label Studio, in a browser, and YOLO's trainer both show the turned image.

Left out: a width or height that is not the image's, a box outside its image, without area, turned, or of other than
four numbers, such as YOLO's polygons (bad_box); a class without a name (schema_error); a task that nobody finished
(no_text); a missing image (image_not_found). Not read, and counted by convert: annotations of crowds (iscrowd), without
a box, or of no image; further annotations of a task, and its results of other kinds.
"""

import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

import yaml
from pydantic import Field, model_validator

from dataset_builders.contracts.boxes import BOX_SLOT
from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample, Split
from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.annotations import Picture, read_annotations
from dataset_builders.readers.box_places import Images, Measured, measured
from dataset_builders.readers.box_texts import Corners
from dataset_builders.readers.image_refs import ImageReader, ImageRefOptions, check_image_root
from dataset_builders.readers.parts import Builder, Part, SkippedRow, split_of
from dataset_builders.readers.source_files import (
    IMAGE_SUFFIXES,
    NUMBERED,
    SourceFile,
    choose_subsets,
    content_stamp,
    file_parts,
    list_files,
    open_at,
    row_parts,
    span_parts,
)
from dataset_builders.readers.table_files import stripped
from dataset_builders.storage.store import StorePath

QUESTION = (  # of Qwen's cookbook, 2d_grounding
    'Locate every instance that belongs to the following categories: "{labels}". Report bbox coordinates in JSON '
    "format."
)
NAME_FILES = ("data.yaml", "classes.txt")
_SUFFIXES = (".json",)
_PART_ROWS = 512
_MOST_NAMES = 1 << 20  # bytes of a file of names


class DetectionOptions(ImageRefOptions):
    """The form of the boxes, and the question about them."""

    layout: Literal["coco", "yolo", "label_studio"] = Field(
        description="coco: JSON of instances; yolo: a text file for each image; label_studio: an export as JSON"
    )
    question: str = Field(
        default=QUESTION,
        min_length=1,
        description="what is asked about each image; {labels}: all classes; {label}: a turn for each class",
    )
    absent: int = Field(
        default=1, ge=0, le=100, description="with {label}: how many classes that an image lacks are asked about too"
    )
    annotations: tuple[str, ...] = Field(
        default=(), description="coco and label_studio: globs of the files of boxes below the source; none: all JSON"
    )
    classes: str = Field(
        default="", description="yolo: the file of the class names below the source; empty: data.yaml or classes.txt"
    )
    boxes_of: Literal["shown", "stored"] | None = Field(
        default=None,
        description="the image that boxes were measured on, where EXIF turns it: shown, as viewers show it; stored, "
        "before it is turned; null: by the width and height that the file names, else shown",
    )
    train_splits: tuple[str, ...] = Field(default=("train",), description="yolo: folders to train on")
    heldout_splits: tuple[str, ...] = Field(
        default=("validation", "valid", "val", "test"), description="yolo: folders that are held out"
    )

    @model_validator(mode="after")
    def _fit_the_layout(self) -> "DetectionOptions":
        own = {"image_root", "annotations"} if self.layout == "yolo" else {"classes", "train_splits", "heldout_splits"}
        for name in sorted(own):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} does not belong to layout {self.layout}; leave it out")
        return self


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """Return globs that match every file, since the options name the files of boxes and of classes."""
    return ("*", "**/*")


def list_parts(source: StorePath, subsets: Sequence[str], options: DetectionOptions) -> list[Part]:
    """Return all parts of the source: files and their rows in order, or for YOLO the images in natural order."""
    if options.layout == "yolo":
        return _yolo_parts(source, subsets, options)
    check_image_root(source, options.image_root)

    def parts_of(file: SourceFile, subset: str) -> list[Part]:
        if options.annotations and not any(fnmatchcase(file.name, glob) for glob in options.annotations):
            return []
        number = len(read_annotations(file.path, options.layout))
        return span_parts(
            file,
            subset,
            ((first, last := min(first + _PART_ROWS, number), last - first) for first in range(0, number, _PART_ROWS)),
        )

    parts = row_parts(source, subsets, _SUFFIXES, parts_of)
    for glob in options.annotations:
        if not any(fnmatchcase(part.name, glob) for part in parts):
            raise InputError(f"options.annotations: no file of {source} with an image is named {glob!r}")
    return parts


def iter_part(
    part: Part, options: DetectionOptions, rows: Container[int] | None = None
) -> Iterator[Sample | SkippedRow]:
    """Yield samples and unusable rows of one part, in order. One image is in memory at a time."""
    if options.layout == "yolo":
        reader, classes = ImageReader(part, "."), _class_names(_top(part), options)
    else:
        reader, file = ImageReader(part, options.image_root), read_annotations(part.path, options.layout)
        classes = file.classes
    for row in range(part.first_row, part.first_row + part.num_rows):
        if rows is not None and row not in rows:
            continue
        place = row - part.first_row
        name = part.files[place] if part.files else f"row {part.file_row + place}"
        try:
            if part.files:
                picture, image = _yolo_picture(name, reader, classes), reader.read(f"./{name}")
            else:
                picture = file.picture(part.file_row + place)
                name = f"{name}, {picture.ref!a}"
                image = reader.read(picture.ref)
            yield _sample(part.key(row), picture, image, classes, options)
        except SkipSample as skip:
            yield SkippedRow(part.key(row), skip.reason, f"{name}: {skip.detail}")


def not_read(part: Part, options: DetectionOptions) -> Mapping[str, int]:
    """Return what is left out within the rows of a part, in words -> how often."""
    if options.layout == "yolo":
        return {}
    first, last = part.file_row, part.file_row + part.num_rows
    file = read_annotations(part.path, options.layout)
    return Counter(what for row, what in file.not_read if first <= row < last)


BUILDER = Builder(
    options=DetectionOptions,
    patterns=patterns,
    list_parts=list_parts,
    iter_part=iter_part,
    has_splits=True,
    not_read=not_read,
    images_are_rows=True,
)


def _sample(key: str, picture: Picture, image: bytes, classes: Sequence[str], options: DetectionOptions) -> Sample:
    boxes_of = _boxes_of(picture, measured(image), options)
    images = Images(lambda _: image, 1, boxes_of)
    messages = []
    for question, boxes in _turns(picture, classes, options):
        place = images.place(0, boxes, picture.convention, is_list=True)
        messages += [
            Message(role="user", text=question),
            Message(role="assistant", text=BOX_SLOT, boxes=(place,)),
        ]
    if IMAGE_SLOT not in messages[0].text:
        messages[0] = Message(role="user", text=IMAGE_SLOT + messages[0].text)
    sample = Sample(key=key, messages=tuple(messages), images=(image,))
    sample.check()
    return sample


def _turns(
    picture: Picture, classes: Sequence[str], options: DetectionOptions
) -> list[tuple[str, Sequence[tuple[Corners, str]]]]:
    """Return (question, boxes of the answer) of each turn."""
    text = stripped(options.question.replace("{labels}", ", ".join(classes)))
    if "{label}" not in options.question:
        return [(text, picture.boxes)]
    there = dict.fromkeys(label for _, label in picture.boxes)
    # The same absent classes in every run and for any other rows beside this one.
    absent = [label for label in classes if label not in there]
    absent.sort(key=lambda label: hashlib.sha256(f"{picture.ref}\0{label}".encode("utf-8", "surrogateescape")).digest())
    number = max(options.absent, not there)
    asked = {*there, *absent[:number]}
    if not asked:
        raise SkipSample("no_text", "no class to ask about: the file names none")
    known = [*classes, *(label for label in there if label not in classes)]
    return [
        (text.replace("{label}", label).replace(IMAGE_SLOT, "" if i else IMAGE_SLOT), own)
        for i, label in enumerate(label for label in known if label in asked)
        for own in [[each for each in picture.boxes if each[1] == label]]
    ]


def _boxes_of(picture: Picture, image: Measured, options: DetectionOptions) -> Literal["shown", "stored"]:
    """Return the image that a picture's boxes were measured on, by the size that its file names."""
    sizes = {"shown": image.shown, "stored": image.stored}
    if options.boxes_of is not None:
        sizes = {options.boxes_of: sizes[options.boxes_of]}
    fits = [name for name, size in sizes.items() if picture.size in (None, size)]
    told = "no size" if picture.size is None else f"{picture.size[0]} x {picture.size[1]} px"
    if not fits:
        width, height = image.shown
        turned = f", and {image.stored[0]} x {image.stored[1]} before EXIF" if image.stored != image.shown else ""
        raise SkipSample("bad_box", f"boxes for an image of {told}, which is {width} x {height}{turned}")
    if options.layout == "coco" and image.orientation != 1 and len(fits) > 1:
        raise SkipSample(
            "bad_box",
            f"EXIF turns the image (orientation {image.orientation}), and boxes for {told} may be of either; set "
            "options.boxes_of: shown or stored",
        )
    return fits[0]


# ------------------------------------------------------------------ YOLO


def _yolo_parts(source: StorePath, subsets: Sequence[str], options: DetectionOptions) -> list[Part]:
    if source.is_file():
        raise InputError(f"raw data {source} is a file; layout yolo reads a directory of images and text files")
    _class_names(source, options)  # refused before the source is walked
    files = list_files(source, patterns(()))
    images = [file for file in files if file.name.lower().endswith(tuple(f".{s}" for s in IMAGE_SUFFIXES))]
    texts = {file.name for file in files if file.name.endswith(".txt")}
    if not any(name in texts for image in images for name in label_names(image.name)):
        example = f", such as {label_names(images[0].name)[0]} for {images[0].name}" if images else ""
        raise InputError(f"raw data {source} holds no image with a text file of boxes{example}; see layout yolo")
    known = {*options.train_splits, *options.heldout_splits}
    for image in images:
        for folder in image.name.split("/")[:-1]:
            if split_of(folder) == "heldout" and folder not in known:
                raise InputError(
                    f"{source}: the folder {folder!r} is named like held-out data, and its images would be trained on; "
                    f"add it to options.heldout_splits or options.train_splits"
                )
    return [
        part
        for subset, own in choose_subsets(source, subsets, {NUMBERED: images})
        for part in file_parts(own, subset, lambda name: _split(name, options), _PART_ROWS)
    ]


def label_names(image: str) -> list[str]:
    """Return where the text file of an image may be: in labels beside its images, or in its own folder."""
    stem = image.rpartition(".")[0]
    parts = stem.split("/")
    folders = [i for i, part in enumerate(parts[:-1]) if part == "images"]
    if not folders:
        return [f"{stem}.txt"]
    parts[folders[-1]] = "labels"
    return [f"{'/'.join(parts)}.txt", f"{stem}.txt"]


def _yolo_text(image: str, reader: ImageReader) -> bytes | None:
    for name in label_names(image):
        try:
            return reader.read_path(f"./{name}")
        except SkipSample as skip:
            if skip.reason != "image_not_found":
                raise
    return None


def _yolo_picture(image: str, reader: ImageReader, classes: Sequence[str]) -> Picture:
    boxes = []
    for i, line in enumerate((_yolo_text(image, reader) or b"").decode("utf-8-sig", "replace").splitlines()):
        cells = line.split()
        if not cells:
            continue
        try:
            numbers = [float(cell) for cell in cells]
        except ValueError:
            raise SkipSample("bad_box", f"line {i} is {line[:80]!r}, no numbers") from None
        if len(numbers) != 5:
            what = "a polygon or a turned box" if len(numbers) > 6 else "no class and four numbers"
            raise SkipSample("bad_box", f"line {i} has {len(numbers)} numbers: {what}")
        number, x, y, width, height = numbers
        if not 0 <= number < len(classes) or number != int(number):  # also for NaN and infinity
            raise SkipSample("schema_error", f"line {i} has the class {cells[0]}, and there are {len(classes)} names")
        corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        boxes.append((corners, classes[int(number)]))
    return Picture(image, None, boxes, "relative_1")


def _split(name: str, options: DetectionOptions) -> Split | None:
    folders = name.split("/")[:-1]
    if any(folder in options.heldout_splits for folder in folders):
        return "heldout"
    return "train" if any(folder in options.train_splits for folder in folders) else None


def _top(part: Part) -> StorePath:
    return part.path.parents[part.name.count("/")]


def _class_names(source: StorePath, options: DetectionOptions) -> tuple[str, ...]:
    for name in (options.classes,) if options.classes else NAME_FILES:
        path = source / name
        if path.is_file():
            return names_in(path, content_stamp(path))
    wanted = options.classes or " or ".join(NAME_FILES)
    raise InputError(
        f"{source} has no {wanted}; write classes.txt with a class's name in each line, or name the file in "
        "options.classes"
    )


@lru_cache(8)
def names_in(path: StorePath, stamp: str) -> tuple[str, ...]:
    """Return the class names of a YAML file with `names`, or of a file with a name in each line."""
    with open_at(path) as file:
        data = file.read(_MOST_NAMES)
    try:
        if not path.name.endswith((".yaml", ".yml")):
            names = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
            while names and not names[-1]:
                names.pop()
        else:
            value = yaml.safe_load(data)
            names = value.get("names") if isinstance(value, dict) else None
            if isinstance(names, dict):  # by their numbers
                names = [names.get(i) for i in range(len(names))]
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {one_line(error)}; mend it") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str | int) and str(name) for name in names):
        raise InputError(f"{path} has no class names; write `names: [cat, dog]`, or a name in each line of classes.txt")
    return tuple(str(name).strip() for name in names)
