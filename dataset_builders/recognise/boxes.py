"""Recognition of boxes: what the numbers of boxes in texts are, and the files of boxes of a detector's data."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from dataset_builders.contracts.sample import IMAGE_SLOT, Sample, SkipSample
from dataset_builders.errors import InputError
from dataset_builders.readers.annotations import YOLO_LINES, Layout, layout_of, read_annotations
from dataset_builders.readers.box_places import image_of, measured
from dataset_builders.readers.box_texts import Corners, find_boxes
from dataset_builders.readers.source_files import SourceFile, content_stamp, open_at
from dataset_builders.recognise.columns import split_names
from dataset_builders.sources.detection import NAME_FILES, label_names, names_in

_RELATIVE = 1000
_FAR = 0.05  # share of boxes outside their images above which they are no mistakes
_SURE = 0.9  # of 1000: a largest number above it is no accident
_FEW = 10  # boxes by which nobody can be sure
_PEEKED = 20  # text files that are looked at
_PEEKED_BYTES = 1 << 16


def convention_of(samples: Sequence[Sample]) -> tuple[str | None, str]:
    """Return what the numbers of boxes in these samples' texts are, a value of `options.boxes`, and why, in words.

    None: they fit no convention, or there are none.
    """
    found = list(_written(samples))
    if not found:
        return None, "their boxes are of no image"
    largest = max(max(corners) for corners, _ in found)
    x, y = (max(max(corners[i], corners[i + 2]) for corners, _ in found) for i in (0, 1))
    outside = sum(max(c[0], c[2]) > w + 0.5 or max(c[1], c[3]) > h + 0.5 for c, (w, h) in found)
    width, height = max((size for _, size in found), key=lambda size: size[0] * size[1])
    numbers = f"the largest numbers are x {x:g} and y {y:g}"
    images = f"the largest of their images is {width} x {height} px"
    few = f"; {len(found)} boxes are few: look at the drawing" if len(found) < _FEW else ""
    if largest <= 1:
        return "relative_1", f"{numbers}{few}"
    would = f"{outside} of {len(found)} boxes would lie outside of their images as pixels"
    if largest > _RELATIVE:
        if outside > _FAR * len(found):
            return None, f"{numbers}, {images}, and {would}; pixels of a resized image cannot be read"
        return "pixels", f"{numbers}, {images}{few}"
    if outside > _FAR * len(found) or (outside and largest > _SURE * _RELATIVE):
        return "relative_1000", f"{numbers}, {images}, and {would}{few}"
    # Of the two that fit, boxes reach the edges of their images in the right one.
    reach = max(max(c[2] / w, c[3] / h) for c, (w, h) in found)
    which = "pixels" if reach >= largest / _RELATIVE else "relative_1000"
    shares = f"boxes reach {reach:.0%} of a side as pixels, and {largest / _RELATIVE:.0%} of 1000"
    return which, f"{numbers}, {images}, so {shares}{few}"


def _written(samples: Sequence[Sample]) -> Iterator[tuple[Corners, tuple[int, int]]]:
    """Yield the boxes of texts that do not say what their numbers are, with the (width, height) of their images."""
    for sample in samples:
        slots = [message.text.count(IMAGE_SLOT) for message in sample.messages]
        sizes: dict[int, tuple[int, int]] = {}
        for i, message in enumerate(sample.messages):
            image = image_of(i, slots)
            try:
                found = [] if image is None else find_boxes(message.text, message.role == "assistant")
                for corners in (box for each in found if each.convention is None for box, _ in each.boxes):
                    if image not in sizes:
                        sizes[image] = measured(sample.images[image]).shown
                    yield corners, sizes[image]
            except SkipSample:
                continue


def json_layouts(files: Sequence[SourceFile]) -> tuple[dict[Layout, list[SourceFile]], list[SourceFile]]:
    """Return layout -> the JSON files that have boxes in it, directly in the source or in a folder of it, and files of
    further boxes of the same images, which are not read."""
    found: dict[Layout, list[SourceFile]] = {}
    for file in files:
        if file.name.endswith(".json") and file.name.count("/") <= 1 and (layout := layout_of(file.path)) is not None:
            found.setdefault(layout, []).append(file)
    coco = found.get("coco", [])
    instances = [file for file in coco if "instances" in PurePosixPath(file.name).name]
    if not instances:
        return found, []
    # COCO's own files of keypoints have the boxes of persons, which the instances have too.
    return found | {"coco": instances}, [file for file in coco if file not in instances]


def words_of_layout(layout: Layout, file: SourceFile) -> str:
    """Return what a file of boxes holds, in words; InputError if it is malformed."""
    read = read_annotations(file.path, layout)
    unit = "COCO's bbox: x, y, width, height in pixels" if layout == "coco" else "Label Studio's rectangles, in percent"
    what = "images" if layout == "coco" else "tasks"
    return f"{file.name} has {len(read):,} {what} with boxes of {len(read.classes)} classes ({unit})"


def yolo_options(files: Sequence[SourceFile], images: Sequence[str]) -> tuple[dict[str, Any], str, set[str]] | None:
    """Return options of layout yolo, the evidence in words, and the files that are read beside images; None if the text
    files of the images do not hold YOLO's boxes."""
    texts = {file.name: file for file in files if file.name.endswith(".txt")}
    own: Mapping[str, str] = {
        image: name for image in images if (name := next((n for n in label_names(image) if n in texts), ""))
    }
    peeked = [_start(texts[name]) for name in list(own.values())[:_PEEKED]]
    if not any(peeked) or not all(YOLO_LINES.fullmatch(text) for text in peeked if text):
        return None
    options: dict[str, Any] = {"layout": "yolo"}
    names = sorted((file for file in files if _may_name_classes(file.name)), key=lambda file: file.name.count("/"))
    classes = next((file.name for file in names if _has_names(file)), "")
    if classes not in ("", *NAME_FILES):
        options["classes"] = classes
    folders = dict.fromkeys(folder for image in images for folder in image.split("/")[:-1])
    options |= split_names(folders)
    rest = "" if len(own) == len(images) else "; the others are taken as images without objects"
    why = f"{len(own):,} of {len(images):,} images have a text file of YOLO's boxes (shares of width and height){rest}"
    return options, why, {*own.values(), *(file.name for file in names)}


def _may_name_classes(name: str) -> bool:
    return name.endswith((".yaml", ".yml", ".names", "classes.txt"))


def _has_names(file: SourceFile) -> bool:
    try:
        return bool(names_in(file.path, content_stamp(file.path)))
    except InputError:
        return False


def _start(file: SourceFile) -> str:
    with open_at(file.path, size=_PEEKED_BYTES) as stream:
        text = stream.read(_PEEKED_BYTES)
    cut = text.rpartition(b"\n")[0] if len(text) == _PEEKED_BYTES else text
    return cut.decode("utf-8-sig", "replace").strip()
