"""Boxes read from answers: the forms that are written, what models make of them, and what does not parse."""

import pytest

from dataset_builders.contracts.boxes import BOX_SLOT, Box, BoxPlace
from dataset_builders.contracts.sample import Message, Sample
from stages.shared.chat_format.boxes import BoxFormat, read_boxes, with_boxes_written

pytestmark = pytest.mark.promise(
    "Boxes are read from answers in every form that prompts write, also with text around them or cut off; an answer "
    "that leaves open what is meant does not parse."
)

CAT, DOG = ((10.0, 20.0, 300.0, 400.0), "cat"), ((0.0, 0.0, 1000.0, 5.5), "dog")
ONE = '{"bbox_2d": [10, 20, 300, 400], "label": "cat"}'
TWO = f'[{ONE}, {{"bbox_2d": [0, 0, 1000, 5.5], "label": "dog"}}]'
NUMBERS = "[10, 20, 300, 400]"

READ = {
    "a list": (TWO, [CAT, DOG]),
    "one object alone": (ONE, [CAT]),
    "a block of code": (f"```json\n{TWO}\n```", [CAT, DOG]),
    "text around it": (f"Here they are:\n```json\n{TWO}\n```\nThe cat is at [1, 2, 3, 4].", [CAT, DOG]),
    "an object around the list": (f'{{"objects": {TWO}}}', [CAT, DOG]),
    "objects one a line": (TWO[1:-1].replace("}, {", "}\n{"), [CAT, DOG]),
    "no label": (f'[{{"bbox_2d": {NUMBERS}}}]', [(CAT[0], "")]),
    "behind its reasoning": (f"<think>It may be at [1, 2, 3, 4].</think>\n\n{ONE}", [CAT]),
    "other keys": (f'[{{"label": "cat", "score": 0.5, "bbox_2d": {NUMBERS}}}]', [CAT]),
    "braces in a label": (ONE.replace("cat", "a {cat} ["), [(CAT[0], "a {cat} [")]),
    "single quotes": (TWO.replace('"', "'"), [CAT, DOG]),
    "cut off in the second object": (TWO[:-20], [CAT]),
    "cut off behind the first object": (TWO[: len(ONE) + 1], [CAT]),
    "the same box twice": (f"[{ONE}, {ONE}]", [CAT, CAT]),
    "corners in another order": ('[{"bbox_2d": [300, 20, 10, 400]}]', [((300.0, 20.0, 10.0, 400.0), "")]),
    "an empty list": ("[]", []),
    "an empty list in code": ("```json\n[]\n```", []),
    "an empty list with text": ("There is nothing: [ ].", []),
    "none": ("None.", []),
    "numbers": (NUMBERS, [(CAT[0], "")]),
    "numbers in a sentence": (f"The cat is at {NUMBERS}, asleep.", [(CAT[0], "")]),
    "a list of numbers": (f"[{NUMBERS}, [1,2,3,4]]", [(CAT[0], ""), ((1.0, 2.0, 3.0, 4.0), "")]),
    "signs and decimals": ("[-1, +2.5, 0.3, 4]", [((-1.0, 2.5, 0.3, 4.0), "")]),
    "lines": (f"cat: {NUMBERS}\ndog: [0, 0, 1000, 5.5]", [CAT, DOG]),
    "lines as a list": (f"The animals:\n- cat: {NUMBERS}\n- dog: [0, 0, 1000, 5.5].", [CAT, DOG]),
    "lines cut off": (f"cat: {NUMBERS}\ndog: [0, 0, 10", [CAT]),
    "brackets in a label": (f"item [12]: with a colon: {NUMBERS}", [(CAT[0], "item [12]: with a colon")]),
}
NOT_READ = {
    "an empty text": "",
    "reasoning without an answer": f"<think>{ONE}</think>",
    "a sentence": "There is no cat.",
    "none in a sentence": "None of them is a cat",
    "cut off in the first object": ONE[:-8],
    "an object broken in the middle": TWO.replace('cat"', "cat"),
    "an object broken at the end of the list": TWO.replace('dog"', "dog"),
    "three coordinates": TWO.replace("0, 0, 1000, 5.5", "0, 0, 1000"),
    "coordinates in quotes": ONE.replace("10, 20", '"10", "20"'),
    "a box in a box": ONE.replace(NUMBERS, f"[{NUMBERS}]"),
    "a coordinate that is no number": ONE.replace("10,", "NaN,"),
    "a coordinate beyond all images": ONE.replace("10,", "1e999,"),
    "a label that is no text": ONE.replace('"cat"', '["cat"]'),
    "an apostrophe in single quotes": "[{'bbox_2d': [1, 2, 3, 4], 'label': 'the man's hat'}]",
    "another key": f'{{"bbox": {NUMBERS}, "label": "cat"}}',
    "a label as a key": f'{{"cat": {NUMBERS}}}',
    "a point": "cat: [10, 20]",
    "corners in round brackets": "cat(10,20),(300,400)",
    "cut off in the first numbers": "[10, 20, 30",
}


@pytest.mark.parametrize("name", READ)
def test_boxes_are_read(name):
    text, boxes = READ[name]
    assert read_boxes(text) == boxes


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_certain_does_not_parse(name):
    assert read_boxes(NOT_READ[name]) is None


@pytest.mark.parametrize("form", ["bbox_2d", "fenced", "lines"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_a_prompt_writes_is_read(form, number):
    boxes = (Box(1, 2, 30, 40, 'a "q"'), Box(0, 0, 100, 100, "it's {so} [12]:"))[:number]
    place = BoxPlace(image=0, size=(1000, 1000), boxes=boxes, is_list=True)
    sample = Sample(key="s/0", images=(), messages=(Message(role="assistant", text=BOX_SLOT, boxes=(place,)),))
    (written,) = with_boxes_written(sample, BoxFormat(form=form), None).messages
    assert read_boxes(written.text) == [(box.corners, box.label) for box in boxes]


LONG = ["[" * 20_000, '{"bbox_2d": ' * 2000, " " * 50_000 + ":", "[1]: " * 9000, ",'" * 20_000 + "[1]", "[1," * 9000]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_a_degenerate_answer_is_read_at_once(text):
    assert read_boxes(text) is None
