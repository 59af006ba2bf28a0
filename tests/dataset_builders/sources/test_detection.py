"""Images with boxes of classes: COCO, YOLO and Label Studio to samples, with the numbers worked out by hand."""

import json

import pytest
from PIL import Image

from dataset_builders.contracts.boxes import Box, BoxPlace
from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.readers import annotations
from dataset_builders.readers.parts import parts_of
from dataset_builders.sources import detection
from dataset_builders.sources.detection import BUILDER, DetectionOptions, not_read
from tests.helpers.json_rows import read_source, reasons, write_file
from tests.helpers.raw_rows import encode, jpeg_with_exif, orientation_exif, picture

pytestmark = pytest.mark.promise(
    "Boxes of every layout become pixels of the image as shown, by numbers that are checked by hand; a box that cannot "
    "be right leaves its row out with its numbers."
)

SIZE = (400, 300)
IMAGES = {name: encode(picture(i, *SIZE)) for i, name in enumerate(("a.png", "b.png", "c.png"))}
CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 1, "name": "dog"}]
QUESTION = (
    '<image>Locate every instance that belongs to the following categories: "cat, dog". Report bbox coordinates in '
    "JSON format."
)


def place(*boxes, size=SIZE):
    return BoxPlace(image=0, size=size, boxes=tuple(Box(*box) for box in boxes), is_list=True)


def answers(items):
    """Return the boxes of each sample's answers, or the reason for which a row is left out."""
    return [
        [message.boxes[0] for message in item.messages[1::2]] if isinstance(item, Sample) else item.reason
        for item in items
    ]


def write_images(source, names=IMAGES):
    for name in names:
        write_file(source / name, IMAGES[name.rpartition("/")[2]])


def coco(images=("a.png",), boxes=((0, 3, (40, 60, 160, 240)),), size=SIZE, **fields):
    """Return COCO's instances; `boxes` are (number of the image, category, bbox)."""
    return {
        "info": {"by": "me"},
        "images": [
            {"id": 100 + i, "file_name": name, "width": size[0], "height": size[1]} for i, name in enumerate(images)
        ],
        "annotations": [
            {"id": i, "image_id": 100 + image, "category_id": label, "bbox": list(box), "segmentation": [[1, 2]]}
            for i, (image, label, box) in enumerate(boxes)
        ],
        "categories": CATEGORIES,
    } | fields


def read_coco(source, value, **options):
    write_images(source)
    write_file(source / "instances.json", json.dumps(value).encode())
    return read_source("detection", source, layout="coco", **options)


def test_cocos_instances(tmp_path):
    boxes = [(1, 1, (0, 0, 400, 300)), (0, 3, (40, 60, 160, 240)), (1, 3, (10.5, 20.25, 30, 40))]
    a, b, c = read_coco(tmp_path, coco(tuple(IMAGES), boxes))
    assert [item.key for item in (a, b, c)] == [f"instances/{i:08d}" for i in range(3)]
    assert a.images == (IMAGES["a.png"],)
    assert [(m.role, m.text) for m in a.messages] == [("user", QUESTION), ("assistant", "<boxes>")]
    assert a.messages[1].boxes == (place((40, 60, 200, 300, "cat")),)
    assert b.messages[1].boxes == (place((0, 0, 400, 300, "dog"), (10.5, 20.25, 40.5, 60.25, "cat")),)
    assert c.messages[1].boxes == (place(),)  # an image without objects


def test_roboflows_files_lie_beside_their_images_and_name_a_class_of_classes(tmp_path):
    for split, name in (("train", "a.png"), ("valid", "b.png")):
        write_images(tmp_path / split, (name,))
        value = coco((name,), [(0, 1, (40, 60, 160, 240))])
        value["categories"] = [
            {"id": 0, "name": "pets", "supercategory": "none"},
            {"id": 1, "name": "cat", "supercategory": "pets"},
            {"id": 2, "name": "dog", "supercategory": "pets"},
        ]
        write_file(tmp_path / split / "_annotations.coco.json", json.dumps(value).encode())
    options = DetectionOptions(layout="coco")
    parts = parts_of(BUILDER, tmp_path, (), options, ("valid/*",))
    assert [(part.subset, part.split) for part in parts] == [("train", "train"), ("valid", "heldout")]
    samples = [item for part in parts for item in BUILDER.iter_part(part, options, None)]
    assert [sample.messages[0].text for sample in samples] == [QUESTION] * 2
    with pytest.raises(InputError, match="named like held-out data"):
        parts_of(BUILDER, tmp_path, (), options, None)


