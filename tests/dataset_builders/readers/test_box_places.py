"""Boxes of rows to pixels of the image as shown: each form of text and ms-swift's objects, with numbers by hand."""

import contextlib
import io
import json
import tarfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dataset_builders.contracts.boxes import Box, BoxPlace
from dataset_builders.contracts.sample import Message, Sample, SkipSample
from dataset_builders.pictures.images import header_size, open_rgb
from dataset_builders.readers.box_places import BoxOptions, with_boxes
from tests.helpers.json_rows import read_source, write_file
from tests.helpers.patience import at_most
from tests.helpers.raw_rows import encode, jpeg_with_exif, orientation_exif, picture

pytestmark = pytest.mark.promise(
    "Boxes of every layout become pixels of the image as shown, by numbers that are checked by hand; a box that cannot "
    "be right leaves its row out with its numbers."
)

WIDE = encode(picture(1, 400, 300))  # 400 x 300 px
BOX = "<|box_start|>(100,200),(500,1000)<|box_end|>"  # in relative_1000: 40, 60, 200, 300 px


def converted(answer, question="<image>Find it.", images=(WIDE,), **options):
    messages = (Message(role="user", text=question), Message(role="assistant", text=answer))
    placed = with_boxes(messages, images, BoxOptions(**options))
    Sample(key="data/00000000", messages=placed, images=tuple(images)).check()
    return placed


def skip(answer, **kwargs):
    with pytest.raises(SkipSample) as error:
        converted(answer, **kwargs)
    return error.value.reason, error.value.detail


def numbers(message):
    """Return the boxes of a message: (corners, label), and whether each place is a list."""
    boxes = [(*map(float, box.corners), box.label) for place in message.boxes for box in place.boxes]
    return boxes, [place.is_list for place in message.boxes]


