"""Boxes in texts, in each convention, form and order, against texts written by hand."""

import dataclasses

import pytest

from dataset_builders.contracts.boxes import Box, TrueBoxes
from dataset_builders.contracts.sample import Message, SkipSample
from stages.shared.chat_format.boxes import in_convention, true_boxes, with_boxes_written
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import BoxFormat
from stages.shared.chat_format.images import load_image_config
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.boxes import CAT, DOG, ONE, RESIZED, SIZE, WRITTEN, boxed_sample, place
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "Boxes are written in the model's convention and the recipe's form where a prompt is made, in training, in every "
    "question and in an export; no text reaches a model with boxes that are not written."
)


@pytest.fixture(scope="module")
def pixels():
    return load_image_config(ModelDirectory(tiny_hf_dir()))


@pytest.mark.parametrize(("convention", "form"), WRITTEN)
def test_boxes_are_written_where_they_belong(convention, form, pixels):
    written = with_boxes_written(boxed_sample(), BoxFormat(convention=convention, form=form), pixels)
    assert [message.text for message in written.messages] == [
        *("<image>Find all.", f"Here: {WRITTEN[convention, form]}", f"What is at {ONE[convention]}?", "a dog")
    ]
    assert not any(message.boxes for message in written.messages) and written.images == boxed_sample().images


def test_an_order_of_their_own_or_that_of_the_data(pixels):
    boxes = [Box(0, y, x, 480, label) for label in "ba" for y in (48, 0) for x in (640, 64)]
    texts = {
        order: with_boxes_written(boxed_sample("a/00000000", *boxes), BoxFormat(form="lines", order=order), pixels)
        .messages[1]
        .text.removeprefix("Here: ")
        .split("\n")
        for order in ("given", "sorted")
    }
    corners = ["[0, 0, 100, 1000]", "[0, 0, 1000, 1000]", "[0, 100, 100, 1000]", "[0, 100, 1000, 1000]"]
    assert texts["sorted"] == [f"{label}: {each}" for label in "ab" for each in corners]
    assert texts["given"] == [f"{label}: {corners[i]}" for label in "ba" for i in (3, 2, 1, 0)]


@pytest.mark.parametrize(("form", "text"), [("bbox_2d", "[]"), ("fenced", "```json\n[]\n```"), ("lines", "none")])
def test_nothing_to_find_is_said(form, text, pixels):
    nothing = Message(role="assistant", text="<boxes>", boxes=(place(),))
    sample = dataclasses.replace(boxed_sample(), messages=(nothing,))
    assert with_boxes_written(sample, BoxFormat(form=form), pixels).messages[0].text == text
    assert true_boxes(nothing, BoxFormat(), pixels).boxes == ()


def test_halves_are_rounded_as_the_makers_round_them(pixels):
    # ms-swift: int(round(x / width * 1000)). Python rounds a half to the even number: 0.5, 1.5, 999.5.
    assert in_convention(Box(1, 3, 1999, 2000), (2000, 2000), "relative_1000", pixels) == [0, 2, 1000, 1000]


def test_the_true_boxes_turn_an_answer_back_to_pixels(pixels):
    for convention in ("relative_1000", "resized_pixels"):
        (truth,) = [
            found for m in boxed_sample().messages if (found := true_boxes(m, BoxFormat(convention=convention), pixels))
        ][:1]
        assert (truth.convention, truth.image, truth.size, truth.resized) == (convention, 0, SIZE, RESIZED)
        assert truth.boxes == (CAT, DOG) and TrueBoxes.from_json(truth.to_json()) == truth
        written = in_convention(CAT, SIZE, convention, pixels)
        assert truth.as_shown(written) == pytest.approx(CAT.corners, abs=1.2)
    assert truth.as_shown((500, 500, 1000, 250), "relative_1000") == (320, 240, 640, 120)
    assert truth.as_shown((144, 96, 288, 48)) == (320, 240, 640, 120)
    several = dataclasses.replace(boxed_sample().messages[1], text="<boxes><boxes>", boxes=(place(), place(image=1)))
    assert true_boxes(several, BoxFormat(), pixels) is None


def test_boxes_that_are_not_written_reach_no_model():
    chat = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    with pytest.raises(AssertionError, match="not written"):
        chat.tokenize([boxed_sample().messages])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reasoning": "At <boxes>."}, "box_count_mismatch"),
        ({"references": ("<boxes>",)}, "box_count_mismatch"),
        ({"boxes": (place(Box(1, 2, 3, 4, "a\nb")),)}, "bad_box"),
        ({"boxes": (place(Box(1, 2, 3, 4, "<image>")),)}, "bad_box"),
        ({"boxes": (place(Box(1, 2, 3, 4, "a\x00b")),)}, "control_chars"),
        ({"boxes": (place(Box(1, 2, 3, 4, "\ud800")),)}, "schema_error"),
        ({"boxes": (place(Box(1, 2, 3, 4, "<|image_pad|>")),)}, "special_token_in_text"),
    ],
)
def test_a_label_or_a_slot_that_would_change_the_text_is_refused(changes, reason):
    user, answer, *_ = boxed_sample().messages
    sample = dataclasses.replace(boxed_sample(), messages=(user, dataclasses.replace(answer, **changes)))
    with pytest.raises(SkipSample) as refused:
        sample.check()
    assert refused.value.reason == reason