def test_images_in_another_directory_and_files_of_other_kinds(tmp_path):
    write_images(tmp_path / "train2017")
    write_file(tmp_path / "annotations/instances_train2017.json", json.dumps(coco()).encode())
    write_file(tmp_path / "annotations/captions_train2017.json", b'{"images": [], "annotations": []}')
    options = {"layout": "coco", "image_root": "train2017"}
    (sample,) = read_source("detection", tmp_path, annotations=["annotations/instances_*"], **options)
    assert sample.key == "annotations/00000000"
    with pytest.raises(InputError, match=r"captions_train2017\.json: 'categories' is no array"):
        read_source("detection", tmp_path, **options)
    with pytest.raises(InputError, match=r"options\.annotations: no file of .* is named 'instances'"):
        read_source("detection", tmp_path, annotations=["instances"], **options)


def test_what_coco_leaves_out_of_its_rows_is_counted(tmp_path):
    value = coco(("a.png", "b.png"), [(0, 3, (40, 60, 160, 240))] * 3)
    value["annotations"][0]["iscrowd"] = 1
    del value["annotations"][1]["bbox"]
    value["annotations"].append({"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]})
    assert answers(read_coco(tmp_path, value)) == [[place((40, 60, 200, 300, "cat"))], [place()]]
    options = DetectionOptions(layout="coco")
    (part,) = BUILDER.list_parts(tmp_path, (), options)
    assert not_read(part, options) == {
        "annotations of crowds (iscrowd)": 1,
        "annotations without a box": 1,
        "annotations of no image": 1,
    }


BAD_COCO = {
    "outside": ({"boxes": [(0, 3, (300, 0, 101, 10))]}, "bad_box", "[300, 0, 401, 10] in pixels"),
    "no area": ({"boxes": [(0, 3, (10, 10, 0, 10))]}, "bad_box", "it has no area"),
    "three numbers": ({"boxes": [(0, 3, (10, 10, 5))]}, "bad_box", "no x, y, width and height"),
    "texts": ({"boxes": [(0, 3, ("1", "2", "3", "4"))]}, "bad_box", "no x, y, width and height"),
    "another size": ({"size": (800, 600)}, "bad_box", "an image of 800 x 600 px, which is 400 x 300"),
    "a turned size": ({"size": (300, 400)}, "bad_box", "an image of 300 x 400 px, which is 400 x 300"),
    "an unknown class": ({"boxes": [(0, 9, (1, 2, 3, 4))]}, "schema_error", "category_id 9"),
    "no image": ({"images": ("d.png",)}, "image_not_found", "'d.png'"),
    "a name that is no text": ({"images": (None,)}, "schema_error", "file_name of images[0]"),
    "a side that is no number": ({"size": ("400", 300)}, "schema_error", "no whole numbers"),
}


@pytest.mark.parametrize("name", BAD_COCO)
def test_a_bad_row_of_coco_is_named(tmp_path, name):
    fields, reason, words = BAD_COCO[name]
    (item,) = read_coco(tmp_path, coco(**fields))
    assert item.reason == reason and words in item.detail and item.detail.startswith("row 0")


def test_files_that_are_not_of_the_layout_are_refused(tmp_path):
    for value, words in (
        ([], "is not one object with images"),
        ({"images": 1, "annotations": [], "categories": []}, "'images' is no array of objects"),
        (coco(images=("a.png", "b.png")) | {"images": [{"id": 1}, {"id": 1}]}, "two images have the id 1"),
    ):
        with pytest.raises(InputError, match=words):
            read_coco(tmp_path, value)
    write_file(tmp_path / "instances.json", b'{"images"')
    with pytest.raises(InputError, match=r"instances\.json is no JSON"):
        read_source("detection", tmp_path, layout="coco")
    for options, words in (
        ({"layout": "coco", "classes": "classes.txt"}, "classes does not belong to layout coco"),
        ({"layout": "yolo", "image_root": "images"}, "image_root does not belong to layout yolo"),
    ):
        with pytest.raises(ValueError, match=words):
            DetectionOptions(**options)


# Stored, the image is 400 x 300 px, and the box x 40 to 200, y 60 to 90. Orientation -> the same box as shown, where 5
# to 8 turn by a quarter (x' = y, or 300 - y; y' = x, or 400 - x).
SHOWN = {
    1: (40, 60, 200, 90), 2: (200, 60, 360, 90), 3: (200, 210, 360, 240), 4: (40, 210, 200, 240),
    5: (60, 40, 90, 200), 6: (210, 40, 240, 200), 7: (210, 200, 240, 360), 8: (60, 200, 90, 360),
}  # fmt: skip


@pytest.mark.parametrize("orientation", SHOWN)
def test_the_size_that_coco_names_tells_whether_boxes_are_of_the_turned_image(tmp_path, orientation):
    data = jpeg_with_exif(picture(1, *SIZE), orientation_exif(orientation))
    write_file(tmp_path / "e.jpg", data)
    stored, (x1, y1, x2, y2) = SIZE, SHOWN[orientation]
    shown = stored if orientation < 5 else stored[::-1]
    as_stored = coco(("e.jpg",), [(0, 3, (40, 60, 160, 30))], size=stored)
    as_shown = coco(("e.jpg",), [(0, 3, (x1, y1, x2 - x1, y2 - y1))], size=shown)
    right = [[place((x1, y1, x2, y2, "cat"), size=shown)]]
    assert answers(read_coco(tmp_path, as_stored, boxes_of="stored")) == right
    assert answers(read_coco(tmp_path, as_shown, boxes_of="shown")) == right
    if orientation in (1, 5, 6, 7, 8):
        assert answers(read_coco(tmp_path, as_stored)) == answers(read_coco(tmp_path, as_shown)) == right
    else:
        (item,) = read_coco(tmp_path, as_shown)
        assert item.reason == "bad_box" and "set options.boxes_of: shown or stored" in item.detail
    if orientation >= 5:
        (item,) = read_coco(tmp_path, as_stored, boxes_of="shown")
        assert item.reason == "bad_box" and "which is 300 x 400, and 400 x 300 before EXIF" in item.detail


def test_a_turn_for_each_class(tmp_path):
    boxes = [(0, 1, (40, 60, 160, 240)), (0, 3, (0, 0, 10, 10)), (0, 1, (1, 1, 2, 2)), (1, 3, (0, 0, 10, 10))]
    value = coco(tuple(IMAGES), boxes)
    a, b, c = read_coco(tmp_path, value, question="Find every {label}.")
    assert [m.text for m in a.messages] == ["<image>Find every cat.", "<boxes>", "Find every dog.", "<boxes>"]
    assert answers([a]) == [[place((0, 0, 10, 10, "cat")), place((40, 60, 200, 300, "dog"), (1, 1, 3, 3, "dog"))]]
    assert answers([b]) == [[place((0, 0, 10, 10, "cat")), place()]]  # and one class that is absent
    assert answers([c]) == [[place()]]
    b, c = read_coco(tmp_path, value, question="{label}, in <image>?", absent=0)[1:]
    assert [m.text for m in b.messages] == ["cat, in <image>?", "<boxes>"]
    assert answers([c]) == [[place()]]  # an image without objects stays a sample
    a = read_coco(tmp_path, value, question="In <image>: {label}, of {labels}?", absent=2)[0]
    assert [m.text for m in a.messages[::2]] == ["In <image>: cat, of cat, dog?", "In : dog, of cat, dog?"]
    assert read_coco(tmp_path, value, question="Find all.")[0].messages[0].text == "<image>Find all."


def test_parts_of_a_file_give_side_by_side_what_one_part_gives(tmp_path, monkeypatch):
    value = coco(tuple(IMAGES), [(i, 3, (i, 0, 10, 10)) for i in range(3)])
    whole = read_coco(tmp_path, value)
    monkeypatch.setattr(detection, "_PART_ROWS", 2)
    options = DetectionOptions(layout="coco")
    parts = BUILDER.list_parts(tmp_path, (), options)
    assert [part.num_rows for part in parts] == [2, 1]
    assert [item for part in parts for item in BUILDER.iter_part(part, options, None)] == whole
    assert read_source("detection", tmp_path, rows={2}, layout="coco") == whole[2:]


def test_a_file_is_parsed_once_and_again_after_a_change(tmp_path, monkeypatch):
    read_coco(tmp_path, coco())
    monkeypatch.setattr(annotations.json, "loads", lambda *_, **__: pytest.fail("parsed again"))
    assert len(read_source("detection", tmp_path, layout="coco")) == 1
    monkeypatch.undo()
    assert len(read_coco(tmp_path, coco(("a.png", "b.png")))) == 2


# ------------------------------------------------------------------ YOLO

# Of 400 x 300 px: the middle at 0.3, 0.6 is 120, 180 px; 0.4 by 0.8 are 160 x 240 px: 40, 60, 200, 300.
LINE = "0 0.3 0.6 0.4 0.8\n"
YOLO_LAYOUTS = {
    "beside": ("a.png", "a.txt"),
    "labels": ("images/a.png", "labels/a.txt"),
    "splits in images": ("images/train/a.png", "labels/train/a.txt"),
    "splits first": ("train/images/a.png", "train/labels/a.txt"),
    "images twice": ("images/x/images/a.png", "images/x/labels/a.txt"),
}


@pytest.mark.parametrize("name", YOLO_LAYOUTS)
def test_yolos_text_files(tmp_path, name):
    image, text = YOLO_LAYOUTS[name]
    write_images(tmp_path, (image,))
    write_file(tmp_path / text, (LINE + "\n1 0.5 0.5 1.0000001 1\n").encode())
    write_file(tmp_path / "data.yaml", b"train: ../train/images\nnc: 2\nnames:\n  0: cat\n  1: dog\n")
    (sample,) = read_source("detection", tmp_path, layout="yolo")
    assert sample.key == "data/00000000" and sample.messages[0].text == QUESTION
    boxes = sample.messages[1].boxes[0].boxes
    assert [box.corners for box in boxes] == [pytest.approx((40, 60, 200, 300)), pytest.approx((0, 0, 400, 300))]
    assert [box.label for box in boxes] == ["cat", "dog"] and boxes[1].corners == (0, 0, 400, 300)


def test_yolos_splits_are_folders(tmp_path):
    for folder in ("images/train", "images/val2017"):
        write_images(tmp_path / folder, ("a.png", "b.png"))
        write_file(tmp_path / folder.replace("images", "labels") / "a.txt", LINE.encode())
    write_file(tmp_path / "classes.txt", b"cat\ndog\n\n")
    with pytest.raises(InputError, match="folder 'val2017' is named like held-out data"):
        read_source("detection", tmp_path, layout="yolo")
    options = DetectionOptions(layout="yolo", heldout_splits=("val2017",))
    parts = BUILDER.list_parts(tmp_path, (), options)
    assert [(part.split, part.first_row, part.files) for part in parts] == [
        ("train", 0, ("images/train/a.png", "images/train/b.png")),
        ("heldout", 2, ("images/val2017/a.png", "images/val2017/b.png")),
    ]
    samples = [item for part in parts for item in BUILDER.iter_part(part, options, None)]
    assert [len(each[0].boxes) for each in answers(samples)] == [1, 0, 1, 0]  # b.png has no objects


BAD_YOLO = {
    "an unknown class": ("2 0.5 0.5 0.1 0.1", "schema_error", "line 0 has the class 2, and there are 2 names"),
    "a class without an end": ("inf 0.5 0.5 0.1 0.1", "schema_error", "line 0 has the class inf"),
    "a polygon": ("0 0.1 0.1 0.2 0.1 0.2 0.2 0.1 0.2", "bad_box", "has 9 numbers: a polygon or a turned box"),
    "a prediction": ("0 0.5 0.5 0.1 0.1 0.99", "bad_box", "has 6 numbers"),
    "no number": (LINE + "cat 0.5 0.5 0.1 0.1", "bad_box", "line 1 is 'cat 0.5 0.5 0.1 0.1', no numbers"),
    "outside": ("0 0.9 0.5 0.4 0.1", "bad_box", "it lies outside"),
    "pixels": ("0 120 180 160 240", "bad_box", "[40, 60, 200, 300] in relative_1"),
    "no area": ("0 0.5 0.5 0 0.1", "bad_box", "it has no area"),
    "not a number": ("0 nan 0.5 0.1 0.1", "bad_box", "it has no area"),
}


@pytest.mark.parametrize("name", BAD_YOLO)
def test_a_bad_row_of_yolo_is_named_and_its_neighbours_stay(tmp_path, name):
    text, reason, words = BAD_YOLO[name]
    write_images(tmp_path)
    for image, content in (("a", LINE), ("b", text), ("c", LINE)):
        write_file(tmp_path / f"{image}.txt", content.encode())
    write_file(tmp_path / "names.txt", b"cat\ndog")
    items = read_source("detection", tmp_path, layout="yolo", classes="names.txt")
    assert reasons(items) == [None, reason, None]
    assert words in items[1].detail and items[1].detail.startswith("b.png: ")


def test_yolo_without_names_or_text_files_is_refused(tmp_path):
    write_images(tmp_path / "images")
    with pytest.raises(InputError, match=r"has no data\.yaml or classes\.txt; write classes\.txt"):
        read_source("detection", tmp_path, layout="yolo")
    write_file(tmp_path / "data.yaml", b"nc: 2")
    with pytest.raises(InputError, match=r"data\.yaml has no class names; write `names: \[cat, dog\]`"):
        read_source("detection", tmp_path, layout="yolo")
    write_file(tmp_path / "classes.txt", b"cat")
    with pytest.raises(InputError, match=r"no image with a text file of boxes, such as labels/a\.txt for images/a\.p"):
        read_source("detection", tmp_path, layout="yolo", classes="classes.txt")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_yolos_boxes_are_of_the_image_as_shown(tmp_path, orientation):
    write_file(tmp_path / "a.jpg", jpeg_with_exif(picture(1, *SIZE), orientation_exif(orientation)))
    write_file(tmp_path / "a.txt", b"0 0.3 0.6 0.4 0.8")
    write_file(tmp_path / "classes.txt", b"cat")
    (sample,) = read_source("detection", tmp_path, layout="yolo")
    (found,) = sample.messages[1].boxes
    wide = found.size == (400, 300)
    assert wide == (orientation < 5)
    assert found.boxes[0].corners == pytest.approx((40, 60, 200, 300) if wide else (30, 80, 150, 400))


# ------------------------------------------------------------------ Label Studio


def rectangle(label="cat", original=SIZE, **value):
    """Return a result of 40, 60 to 200, 300 px."""
    box = {"x": 10, "y": 20, "width": 40, "height": 80, "rotation": 0, "rectanglelabels": [label]}
    about = {"type": "rectanglelabels", "from_name": "label", "to_name": "image"}
    return about | {"original_width": original[0], "original_height": original[1], "value": box | value}


def task(*results, image="/data/local-files/?d=images/a.png", **fields):
    return {"id": 1, "data": {"image": image}, "annotations": [{"result": list(results), **fields}]}


def read_tasks(source, tasks, **options):
    write_images(source / "images")
    write_file(source / "project.json", json.dumps(tasks).encode())
    return read_source("detection", source, layout="label_studio", **options)


def test_label_studios_rectangles(tmp_path):
    both = rectangle("dog", x=0, y=0, width=100.00000001, height=100)
    a, b = read_tasks(tmp_path, [task(rectangle(), both), task(image="images/b.png")])
    assert a.key == "project/00000000" and a.messages[0].text == QUESTION
    assert a.messages[1].boxes == (place((40, 60, 200, 300, "cat"), (0, 0, 400, 300, "dog")),)
    assert b.messages[1].boxes == (place(),)


def test_label_studios_uploads_and_json_min(tmp_path):
    uploaded = task(rectangle(), image="/data/upload/3/a.png")
    assert reasons(read_tasks(tmp_path, [uploaded], image_root="images")) == [None]
    assert reasons(read_tasks(tmp_path, [uploaded])) == ["image_not_found"]
    small = rectangle()
    row = {"image": "images/a.png", "id": 1, "annotation_id": 5, "annotator": 1}
    row["label"] = [{**small["value"], "original_width": 400, "original_height": 300}]
    assert answers(read_tasks(tmp_path, [row])) == [[place((40, 60, 200, 300, "cat"))]]


def test_what_label_studio_leaves_out_of_its_rows_is_counted(tmp_path):
    first = task(rectangle(), {"type": "choices", "value": {"choices": ["good"]}})
    first["annotations"].append({"result": []})
    assert answers(read_tasks(tmp_path, [first])) == [[place((40, 60, 200, 300, "cat"))]]
    options = DetectionOptions(layout="label_studio")
    (part,) = BUILDER.list_parts(tmp_path, (), options)
    assert not_read(part, options) == {"further annotations of a task": 1, "results of the kind choices": 1}


BAD_TASKS = {
    "rotated": (task(rectangle(rotation=12.5)), "bad_box", "turned by 12.5 degrees"),
    "a turned image": (task(rectangle() | {"image_rotation": 90}), "bad_box", "turned by 90 degrees"),
    "another size": (task(rectangle(original=(200, 150))), "bad_box", "an image of 200 x 150 px, which is 400 x 300"),
    "two sizes": (task(rectangle(), rectangle(original=(200, 150))), "bad_box", "in one task"),
    "outside": (task(rectangle(x=70)), "bad_box", "it lies outside"),
    "no number": (task(rectangle(x=None)), "bad_box", "no numbers"),
    "not annotated": (task() | {"annotations": []}, "no_text", "the task has no annotation"),
    "cancelled": (task(rectangle(), was_cancelled=True), "no_text", "the task has no annotation"),
    "no image": ({"data": {"text": "a"}, "annotations": [{"result": []}]}, "image_not_found", "no image among"),
    "no task": (7, "no_text", "the task has no annotation"),
}


@pytest.mark.parametrize("name", BAD_TASKS)
def test_a_bad_task_is_named_and_its_neighbours_stay(tmp_path, name):
    bad, reason, words = BAD_TASKS[name]
    good = task(rectangle())
    items = read_tasks(tmp_path, [good, bad, good])
    assert reasons(items) == [None, reason, None] and words in items[1].detail


@pytest.mark.parametrize("orientation", range(1, 9))
def test_label_studio_shows_the_turned_image_unless_its_size_says_otherwise(tmp_path, orientation):
    write_file(tmp_path / "images/e.jpg", jpeg_with_exif(Image.new("RGB", SIZE), orientation_exif(orientation)))
    shown = SIZE if orientation < 5 else SIZE[::-1]
    tasks = [task(rectangle(original=size), image="images/e.jpg") for size in (shown, SIZE)]
    upright, stored = answers(read_tasks(tmp_path, tasks))
    wide = (40, 60, 200, 300, "cat") if orientation < 5 else (30, 80, 150, 400, "cat")
    assert upright == [place(wide, size=shown)]
    if orientation < 5:
        assert stored == upright
    else:
        # The box of 40, 60, 200, 300 px in 400 x 300, turned by a quarter.
        turned = {5: (60, 40, 300, 200), 6: (0, 40, 240, 200), 7: (0, 200, 240, 360), 8: (60, 200, 300, 360)}
        assert stored == [place((*turned[orientation], "cat"), size=shown)]
