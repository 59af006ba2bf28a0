"""Layouts of boxes from `athanor init` to samples: each recipe gives the boxes that were drawn, in pixels."""

import json
import random
from dataclasses import dataclass

import pytest
from PIL import Image, ImageDraw

from dataset_builders.contracts.sample import Message, Sample, from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.pictures.images import ImageLimits
from dataset_builders.recognise.boxes import convention_of
from dataset_builders.recognise.recognise import recognise
from flows.cli.main import main
from flows.pipeline.recipe import load_recipe
from stages.convert.stage import STAGE as CONVERT
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.run_stage import run_stage
from tests.helpers.drawn_pictures import encoded
from tests.helpers.raw_rows import jpeg_with_exif, orientation_exif

pytestmark = pytest.mark.promise(
    "`athanor init` recognises layouts of boxes, says which convention their numbers have and why, and draws them; its "
    "recipe gives the boxes that were drawn."
)
ROWS = 24
COLOURS = {"red": (215, 38, 30), "green": (30, 160, 60), "blue": (40, 70, 210)}
LIMITS = ImageLimits(max_pixels=10**7, min_side=4)


@dataclass(frozen=True)
class Drawn:
    name: str
    image: Image.Image
    boxes: tuple  # (x1, y1, x2, y2, colour), in pixels

    @property
    def size(self):
        return self.image.size


def draw(seed):
    """Return images of one or two coloured rectangles; the fourth has none."""
    rng = random.Random(seed)
    drawn = []
    for i in range(ROWS):
        width, height = rng.choice(((640, 480), (480, 640), (300, 200)))
        image, boxes = Image.new("RGB", (width, height), (rng.randint(90, 160),) * 3), []
        for side in range(0 if i == 3 else rng.randint(1, 2)):
            x1, y1 = rng.randint(0, width // 4) + side * width // 2, rng.randint(0, height // 3)
            x2, y2 = x1 + rng.randint(20, width // 4), rng.randint(height // 2, height)
            boxes.append((x1, y1, x2, y2, rng.choice(list(COLOURS))))
            ImageDraw.Draw(image).rectangle((x1, y1, x2 - 1, y2 - 1), fill=COLOURS[boxes[-1][4]])
        drawn.append(Drawn(f"{i:03}", image, tuple(boxes)))
    return drawn


DRAWN = draw(3)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else json.dumps(text))


def write_images(folder, drawn):
    folder.mkdir(parents=True, exist_ok=True)
    for each in drawn:
        (folder / f"{each.name}.png").write_bytes(encoded(each.image))


def lines(path, rows):
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def rows_of(answer, key="messages"):
    """Return a function that writes rows whose answers have the boxes of an image as `answer` writes them."""

    def write_rows(d, drawn):
        write_images(d / "images", drawn)
        rows = []
        for each in drawn:
            said = ["<image>Find all rectangles.", answer(each)]
            if key == "messages":
                turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said)]
                rows.append({"messages": turns, "images": [f"images/{each.name}.png"]})
            else:
                rows.append({"image": f"images/{each.name}.png", "prefix": "detect red", "suffix": said[1]})
        lines(d / "rows.jsonl", rows)

    return write_rows


def relative(each, side=1000, digits=None):
    width, height = each.size
    return [
        [round(x * side / size, digits) for x, size in zip(box, (width, height) * 2)] + [box[4]] for box in each.boxes
    ]


def as_json(boxes):
    return json.dumps([{"bbox_2d": box[:4], "label": box[4]} for box in boxes])


def marks(each):
    ref, end = "<|object_ref_start|>", "<|object_ref_end|>"
    found = relative(each)
    text = "".join(f"{ref}{c}{end}<|box_start|>({a},{b}),({x},{y})<|box_end|>" for a, b, x, y, c in found)
    return text or "There is none."


def paligemma(each):
    found = relative(each, 1024)
    cells = [[f"<loc{min(1023, n):04d}>" for n in (y1, x1, y2, x2)] + [f" {c}"] for x1, y1, x2, y2, c in found]
    return " ; ".join("".join(each) for each in cells) or "none"


def florence(each):
    return (
        "".join(f"{c}{''.join(f'<loc_{min(999, int(n))}>' for n in box)}" for *box, c in relative(each, 1000)) or "none"
    )