JSON = '{"bbox_2d": [100, 200, 500, 1000], "label": "cat"}'
CAT, DOG = (40.0, 60.0, 200.0, 300.0, "cat"), (0.0, 0.0, 4.0, 3.0, "dog")
# Name -> (answer, its text with places, the boxes in pixels of 400 x 300, whether the places are lists).
ANSWERS = {
    "a mark": (BOX, "<boxes>", [(*CAT[:4], "")], [True]),
    "marks with labels": (
        f"<|object_ref_start|>cat<|object_ref_end|>{BOX}, "
        "<|object_ref_start|>dog<|object_ref_end|><|box_start|>(0, 0), (10, 10)<|box_end|>.",
        "<boxes>", [CAT, DOG], [True]),
    "two boxes of one label": (
        f"<|object_ref_start|>cat<|object_ref_end|>{BOX}{BOX}", "<boxes>", [CAT, CAT], [True]),
    "marks in a sentence": (
        f"The <|object_ref_start|>cat<|object_ref_end|>{BOX} sees "
        "<|object_ref_start|>a dog<|object_ref_end|> here <|box_start|>(0,0),(10,10)<|box_end|>!",
        "The cat <boxes> sees a dog here <boxes>!", [CAT, (*DOG[:4], "")], [False, False]),
    "an object": (JSON, "<boxes>", [CAT], [True]),
    "a list": (
        f'[\n\t{JSON},\n\t{{"bbox_2d": [0, 0, 10, 10], "label": "dog"}}\n]', "<boxes>", [CAT, DOG], [True]),
    "a list in a fence": (f"```json\n[{JSON}]\n```", "<boxes>", [CAT], [True]),
    "a list in a sentence": (f"Here: [{JSON}]. Good?", "Here: <boxes>. Good?", [CAT], [True]),
    "no label": ('[{"bbox_2d": [100, 200, 500, 1000]}]', "<boxes>", [(*CAT[:4], "")], [True]),
    "objects, one a line": (f"{JSON}\n{JSON}", "<boxes>", [CAT, CAT], [True]),
    "marks of Qwen-VL": (
        "<ref>cat</ref><box>(100,200),(500,1000)</box><box>(0,0),(10,10)</box>", "<boxes>", [CAT, (*DOG[:4], "cat")],
        [True]),
    "marks of InternVL": (
        "<ref>cat</ref><box>[[100, 200, 500, 1000], [0, 0, 10, 10]]</box>", "<boxes>", [CAT, (*DOG[:4], "cat")],
        [True]),
    "marks of InternVL in a sentence": (
        "A <ref>cat</ref><box>[[100, 200, 500, 1000]]</box> sits.", "A cat <boxes> sits.", [CAT], [False]),
    "Gemini's JSON": ('[{"box_2d": [200, 100, 1000, 500], "label": "cat"}]', "<boxes>", [CAT], [True]),
    "Gemini's JSON with further keys": (
        '{"box_2d": [200, 100, 1000, 500], "mask": 1}', '{"box_2d": <boxes>, "mask": 1}', [(*CAT[:4], "")], [False]),
    "four numbers": ("[100, 200, 500, 1000].", "<boxes>", [(*CAT[:4], "")], [True]),
    "four numbers in a sentence": ("It is [100, 200, 500, 1000].", "It is [100, 200, 500, 1000].", [], []),
    "marks of a wiki": ("<ref>A book</ref> <box>none</box>", "A book <box>none</box>", [], []),
    "an empty list": ("```json\n[]\n```", "<boxes>", [], [True]),
    "further keys": (
        '[{"bbox_2d": [100,200, 500, 1e3], "label": "cat", "colour": "red"}]',
        '[{"bbox_2d": <boxes>, "label": "cat", "colour": "red"}]', [CAT], [False]),
    "a list in an object": (
        f'{{"count": 1, "found": [{JSON}]}}',
        '{"count": 1, "found": [{"bbox_2d": <boxes>, "label": "cat"}]}', [CAT], [False]),
    "an object around another": (
        f'{{"parts": [{JSON}], "bbox_2d": [0, 0, 10, 10]}}',
        '{"parts": [{"bbox_2d": <boxes>, "label": "cat"}], "bbox_2d": <boxes>}',
        [CAT, (*DOG[:4], "")], [False, False]),
    "an object that is no JSON": (
        f'{JSON[:-1]}, colour: red}}', '{"bbox_2d": <boxes>, "label": "cat", colour: red}', [(*CAT[:4], "")], [False]),
    "a mixed list": (
        f'[{JSON}, {{"size": [1, 2]}}]', '[{"bbox_2d": <boxes>, "label": "cat"}, {"size": [1, 2]}]', [CAT], [False]),
    "text about the form": ('Write "bbox_2d": [x1, y1, x2, y2].', 'Write "bbox_2d": [x1, y1, x2, y2].', [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_the_boxes_of_an_answer_in_0_to_1000(name):
    answer, text, boxes, lists = ANSWERS[name]
    message = converted(answer, boxes="relative_1000")[1]
    assert message.text == text
    assert numbers(message) == (boxes, lists)
    assert all(place.image == 0 and place.size == (400, 300) for place in message.boxes)


def test_numbers_in_each_convention():
    text = '[{"bbox_2d": [%s]}]'
    for convention, written, pixels in (
        ("pixels", "40, 60.5, 200, 300", (40, 60.5, 200, 300)),
        ("relative_1000", "100, 200, 500, 1000", (40, 60, 200, 300)),
        ("relative_1", "0.1, 0.2, 0.5, 1.0", (40, 60, 200, 300)),
    ):
        (place,) = converted(text % written, boxes=convention)[1].boxes
        assert place.boxes[0].corners == pytest.approx(pixels)


# PaliGemma writes y1 x1 y2 x2 in 1024 bins: 0256/1024 * 300 = 75 px. Florence-2 writes x1 y1 x2 y2, the middle of 1000
# bins: 99.5/1000 * 400 = 39.8 px.
TOKENS = {
    "PaliGemma": (
        "<loc0256><loc0128><loc0512><loc1023> black cat ; <loc0000><loc0000><loc0512><loc0512> dog",
        "<boxes>", [(50.0, 75.0, 1023 / 1024 * 400, 150.0, "black cat"), (0.0, 0.0, 200.0, 150.0, "dog")], [True]),
    "PaliGemma without a label": ("<loc0256><loc0128><loc0512><loc0512>", "<boxes>", [(50.0, 75.0, 200.0, 150.0, "")],
        [True]),
    "PaliGemma in a sentence": ("It is at <loc0256><loc0128><loc0512><loc0512>.", "It is at <boxes>.",
        [(50.0, 75.0, 200.0, 150.0, "")], [False]),
    "Florence": (
        "car<loc_99><loc_199><loc_499><loc_999>door<loc_0><loc_0><loc_9><loc_9><loc_99><loc_99><loc_199><loc_199>",
        "<boxes>",
        [(39.8, 59.85, 199.8, 299.85, "car"), (0.2, 0.15, 3.8, 2.85, "door"), (39.8, 29.85, 79.8, 59.85, "door")],
        [True]),
    "Florence in a sentence": ("A car <loc_99><loc_199><loc_499><loc_999> waits.", "A car <boxes> waits.",
        [(39.8, 59.85, 199.8, 299.85, "")], [False]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_say_their_convention_themselves(name):
    answer, text, boxes, lists = TOKENS[name]
    message = converted(answer)[1]
    found, kinds = numbers(message)
    assert message.text == text and kinds == lists
    assert [box[4] for box in found] == [box[4] for box in boxes]
    assert np.allclose([box[:4] for box in found], [box[:4] for box in boxes])


def test_boxes_of_a_question_are_its_own_text():
    for question, text in (
        (f"<image>What is at {BOX}?", "<image>What is at <boxes>?"),
        (f"<image>{BOX}", "<image><boxes>"),
        ("<image><loc0256><loc0128><loc0512><loc1023> what?", "<image><boxes> what?"),
    ):
        asked, _ = converted("A cat.", question, boxes="relative_1000")
        assert asked.text == text and [place.is_list for place in asked.boxes] == [False]


def test_boxes_are_of_the_only_image_of_their_turn():
    small = encode(picture(2, 100, 100))
    messages = [
        Message(role="user", text="<image>Find it."),
        Message(role="assistant", text=BOX),
        Message(role="user", text="And <image>?"),
        Message(role="assistant", text=BOX),
    ]
    placed = with_boxes(messages, (WIDE, small), BoxOptions(boxes="relative_1000"))
    assert [(place.image, place.size) for message in placed for place in message.boxes] == [
        (0, (400, 300)),
        (1, (100, 100)),
    ]
    assert placed[3].boxes[0].boxes[0].corners == (10, 20, 50, 100)
    reason, detail = skip(BOX, question="<image><image>Find it.", images=(WIDE, small), boxes="relative_1000")
    assert reason == "bad_box" and "does not say which of 2 images it is of" in detail
    assert skip(BOX, question="Find it.", images=(), boxes="relative_1000")[0] == "bad_box"


REFUSED = {
    "no convention": (f"It is {BOX}", {}, "undeclared_boxes", "options.boxes what such numbers are (pixels, relative"),
    "no convention of short marks": ("<box>(1,2),(3,4)</box>", {}, "undeclared_boxes", "options.boxes"),
    "no convention of Gemini's": ('{"box_2d": [1, 2, 3, 4]}', {}, "undeclared_boxes", "options.boxes"),
    "a point in JSON": ('[{"point_2d": [10, 20]}]', {}, "bad_box", "keep it as text (literal)"),
    "a point of Molmo": ('<point x="10.5" y="20.1" alt="cat">cat</point>', {}, "bad_box", "keep it as text (literal)"),
    "points of Molmo": ('<points x1="10" y1="20" x2="1" y2="2">', {}, "bad_box", "keep it as text (literal)"),
    "a short mark of words": ("<box>(1,2),(3)</box>", {"boxes": "pixels"}, "bad_box", "[[x1, y1, x2, y2]] should be"),
    "no convention of JSON": (JSON, {}, "undeclared_boxes", "or keep them as text (literal)"),
    "over 1000": (
        "<|box_start|>(1,2),(3,1001)<|box_end|>", {"boxes": "relative_1000"}, "bad_box",
        "box [1, 2, 3, 1001] in relative_1000, image of 400 x 300 px: such numbers are 0 to 1000"),
    "over 1": (JSON, {"boxes": "relative_1"}, "bad_box", "[100, 200, 500, 1000] in relative_1"),
    "0 to 1 as pixels": (
        '{"bbox_2d": [0.1, 0.2, 0.5, 1]}', {"boxes": "pixels"}, "bad_box", "no number is above 1, as in relative_1"),
    "outside the picture": (JSON, {"boxes": "pixels"}, "bad_box", "[100, 200, 500, 1000] in pixels, image of 400 x"),
    "turned": (
        '{"bbox_2d": [300, 20, 10, 40]}', {"boxes": "pixels"}, "bad_box", "corners are not upper left and lower"),
    "no area": ('{"bbox_2d": [10, 20, 10, 40]}', {"boxes": "pixels"}, "bad_box", "it has no area"),
    "a point": ("<|box_start|>(1,2)<|box_end|>", {"boxes": "pixels"}, "bad_box", "where (x1,y1),(x2,y2) or [[x1,"),
    "three numbers": ('{"bbox_2d": [1, 2, 3]}', {"boxes": "pixels"}, "bad_box", "[1, 2, 3] where bbox_2d"),
    "a number of 400 digits": (f'{{"bbox_2d": [1, 2, 3, {10**400}]}}', {"boxes": "pixels"}, "bad_box", "should have"),
    "one of 5,000 digits": (
        '{"bbox_2d": [1, 2, 3, %s]}' % ("9" * 5000), {"boxes": "pixels"}, "bad_box", "it lies outside"),
    "lists of boxes": ('{"bbox_2d": [[1, 2, 3, 4]], "n": 1}', {"boxes": "pixels"}, "bad_box", "no box that can be"),
    "Python's quotes": ("{'bbox_2d': [1, 2, 3, 4]}", {"boxes": "pixels"}, "bad_box", "no box that can be read"),
    "cut off": (f'[{JSON}, {{"bbox_2d": [1, 2', {"boxes": "relative_1000"}, "bad_box", "no box that can be read"),
    "three tokens": ("<loc0001><loc0002><loc0003> cat", {}, "bad_box", "no box that can be read"),
    "a token over 1023": ("<loc0001><loc0002><loc0003><loc1024>", {}, "bad_box", "such numbers are 0 to 1023"),
    "a mask": ("<loc0001><loc0002><loc0030><loc0040><seg001> cat", {}, "bad_box", "no box that can be read"),
    "the corners of a text": (
        "STOP<loc_10><loc_10><loc_50><loc_11><loc_50><loc_30><loc_10><loc_29>", {}, "bad_box", "corners are not"),
    "a place that is written": ("It is <boxes>.", {"boxes": "pixels"}, "box_count_mismatch", "1 places for boxes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_right_is_refused_with_its_numbers(name):
    answer, options, reason, words = REFUSED[name]
    found, detail = skip(answer, **options)
    assert found == reason and words in detail


HARD = (
    *("<|object_ref_start|>", "<|object_ref_start|>a<|object_ref_end|>", "<|box_start|>", BOX, '{"bbox_2d": '),
    *('"bbox_2d"', JSON, f"{JSON} and ", "<loc0001>", "<loc0001><loc0002><loc0003><loc0004> \n", "bbox_2d "),
    *("a<loc_1><loc_2><loc_3><loc_4>", '"bbox_2d": [', '{"bbox_2d": "', '{"bbox_2d": [1, 2, 3, 4], "a": {', "[{"),
    *(
        "<box>",
        "<ref>",
        "<ref>a</ref>",
        "<box>[[1,2,3,4],",
        "<box>[[1,2,3,4]]</box>",
        "<point x",
        "<points ",
        "[1, 2, ",
    ),
)


@pytest.mark.full
@pytest.mark.parametrize("piece", HARD)
def test_a_megabyte_of_anything_takes_seconds(piece):
    started = time.process_time()
    for text in (piece * (1_000_000 // len(piece)), piece + " " * 1_000_000, piece + " " * 1_000_000 + "x <"):
        with contextlib.suppress(SkipSample):
            converted(text, boxes="relative_1000")
    assert time.process_time() - started < at_most(10)


def test_literal_keeps_the_text():
    for answer in (JSON, BOX, "<loc0001>", "[]"):
        assert converted(answer, boxes="literal")[1] == Message(role="assistant", text=answer)


def test_reasoning_and_several_right_answers_hold_no_boxes():
    asked = Message(role="user", text="<image>Where?")
    for given, words in (
        (Message(role="assistant", text="there", reasoning=BOX), "a box in the reasoning"),
        (Message(role="assistant", text=BOX, references=(BOX, "there")), "boxes in several right answers"),
    ):
        with pytest.raises(SkipSample, match=words):
            with_boxes((asked, given), (WIDE,), BoxOptions(boxes="relative_1000"))
    alone = Message(role="assistant", text=BOX, references=(BOX,))
    assert with_boxes((asked, alone), (WIDE,), BoxOptions(boxes="relative_1000"))[1].references == ()


def test_a_box_may_reach_over_the_edge_by_half_a_pixel():
    (place,) = converted('{"bbox_2d": [-0.4, 0, 400.5, 300.2]}', boxes="pixels")[1].boxes
    assert place.boxes[0].corners == (0, 0, 400, 300)
    assert skip('{"bbox_2d": [0, 0, 400.6, 300]}', boxes="pixels")[0] == "bad_box"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "PNG with EXIF at its end"])
def test_a_box_of_the_stored_image_is_where_its_object_is_shown(orientation, kind):
    """The object is a white block on black; its box is found again in the decoded image."""
    pixels = np.zeros((300, 400, 3), np.uint8)
    pixels[32:64, 80:240] = 255
    exif = orientation_exif(orientation)
    if kind == "JPEG":
        data = jpeg_with_exif(Image.fromarray(pixels), exif)
    else:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG", exif=exif)
        data = file.getvalue()
        if kind == "PNG with EXIF at its end":
            at = data.index(b"eXIf") - 4
            chunk = data[at : at + 12 + int.from_bytes(data[at : at + 4], "big")]
            data = data.replace(chunk, b"").replace(b"\0\0\0\0IEND", chunk + b"\0\0\0\0IEND")
    shown = np.asarray(open_rgb(data))
    rows, columns = np.nonzero(shown[:, :, 0] > 128)
    found = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    stored = '{"bbox_2d": [80, 32, 240, 64]}'
    (place,) = converted(stored, images=(data,), boxes="pixels", boxes_of="stored")[1].boxes
    assert place.boxes[0].corners == found and place.size == shown.shape[1::-1]
    assert header_size(data) == ((400, 300), orientation)
    upright = json.dumps({"bbox_2d": [int(x) for x in found]})
    assert converted(upright, images=(data,), boxes="pixels")[1].boxes == (place,)


# ------------------------------------------------------------------ ms-swift


def swift(objects, *said, images=("1.png",)):
    roles = ("user", "assistant") * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, said)]
    return {"messages": messages, "images": list(images), "objects": objects}


def read_rows(tmp_path, rows, builder="openai_messages", **options):
    write_file(tmp_path / "1.png", WIDE)
    write_file(tmp_path / "2.png", encode(picture(2, 100, 100)))
    write_file(tmp_path / "rows.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return read_source(builder, tmp_path, ["rows"], **options)


def single(x1, y1, x2, y2, label="", image=0, size=(400, 300)):
    return BoxPlace(image=image, size=size, boxes=(Box(x1, y1, x2, y2, label),), is_list=False)


def test_objects_of_ms_swift_take_their_marks_in_order(tmp_path):
    names = {"ref": ["a dog", "a woman"], "bbox": [[33.5, 76, 85, 159], [67, 68, 109, 142]]}
    two = {"ref": ["sheep"], "bbox": [[9, 16, 13, 21], [36, 48, 49, 53]]}
    rows = [
        swift(names, "<image>Describe it.", "<ref-object><bbox> and <ref-object><bbox> play."),
        swift(two, "<image>Find <ref-object>.", "<bbox><bbox>"),
        swift(
            {"ref": [], "bbox": [[0.25, 0.5, 0.5, 1]], "bbox_type": "norm1", "image_id": [1]},
            *("<image><image>Which?", "That: <bbox>"),
            images=("1.png", "2.png"),
        ),
        swift(json.dumps(two), "<image>Find <ref-object>: <bbox>", '[{"bbox_2d": <bbox>, "label": "x"}]'),
    ]
    first, second, third, fourth = read_rows(tmp_path, rows)
    assert first.messages[1].text == "a dog<boxes> and a woman<boxes> play."
    assert first.messages[1].boxes == (single(33.5, 76, 85, 159, "a dog"), single(67, 68, 109, 142, "a woman"))
    assert second.messages[0].text == "<image>Find sheep." and second.messages[1].text == "<boxes><boxes>"
    assert second.messages[1].boxes == (single(9, 16, 13, 21, "sheep"), single(36, 48, 49, 53, "sheep"))
    assert third.messages[1].boxes == (single(25, 50, 50, 100, image=1, size=(100, 100)),)
    assert fourth.messages[0].boxes == (single(9, 16, 13, 21, "sheep"),)
    assert fourth.messages[1].text == '[{"bbox_2d": <boxes>, "label": "x"}]'
    assert fourth.messages[1].boxes == (single(36, 48, 49, 53, "sheep"),)


def test_objects_of_a_table(tmp_path):
    row = swift({"ref": ["a"], "bbox": [[1.5, 2, 3, 4]], "image_id": None}, "<image>Find <ref-object>.", "<bbox>")
    write_file(tmp_path / "1.png", WIDE)
    pq.write_table(pa.Table.from_pylist([row, row | {"objects": None}]), tmp_path / "rows.parquet")
    sample, skipped = read_source("openai_messages", tmp_path)
    assert sample.messages[1].boxes == (single(1.5, 2, 3, 4, "a"),)
    assert skipped.reason == "box_count_mismatch"


def test_objects_beside_conversations(tmp_path):
    said = [{"from": "human", "value": "<image>Find <ref-object>."}, {"from": "gpt", "value": "<bbox>"}]
    row = {"image": "1.png", "conversations": said, "objects": {"ref": ["it"], "bbox": [[1, 2, 3, 4]]}}
    (sample,) = read_rows(tmp_path, [row], builder="llava")
    assert sample.messages[1].boxes == (single(1, 2, 3, 4, "it"),)


BAD = {"bbox": [[1, 2, 3, 4]]}
BAD_ROWS = {
    "two marks": (swift(BAD, "<image>a?", "<bbox><bbox>"), "box_count_mismatch",
        "2 <bbox> in the texts, and objects.bbox has 1"),
    "a mark without objects": (swift(None, "<image>a?", "<bbox>"), "box_count_mismatch", "objects.bbox has 0"),
    "objects without a mark": (swift(BAD, "<image>a?", "b"), "box_count_mismatch",
        "objects.bbox has 1; write <bbox> at the place of each, or remove objects"),
    "a name without a mark": (swift(BAD | {"ref": ["a"]}, "<image>a?", "<bbox>"), "box_count_mismatch", "objects.ref"),
    "a point": (swift({"bbox": [[1, 2]]}, "<image>a?", "<bbox>"), "bad_box", "objects.bbox[0] has 2 numbers: a point"),
    "no numbers": (swift({"bbox": [["1", 2, 3, 4]]}, "<image>a?", "<bbox>"), "bad_box", "no array of numbers"),
    "another image": (swift(BAD | {"image_id": [1]}, "<image>a?", "<bbox>"), "bad_box", "a box of image 1"),
    "another type": (swift(BAD | {"bbox_type": "norm1000"}, "<image>a?", "<bbox>"), "schema_error", "real, norm1"),
    "another key": (swift(BAD | {"mask": [1]}, "<image>a?", "<bbox>"), "schema_error", "objects has 'mask'"),
    "an array": (swift([1], "<image>a?", "<bbox>"), "schema_error", "objects is an array"),
    "outside": (swift({"bbox": [[1, 2, 3, 400]]}, "<image>a?", "<bbox>"), "bad_box", "it lies outside"),
    "0 to 1 as real": (swift({"bbox": [[0.1, 0.2, 0.3, 0.4]]}, "<image>a?", "<bbox>"), "bad_box", "as in relative_1"),
    "coordinates beside": (swift(BAD, "<image>a?", f"<bbox> {JSON}"), "undeclared_boxes", "bbox_2d"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_objects_that_do_not_fit_leave_their_row_out(tmp_path, name):
    bad, reason, words = BAD_ROWS[name]
    good = swift(BAD, "<image>a?", "<bbox>")
    before, found, after = read_rows(tmp_path, [good, bad, good])
    assert found.reason == reason and words in found.detail
    assert before.messages[1].boxes == after.messages[1].boxes == (single(1, 2, 3, 4),)


def test_an_image_that_is_not_there_is_named_first(tmp_path):
    (found,) = read_rows(tmp_path, [swift(BAD, "<image>a?", "<bbox>", images=("3.png",))])
    assert found.reason == "image_not_found"


# ------------------------------------------------------------------ every builder with texts


@pytest.mark.parametrize("builder", ["openai_messages", "llava", "table", "image_folder", "webdataset_tars"])
def test_each_builder_with_texts_reads_boxes_in_them(tmp_path, builder):
    source, options = tmp_path / "raw", {}
    if builder == "webdataset_tars":
        source.mkdir()
        with tarfile.open(source / "00000.tar", "w") as tar:
            for name, data in (("1.png", WIDE), ("1.txt", JSON.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        options = {"question": "constant:Find it.", "answer": "txt"}
    else:
        write_file(source / "1.png", WIDE)
    if builder == "image_folder":
        write_file(source / "1.txt", JSON.encode())
        options = {"question": "Find it.", "answer": "text_file"}
    elif builder != "webdataset_tars":
        row = {
            "openai_messages": {"messages": [{"role": "user", "content": "Find it."}, {"role": "assistant"}]},
            "llava": {"conversations": [{"from": "human", "value": "Find it."}, {"from": "gpt"}]},
            "table": {"answer": JSON},
        }[builder] | {"image": "1.png"}
        if builder == "openai_messages":
            row["messages"][1]["content"] = JSON
        elif builder == "llava":
            row["conversations"][1]["value"] = JSON
        else:
            options = {"image": "image", "question": "<image>Find it.", "answer": "answer"}
        write_file(source / "rows.jsonl", json.dumps(row).encode())
    (sample,) = read_source(builder, source, boxes="relative_1000", **options)
    assert sample.messages[0].text == "<image>Find it."
    assert numbers(sample.messages[1]) == ([CAT], [True])
    (undeclared,) = read_source(builder, source, **options)
    assert undeclared.reason == "undeclared_boxes"
