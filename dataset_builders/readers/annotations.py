"""JSON files of boxes of classes: COCO's instances, and the tasks that Label Studio exports.

Such a file is one JSON value, whose boxes may stand far from the names of their images. A process reads it once, for
all the parts that it converts.

    COCO          {"images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name"}],
                   "annotations": [{"image_id", "category_id", "bbox": [x, y, width, height], "iscrowd"}]}
    Label Studio  [{"data": {"image": "/data/local-files/?d=1.jpg"}, "annotations": [{"result": [
                   {"type": "rectanglelabels", "original_width": 640, "original_height": 480,
                    "value": {"x": 10, "y": 20, "width": 50, "height": 40, "rotation": 0,
                              "rectanglelabels": ["cat"]}}]}]}], in percent; JSON-MIN too
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.box_texts import Corners, is_number
from dataset_builders.readers.conversation import IMAGE_NAMES, looks_like_image
from dataset_builders.readers.source_files import content_stamp, open_at
from dataset_builders.storage.store import StorePath

Layout = Literal["coco", "label_studio"]
LOCAL_FILES = "/data/local-files/?d="  # Label Studio's address of a file on its disk
# A class and numbers in each line: boxes, or the polygons that YOLO's text files may have in their place.
YOLO_LINES = re.compile(r"(\d+( +-?\d*\.?\d+(e-?\d+)?){4,}\s*)+")
_UPLOADS = "/data/upload/"  # and of an uploaded file: the project's number and a name follow
_MAX_BYTES = 2 << 30
_RECTANGLES = "rectanglelabels"
CROWD, NO_BOX, NO_IMAGE = "annotations of crowds (iscrowd)", "annotations without a box", "annotations of no image"
OTHERS = "further annotations of a task"


@dataclass(frozen=True, slots=True)
class Picture:
    """A row: an image and its boxes."""

    ref: str  # the image's path
    size: tuple[int, int] | None  # (width, height) that the boxes were measured in; None if the file does not say it
    boxes: Sequence[tuple[Corners, str]]  # with labels, in the order of the file
    convention: str  # pixels or relative_1


class Coco:
    """The images of a file in COCO's form, in order."""

    def __init__(self, path: StorePath, value: Mapping[str, Any]) -> None:
        images, annotations, categories = (value.get(key) for key in ("images", "annotations", "categories"))
        for key, rows in (("images", images), ("annotations", annotations), ("categories", categories)):
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise InputError(f"{path}: {key!r} is no array of objects, as COCO's instances have it; mend the file")
        names = {_id(category, "id"): str(category.get("name")) for category in categories}
        self._images = [(image.get("file_name"), image.get("width"), image.get("height")) for image in images]
        row_of = {_id(image, "id"): row for row, image in enumerate(images)}
        if len(row_of) != len(images):
            twice = Counter(_id(image, "id") for image in images).most_common(1)[0][0]
            raise InputError(f"{path}: two images have the id {twice!r}; give each its own")
        self.not_read: list[tuple[int, str]] = []  # (row, what is left out of it)
        self._faults: dict[int, SkipSample] = {}
        rows, corners, labels = [], [], []
        for annotation in annotations:
            row, box = row_of.get(_id(annotation, "image_id")), annotation.get("bbox")
            label = _id(annotation, "category_id")
            if row is None or annotation.get("iscrowd") or box in (None, []):
                what = NO_IMAGE if row is None else CROWD if annotation.get("iscrowd") else NO_BOX
                self.not_read.append((row or 0, what))
            elif not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
                self._faults[row] = SkipSample("bad_box", f"bbox is {str(box)[:80]}, no x, y, width and height")
            elif label not in names:
                self._faults[row] = SkipSample("schema_error", f"category_id {label!r} is no id of the categories")
            else:
                rows.append(row)
                corners.append(box)
                labels.append(label)
        # Some 40 bytes a box: a worker of each part holds the whole file's.
        order = np.argsort(np.array(rows, np.int64), kind="stable")
        self._boxes = np.array(corners, np.float64).reshape(-1, 4)[order]
        ids = list(names)
        place = {each: i for i, each in enumerate(ids)}
        self._labels = np.array([place[label] for label in labels], np.int32)[order]
        self._starts = np.searchsorted(np.array(rows, np.int64)[order], np.arange(len(images) + 1))
        self._names = list(names.values())
        # Roboflow adds a class that is only the group of the others.
        groups, used = {category.get("supercategory") for category in categories}, set(labels)
        self.classes = tuple(dict.fromkeys(names[i] for i in ids if i in used or names[i] not in groups))

    def __len__(self) -> int:
        return len(self._images)

    def picture(self, row: int) -> Picture:
        """Return a row; SkipSample if it cannot be used."""
        if row in self._faults:
            raise self._faults[row]
        name, *sides = self._images[row]
        if not isinstance(name, str):
            raise SkipSample("schema_error", f"file_name of images[{row}] is {name!r}, not text")
        span = slice(self._starts[row], self._starts[row + 1])
        boxes = [
            ((x, y, x + width, y + height), self._names[label])
            for (x, y, width, height), label in zip(self._boxes[span].tolist(), self._labels[span].tolist())
        ]
        return Picture(name, _size(sides, f"images[{row}]"), boxes, "pixels")


