"""Answers with boxes: what reaches the metrics, and the pictures of the pages, with numbers computed by hand."""

import dataclasses
import json

import pytest

from dataset_builders.contracts.boxes import BOX_SLOT, Box
from dataset_builders.contracts.sample import Message, Sample
from stages.answer.heldout import GeneratedAnswer
from stages.compare.stage import STAGE as COMPARE
from stages.evaluate.config import CompareConfig, EvaluateConfig
from stages.evaluate.predictions import read_predictions
from stages.evaluate.stage import STAGE as EVALUATE
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.chat_format.config import BoxFormat
from tests.helpers.boxes import CAT, SIZE, WRITTEN, asked_sample, boxed_sample, place
from tests.helpers.evaluation import PROMPT, answers_artifact, samples_artifact
from tests.helpers.pages import Element, assert_images_told, assert_self_contained, parse_page
from tests.helpers.samples import make_image

pytestmark = pytest.mark.promise(
    "Pages draw boxes at their places: those of the data, those that are written, the reference's and the answers', "
    "told apart by colour, line and words."
)

# Corners that are wrong by as much as (x * 0.64, y * 0.48) in pixels, and text that is no box.
ANSWERS = {
    "near": '[{"bbox_2d": [25, 50, 500, 750], "label": "cat"}, {"bbox_2d": [900, 500, 800, 400], "label": "dog"}]',
    "pixels": '[{"bbox_2d": [2000, 1500, 2400, 1600], "label": "cat"}]',
    "none": "[]",
    "words": "I see a cat.",
}


def several_images() -> Sample:
    boxes = (place(CAT), place(CAT, image=1))
    messages = (
        Message(role="user", text="<image><image>Find the cat in both."),
        Message(role="assistant", text=f"{BOX_SLOT} and {BOX_SLOT}", boxes=boxes),
    )
    return Sample(key="several/00000000", images=(make_image(*SIZE), make_image(*SIZE, seed=1)), messages=messages)


def evaluated(tmp_path, name: str, first: str, samples: Artifact, others=()) -> Artifact:
    """Return an evaluation whose first answer to `boxed_sample` is `first`."""
    lines = [
        GeneratedAnswer(key=key, turn=turn, answer=answer, stopped=True, ids=[5])
        for key, turn, answer in (("boxed/00000000", 0, first), ("boxed/00000000", 1, "a cat"), *others)
    ]
    answers = answers_artifact(tmp_path / name, lines, fingerprint=f"{name:0<16}")
    inputs = {"answers": answers, "samples": samples}
    return run_stage(EVALUATE, EvaluateConfig(max_new_tokens=6), inputs, tmp_path / "root").artifact


def drawn(figure: Element) -> dict[str, list[list[float]]]:
    """Return layer -> [x, y, width, height] of its boxes."""
    (svg,) = figure.find("svg", "boxes")
    names = ("x", "y", "width", "height")
    return {
        layer.classes[0]: [[float(rect.attributes[n]) for n in names] for rect in layer.find("rect", "line")]
        for layer in svg.find("g")
        if layer.classes
    }


def test_predictions_have_the_written_texts_and_the_true_boxes(tmp_path):
    prompt = PROMPT.model_copy(update={"boxes": BoxFormat(form="lines")})
    line = [GeneratedAnswer(key="boxed/00000000", turn=t, answer="x", stopped=True, ids=[5]) for t in range(2)]
    inputs = {
        "answers": answers_artifact(tmp_path / "answers", line, prompt),
        "samples": samples_artifact(tmp_path / "samples", [boxed_sample()]),
    }
    made = run_stage(EVALUATE, EvaluateConfig(max_new_tokens=6), inputs, tmp_path / "root").artifact
    first, second = read_predictions(made.dir).to_pylist()
    assert first["reference"] == f"Here: {WRITTEN['relative_1000', 'lines']}" == first["references"][0]
    assert second["question"] == "What is at [500, 0, 1000, 10]?" and second["boxes"] is None
    assert json.loads(first["boxes"]) == {
        **{"convention": "relative_1000", "image": 0, "size": [640, 480], "resized": [352, 256]},
        "boxes": [[10, 20, 300, 400, "cat"], [320, 0, 640, 5, "a dog"]],
    }