def swift(d, drawn):
    write_images(d / "images", drawn)
    rows = []
    for each in drawn:
        marked = ", ".join("<ref-object> <bbox>" for _ in each.boxes) or "none"
        turns = [{"role": "user", "content": "<image>Find all."}, {"role": "assistant", "content": marked}]
        objects = {"ref": [box[4] for box in each.boxes], "bbox": [box[:4] for box in each.boxes]}
        rows.append({"messages": turns, "images": [f"images/{each.name}.png"], "objects": objects})
    lines(d / "rows.jsonl", rows)


def instances(drawn, folder=""):
    names = list(COLOURS)
    return {
        "images": [
            {"id": i, "file_name": f"{folder}{each.name}.png", "width": each.size[0], "height": each.size[1]}
            for i, each in enumerate(drawn)
        ],
        "annotations": [
            {"id": 9, "image_id": i, "category_id": names.index(c), "bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": 0}
            for i, each in enumerate(drawn)
            for x1, y1, x2, y2, c in each.boxes
        ],
        "categories": [{"id": i, "name": name} for i, name in enumerate(names)],
    }


def coco(d, drawn):
    """Write the files of COCO's own archives: annotations of several kinds, images in folders of their splits."""
    for split, some in (("train2017", drawn[:16]), ("val2017", drawn[16:])):
        write_images(d / split, some)
        write(d / f"annotations/instances_{split}.json", instances(some))
        persons = instances(some)
        for each in persons["annotations"]:
            each["keypoints"] = [1, 2, 2]
        write(d / f"annotations/person_keypoints_{split}.json", persons)
        captions = [{"image_id": 1, "caption": "A rectangle."}]
        write(d / f"annotations/captions_{split}.json", instances(some) | {"annotations": captions})


def roboflow_coco(d, drawn):
    for split, some in (("train", drawn[:16]), ("valid", drawn[16:])):
        write_images(d / split, some)
        write(d / split / "_annotations.coco.json", instances(some))


def one_coco(d, drawn):
    write_images(d / "images", drawn)
    write(d / "result.json", instances(drawn, "images/"))


def yolo_line(box, size):
    x1, y1, x2, y2 = (x / side for x, side in zip(box, size * 2))
    return f"{list(COLOURS).index(box[4])} {(x1 + x2) / 2:.6f} {(y1 + y2) / 2:.6f} {x2 - x1:.6f} {y2 - y1:.6f}\n"


def yolo(images, labels, names=("data.yaml", "names: [red, green, blue]\n")):
    def write_yolo(d, drawn):
        splits = (("train", drawn[:16]), ("valid", drawn[16:])) if "{}" in images else (("", drawn),)
        for split, some in splits:
            write_images(d / images.format(split), some)
            for each in some:
                if each.boxes:
                    text = "".join(yolo_line(box, each.size) for box in each.boxes)
                    write(d / labels.format(split) / f"{each.name}.txt", text)
        write(d / names[0], names[1])
        write(d / "README.dataset.txt", "https://universe.roboflow.com/\n")

    return write_yolo