def _id(value: Mapping[str, Any], name: str) -> int | float | str | None:
    found = value.get(name)
    return found if isinstance(found, int | float | str) else None


class LabelStudio:
    """The tasks of an export of Label Studio, in order."""

    def __init__(self, path: StorePath, value: Sequence[Any]) -> None:
        self._tasks = [task if isinstance(task, dict) else {} for task in value]
        self.not_read: list[tuple[int, str]] = []
        labels = set()
        for row, task in enumerate(self._tasks):
            first, *others = _done(task) or [[]]
            self.not_read += [(row, OTHERS)] * len(others)
            for result in first:
                if _is_rectangle(result):
                    labels.update(_labels(result))
                else:
                    self.not_read.append((row, f"results of the kind {result.get('type')}"))
        self.classes = tuple(sorted(labels - {""}))

    def __len__(self) -> int:
        return len(self._tasks)

    def picture(self, row: int) -> Picture:
        """Return a row; SkipSample if it cannot be used."""
        task = self._tasks[row]
        done = _done(task)
        if not done:
            raise SkipSample("no_text", "the task has no annotation; an image without objects has one that is empty")
        size, boxes = None, []
        for result in filter(_is_rectangle, done[0]):
            value = result["value"]
            numbers = [value.get(key) for key in ("x", "y", "width", "height")]
            if not all(map(is_number, numbers)):
                raise SkipSample("bad_box", f"x, y, width and height are {numbers}, no numbers")
            turned = value.get("rotation") or result.get("image_rotation")
            if turned:
                raise SkipSample("bad_box", f"a box or an image that is turned by {turned} degrees; only upright boxes")
            own = _size([result.get("original_width"), result.get("original_height")], "the result's original")
            if size is not None and own != size:
                raise SkipSample("bad_box", f"boxes of images of {size} and of {own} px in one task")
            size = own
            x, y, width, height = (number / 100 for number in numbers)
            boxes += [((x, y, x + width, y + height), label) for label in _labels(result)]
        return Picture(_image_of(task), size, boxes, "relative_1")


def _done(task: Mapping[str, Any]) -> list[list[dict]]:
    """Return the results of each annotation of a task that somebody finished."""
    if "annotation_id" in task:  # JSON-MIN has the first annotation's results, by the name of their control
        values = [each for value in task.values() if isinstance(value, list) for each in value]
        rectangles = [each for each in values if isinstance(each, dict) and _RECTANGLES in each]
        return [[{**each, "type": _RECTANGLES, "value": each} for each in rectangles]]
    annotations = task.get("annotations")
    annotations = annotations if isinstance(annotations, list) else []
    done = [each for each in annotations if isinstance(each, dict) and not each.get("was_cancelled")]
    lists = [each["result"] for each in done if isinstance(each.get("result"), list)]
    return [[result for result in results if isinstance(result, dict)] for results in lists]


def _is_rectangle(result: Mapping[str, Any]) -> bool:
    return result.get("type") == _RECTANGLES and isinstance(result.get("value"), dict)