def test_boxes_of_several_images_are_counted_and_shown_without(tmp_path):
    samples = samples_artifact(tmp_path / "samples", [boxed_sample(), several_images()])
    others = [("several/00000000", 0, "[[1, 2, 3, 4]]")]
    made = evaluated(tmp_path, "one", ANSWERS["near"], samples, others)
    assert read_predictions(made.dir, ["boxes"])["boxes"].to_pylist()[2] is None
    assert made.manifest.stats["boxes_of_several"] == 1
    page = (made.dir / "report.html").read_text()
    assert "1 answers, which no score of boxes counts" in page
    figures = {figure.find("figcaption")[0].text.split("\n")[-1]: figure for figure in parse_page(page).find("figure")}
    assert not figures["several/00000000"].find("svg")


@pytest.mark.parametrize(
    ("name", "boxes", "legend"),
    [
        ("near", [[16, 24, 304, 336], [512, 192, 64, 48]], "answer: 2 boxes"),
        ("pixels", [[1280, 720, 256, 48]], "answer: 1 box, 1 outside the picture"),
        ("none", [], "answer: no boxes"),
        ("words", [], "answer: no boxes can be read"),
    ],
)
def test_an_evaluation_draws_the_reference_and_the_answer(tmp_path, name, boxes, legend):
    samples = samples_artifact(tmp_path / "samples", [boxed_sample()])
    page = (evaluated(tmp_path, name, ANSWERS[name], samples).dir / "report.html").read_text()
    first, second = parse_page(page).find("figure")
    assert drawn(first) == {"true": [[10, 20, 290, 380], [320, 0, 320, 5]], "answer": boxes}
    assert [key.text for key in first.find("div", "keys")[0].find("span")] == ["reference: 2 boxes", legend]
    told = first.find("svg")[0].attributes["aria-label"]
    assert told.startswith("reference: cat 10, 20, 300, 400; a dog 320, 0, 640, 5. answer: ")
    assert drawn(second) == {"asked": [[320, 0, 320, 5]]}, "the box that the question names"
    assert_images_told(page)
    assert_self_contained(page)


def test_before_and_after_are_told_apart(tmp_path):
    samples = samples_artifact(tmp_path / "samples", [boxed_sample(), asked_sample()])
    right = f"Here: {WRITTEN['relative_1000', 'bbox_2d']}"
    said = {"base": (ANSWERS["near"], "a cat"), "tuned": (right, "a dog")}
    both = {
        name: evaluated(tmp_path, name, first, samples, [("asked/00000000", 0, other)])
        for name, (first, other) in said.items()
    }
    made = run_stage(COMPARE, CompareConfig(), {**both, "samples": samples}, tmp_path / "root").artifact
    page = (made.dir / "report.html").read_text()
    found, asked = parse_page(page).find("figure", "boxed")
    assert drawn(found) == {
        "true": [[10, 20, 290, 380], [320, 0, 320, 5]],
        "before": [[16, 24, 304, 336], [512, 192, 64, 48]],
        # 16 / 1000 * 640 and so on: the written corners are rounded.
        "answer": [[10.24, 20.16, 289.92, 379.68], [320, 0, 320, 4.8]],
    }
    assert [key.text for key in found.find("div", "keys")[0].find("span")] == [
        *("reference: 2 boxes", "before: 2 boxes", "after: 2 boxes")
    ]
    assert drawn(asked) == {"asked": [[320, 0, 320, 5]]}
    styles = parse_page(page).find("style")[0].text
    assert all(f".boxes .{kind} .line" in styles for kind in ("answer", "before")), "dashes and dots"


def test_many_boxes_have_thin_lines_and_no_labels(tmp_path):
    boxes = [Box(i, i, i + 50, i + 40, f"n {i}") for i in range(30)]
    sample = dataclasses.replace(boxed_sample("boxed/00000000", *boxes))
    made = evaluated(tmp_path, "many", "[]", samples_artifact(tmp_path / "samples", [sample]))
    figure = parse_page((made.dir / "report.html").read_text()).find("figure")[0]
    (svg,) = figure.find("svg")
    assert "many" in svg.classes and not svg.find("text") and len(svg.find("title")) == 30
    assert "and 18 more" in svg.attributes["aria-label"] and "where the mouse is" in figure.find("div", "keys")[0].text