def rectangles(each):
    results = []
    for x1, y1, x2, y2, c in relative(each, 100, 9):
        value = {"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1, "rotation": 0, "rectanglelabels": [c]}
        about = {"original_width": each.size[0], "original_height": each.size[1], "image_rotation": 0}
        results.append({"type": "rectanglelabels", "from_name": "label", "to_name": "image", "value": value, **about})
    return results


def label_studio(d, drawn):
    write_images(d / "images", drawn)
    tasks = [
        {
            "id": i,
            "data": {"image": f"/data/local-files/?d=images/{each.name}.png"},
            "annotations": [{"id": i, "result": rectangles(each)}],
        }
        for i, each in enumerate(drawn)
    ]
    write(d / "project-1.json", tasks)


def json_min(d, drawn):
    write_images(d / "media/upload/3", drawn)
    rows = [
        {
            "image": f"/data/upload/3/{each.name}.png",
            "id": i,
            "label": [{**result["value"], **result} for result in rectangles(each)],
            "annotator": 1,
            "annotation_id": i,
        }
        for i, each in enumerate(drawn)
    ]
    write(d / "project-1.json", rows)


# Name -> (function that writes the layout, the builder, options and words that init prints, pixels that numbers may be
# rounded by).
LAYOUTS = {
    "ms-swift's objects": (swift, "openai_messages", "", 1e-6),
    "JSON, 0 to 1000": (rows_of(lambda e: as_json(relative(e))), "openai_messages",
        "boxes are relative_1000: the largest numbers are x 955 and y 1000, the largest of their images is 640 x 480 "
        "px, and 35 of 38 boxes would lie outside", 0.4),
    "JSON in pixels": (rows_of(lambda e: as_json(e.boxes)), "openai_messages", "boxes are pixels: the largest", 1e-6),
    "JSON, 0 to 1": (rows_of(lambda e: as_json(relative(e, 1, 4))), "openai_messages", "boxes are relative_1: ", 0.1),
    "Qwen2-VL's marks": (rows_of(marks), "openai_messages", "boxes are relative_1000: the largest", 0.4),
    "PaliGemma's tokens": (rows_of(paligemma, "table"), "table", "", 1),
    "Florence's tokens": (rows_of(florence, "table"), "table", "", 1),
    "COCO": (coco, "detection", "8 of these rows are held out", 1e-6),
    "COCO by Roboflow": (roboflow_coco, "detection", "COCO's bbox: x, y, width, height in pixels", 1e-6),
    "COCO in one file": (one_coco, "detection", "24 images with boxes of 3 classes", 1e-6),
    "YOLO by Roboflow": (yolo("{}/images", "{}/labels"), "detection", "8 of these rows are held out", 1e-3),
    "YOLO by Ultralytics": (yolo("images/{}", "labels/{}"), "detection", "23 of 24 images have a text file", 1e-3),
    "YOLO beside": (yolo("", "", ("obj.names", "red\ngreen\nblue\n")), "detection", "classes='obj.names'", 1e-3),
    "Label Studio": (label_studio, "detection", "24 tasks with boxes of 3 classes", 1e-3),
    "Label Studio's JSON-MIN": (json_min, "detection", "Label Studio's rectangles, in percent", 1e-3),
}  # fmt: skip


def init(tmp_path, capsys, data):
    status = main(["init", str(data), "--out", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root")])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_from_init_to_the_boxes_that_were_drawn(tmp_path, capsys, layout):
    write_layout, builder, words, tolerance = LAYOUTS[layout]
    write_layout(tmp_path / "data", DRAWN)
    status, out, err = init(tmp_path, capsys, tmp_path / "data")
    assert status == 0, err
    assert f"builder {builder}" in out and words in out, out
    assert f"{ROWS} of the {ROWS} rows that were read can be used" in out, out
    assert "and boxes drawn on them" in out
    page = (tmp_path / "root/init/data/report.html").read_text()
    assert page.count('class="boxed"') == 3
    config = load_recipe(str(tmp_path / "my.yaml")).config.convert
    raw = {"raw": External(tmp_path / "data", "raw", "0" * 16)}
    made = run_stage(CONVERT, config, raw, tmp_path / "made").artifact
    assert made.manifest.skips == {}
    samples = [
        from_fields(key, fields)
        for shard in made.manifest.shards
        for key, fields in iter_records(made.dir / shard.name, shard)
    ]
    expected = {encoded(each.image): each for each in DRAWN}
    assert sorted(sample.images[0] for sample in samples) == sorted(expected)
    for sample in samples:
        each = expected[sample.images[0]]
        places = [place for message in sample.messages for place in message.boxes]
        found = [box for place in places for box in place.boxes]
        assert all(place.size == each.size for place in places)
        assert [box.label for box in found] == [box[4] for box in each.boxes]
        for box, right in zip(found, each.boxes):
            assert box.corners == pytest.approx(right[:4], abs=tolerance)


def test_what_coco_has_beside_its_instances_is_told(tmp_path, capsys):
    coco(tmp_path / "data", DRAWN)
    out = init(tmp_path, capsys, tmp_path / "data")[1]
    names = "annotations/person_keypoints_train2017.json, annotations/person_keypoints_val2017.json"
    assert f"look at: {names}: boxes beside those of instances, which are not read" in out
    assert "captions_train2017.json: COCO's captions" in out


def texts(boxes, size=(640, 480)):
    """Return samples with these boxes as JSON."""
    answer = json.dumps([{"bbox_2d": box} for box in boxes])
    messages = (Message(role="user", text="<image>?"), Message(role="assistant", text=answer))
    return [Sample(key="a/00000000", messages=messages, images=(encoded(Image.new("L", size)),))]


@pytest.mark.parametrize(
    ("boxes", "size", "convention"),
    [
        ([[0.1, 0.2, 0.5, 1]], (640, 480), "relative_1"),
        ([[10, 20, 630, 470]], (640, 480), "pixels"),
        ([[10, 20, 630, 481]] * 20 + [[10, 20, 300, 400]], (640, 480), "relative_1000"),
        ([[10, 20, 700, 400]], (640, 480), "relative_1000"),
        ([[10, 20, 980, 990]], (4000, 3000), "relative_1000"),
        ([[10, 20, 1800, 990]], (4000, 3000), "pixels"),
        ([[10, 20, 1800, 990]], (640, 480), None),
        # One mistake in many boxes, whose largest numbers stay far below 1000, does not make them relative.
        ([[10, 20, 630, 470]] * 40 + [[10, 20, 660, 470]], (640, 480), "pixels"),
    ],
)
def test_the_convention_is_told_by_the_largest_numbers(boxes, size, convention):
    found, why = convention_of(texts(boxes, size))
    assert found == convention and why.startswith("the largest numbers are x ")
    assert ("look at the drawing" in why) == (len(boxes) < 10 and convention is not None)


def test_pixels_of_a_resized_image_are_refused_with_the_numbers(tmp_path, capsys):
    write_images(tmp_path / "data/images", DRAWN)
    rows = [
        {"image": f"images/{each.name}.png", "question": "Find it.", "answer": '{"bbox_2d": [900, 10, 1900, 1200]}'}
        for each in DRAWN
    ]
    lines(tmp_path / "data/rows.jsonl", rows)
    status, _, err = init(tmp_path, capsys, tmp_path / "data")
    assert status == 2 and "24 of 24 rows are undeclared_boxes" in err
    assert "no value fits: the largest numbers are x 1900 and y 1200" in err and "resized image cannot be read" in err


def test_answers_of_four_numbers_are_told(tmp_path, capsys):
    write_images(tmp_path / "data/images", DRAWN)
    rows = [{"image": f"images/{each.name}.png", "question": "Where?", "answer": "[10, 20, 30, 40]"} for each in DRAWN]
    lines(tmp_path / "data/rows.jsonl", rows)
    status, out, _ = init(tmp_path, capsys, tmp_path / "data")
    assert status == 0
    assert f"{len(DRAWN)} of {len(DRAWN)} answers are four numbers and stay text; if they are boxes, set" in out


def test_what_is_not_read_and_what_exif_turns_is_told(tmp_path, capsys):
    value = instances(DRAWN)
    value["annotations"][0]["iscrowd"] = 1
    del value["annotations"][1]["bbox"]
    for each, about in zip(DRAWN, value["images"]):
        exif = orientation_exif(6 if each.name == "005" else 1)
        write(tmp_path / "data/x", "")
        (tmp_path / "data" / f"{each.name}.jpg").write_bytes(jpeg_with_exif(each.image, exif))
        about["file_name"] = f"{each.name}.jpg"
    write(tmp_path / "data/instances.json", value)
    status, out, err = init(tmp_path, capsys, tmp_path / "data")
    assert status == 0, err
    told = "not read within the rows: 1 annotations of crowds (iscrowd), 1 annotations without a box"
    assert f"look at: {told}" in out
    assert "look at: EXIF turns images of 1 samples with boxes" in out


def test_yolo_without_names_and_the_xml_of_voc_are_refused_with_the_way_out(tmp_path, capsys):
    yolo("images", "labels", ("notes.md", ""))(tmp_path / "data", DRAWN)
    status, _, err = init(tmp_path, capsys, tmp_path / "data")
    assert status == 2 and "has no data.yaml or classes.txt; write classes.txt" in err
    write_images(tmp_path / "voc", DRAWN)
    write(tmp_path / "voc/000.xml", "<annotation/>")
    status, _, err = init(tmp_path, capsys, tmp_path / "voc")
    assert status == 2 and "write it as COCO, for example with `supervision`" in err


def test_rows_beside_files_of_boxes_are_still_read(tmp_path):
    roboflow_coco(tmp_path, DRAWN[:4])
    write(tmp_path / "qa.jsonl", "".join(json.dumps({"question": f"{i}?", "answer": "a"}) + "\n" for i in range(99)))
    found = recognise(tmp_path, LIMITS)
    assert {trial.reading.builder for trial in found.trials} == {"detection", "table"}
    assert all(trial.usable == 1 for trial in found.trials)