def _labels(result: Mapping[str, Any]) -> list[str]:
    labels = result["value"].get(_RECTANGLES)
    return [str(label).strip() for label in labels] if isinstance(labels, list) and labels else [""]


def _image_of(task: Mapping[str, Any]) -> str:
    data = task.get("data") if isinstance(task.get("data"), dict) else task
    names = [*(name for name in IMAGE_NAMES if name in data), *data]
    refs = (local_path(data[name]) for name in names if isinstance(data[name], str))
    ref = next(filter(looks_like_image, refs), None)
    if ref is None:
        raise SkipSample("image_not_found", f"no image among the task's data: {', '.join(map(str, data))[:80]}")
    return ref


def local_path(ref: str) -> str:
    """Return the path of a file that Label Studio names by an address of its own, of an uploaded file only its name;
    any other text is unchanged."""
    if LOCAL_FILES in ref:
        return unquote(ref.split(LOCAL_FILES)[-1])
    return unquote(ref).rpartition("/")[2] if ref.startswith(_UPLOADS) else ref


def _size(sides: Sequence[Any], where: str) -> tuple[int, int] | None:
    if None in sides:
        return None
    if not all(is_number(side) and side == int(side) > 0 for side in sides):
        raise SkipSample("schema_error", f"width and height of {where} are {sides}, no whole numbers")
    return int(sides[0]), int(sides[1])


def read_annotations(path: StorePath, layout: Layout) -> Coco | LabelStudio:
    """Return a file of this layout, which a process parses once; InputError if it is not of the layout."""
    return _read(path, layout, content_stamp(path))


@lru_cache(2)  # neighbouring parts are of one file
def _read(path: StorePath, layout: Layout, stamp: str) -> Coco | LabelStudio:
    with open_at(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise InputError(f"{path} is over {_MAX_BYTES >> 30} GiB; split it into several files")
    try:
        text = data.decode("utf-8-sig")
        del data  # a third of the peak
        value = json.loads(text, object_hook=_without_outlines)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: {one_line(error)}") from error
    kind, words = (dict, "one object with images") if layout == "coco" else (list, "one array of tasks")
    if not isinstance(value, kind):
        raise InputError(f"{path} is not {words}, as layout {layout} has it; name the right files in annotations")
    return Coco(path, value) if layout == "coco" else LabelStudio(path, value)


def _without_outlines(value: dict[str, Any]) -> dict[str, Any]:
    """Drop an object's outlines, which take most of COCO's memory, as soon as it is parsed."""
    for name in ("segmentation", "keypoints"):
        value.pop(name, None)
    return value


def layout_of(path: StorePath) -> Layout | None:
    """Return the layout of a JSON file that holds boxes; None for any other file."""
    marks: dict[Layout, tuple[bytes, ...]] = {
        "coco": (b'"images"', b'"annotations"', b'"categories"', b'"bbox"'),
        "label_studio": (b'"annotation', f'"{_RECTANGLES}"'.encode()),
    }
    layout: Layout | None = None
    missing: set[bytes] = set()
    for block in _blocks(path):
        if layout is None:
            start = block.lstrip(b"\xef\xbb\xbf \t\r\n")
            layout = "label_studio" if start[:1] == b"[" else "coco"
            missing = set(marks[layout])
            if start[:1] not in (b"[", b"{") or not any(mark in block for mark in missing) or _is_line(start):
                return None
        missing -= {mark for mark in missing if mark in block}
        if not missing:
            return layout
        if layout == "label_studio":  # all its tasks are alike
            return None
    return None


def _is_line(start: bytes) -> bool:
    """Whether a file begins with an object in one line, before others."""
    line, newline, rest = start.partition(b"\n")
    return bool(newline and rest.strip()) and line.rstrip().endswith(b"}")


def _blocks(path: StorePath) -> Iterator[bytes]:
    """Yield a file's bytes in blocks that overlap a little, so that no mark is cut."""
    size, tail = 8 << 20, b""
    with open_at(path) as file:
        for _ in range(_MAX_BYTES // size):
            block = file.read(size)
            if not block:
                return
            yield tail + block
            tail = block[-32:]
