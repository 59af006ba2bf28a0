"""Boxes on the pages of samples and of tokens: the numbers of the SVG against the pixels of the picture under it."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from dataset_builders.contracts.boxes import BOX_SLOT, Box, BoxPlace, upright
from dataset_builders.contracts.sample import Message, Sample
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.chat_format.config import BoxFormat
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.shared.preview.render import PreviewOptions, Target, render_preview
from stages.tokenize.stage import STAGE as TOKENIZE
from stages.tokenize.stage import TokenizeConfig
from tests.helpers.boxes import CAT, SIZE, boxed_sample, place
from tests.helpers.pages import Element, assert_self_contained, image_bytes, parse_page
from tests.helpers.raw_rows import jpeg_with_exif, orientation_exif
from tests.helpers.samples import make_image, make_samples_artifact
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "Pages draw boxes at their places: those of the data, those that are written, the reference's and the answers', "
    "told apart by colour, line and words."
)
STORED, IN_FILE = (96, 64), Box(8, 16, 40, 32, "red")  # of a file, before its orientation
# Orientation -> [x, y, width, height] in the image as shown, by hand: 2 mirrors, 3 turns by 180 degrees, 4 flips,
# 5 to 8 swap the sides.
SHOWN = {
    1: [8, 16, 32, 16],
    2: [56, 16, 32, 16],
    3: [56, 32, 32, 16],
    4: [8, 32, 32, 16],
    5: [16, 8, 16, 32],
    6: [32, 8, 16, 32],
    7: [32, 56, 16, 32],
    8: [16, 56, 16, 32],
}


def cards(artifact: Artifact, **options) -> dict[str, Element]:
    page = render_preview(Target(artifact), PreviewOptions(**({"num_samples": 100} | options)))
    assert_self_contained(page)
    return {card.find("code")[0].text: card for card in parse_page(page).find("section", "card")}


def rects(svg: Element) -> list[list[float]]:
    names = ("x", "y", "width", "height")
    return [[float(rect.attributes[n]) for n in names] for rect in svg.find("rect", "line")]


def answered(key: str, image: bytes, *places: BoxPlace) -> Sample:
    text = "and".join([BOX_SLOT] * len(places))
    messages = (Message(role="user", text="<image>Find it."), Message(role="assistant", text=text, boxes=places))
    sample = Sample(key=key, images=(image,), messages=messages)
    sample.check()
    return sample


def convert(tmp_path, *samples: Sample) -> Artifact:
    return make_samples_artifact(tmp_path / "samples", {"train/shard-00000.tar": samples})


@pytest.mark.parametrize("orientation", SHOWN)
def test_a_box_lies_on_what_it_shows_in_every_orientation(orientation, tmp_path):
    stored = Image.new("RGB", STORED, "white")
    x1, y1, x2, y2 = IN_FILE.corners
    ImageDraw.Draw(stored).rectangle((x1, y1, x2 - 1, y2 - 1), fill="red")
    box = upright(IN_FILE, STORED, orientation)
    size = STORED if orientation < 5 else STORED[::-1]
    found = BoxPlace(image=0, size=size, boxes=(box,), is_list=True)
    file = jpeg_with_exif(stored, orientation_exif(orientation))
    (card,) = cards(convert(tmp_path, answered("turned/00000000", file, found))).values()
    (svg,) = card.find("svg", "boxes")
    assert svg.attributes["viewbox"] == f"0 0 {size[0]} {size[1]}"
    assert rects(svg) == [SHOWN[orientation]]
    x, y, width, height = map(int, rects(svg)[0])
    pixels = np.asarray(Image.open(io.BytesIO(image_bytes(card.find("img")[0]))))
    is_red = (pixels[..., 0] > 180) & (pixels[..., 1] < 120)
    assert pixels.shape[:2] == size[::-1] and is_red[y : y + height, x : x + width].mean() > 0.9
    assert is_red.sum() < 1.1 * width * height, "nothing outside of it"


def test_samples_show_boxes_of_questions_and_of_answers_each_on_its_image(tmp_path):
    image = make_image(*SIZE)
    pair = Sample(
        key="pair/00000000",
        images=(image, make_image(*SIZE, seed=1)),
        messages=(
            Message(role="user", text="<image><image>Find the cat in the second."),
            Message(role="assistant", text=f"It is {BOX_SLOT}.", boxes=(place(CAT, image=1),)),
        ),
    )
    nothing = answered("nothing/00000000", image, place())
    shown = cards(convert(tmp_path, boxed_sample(), pair, nothing))
    (svg,) = shown["boxed/00000000"].find("svg")
    assert [(g.classes, rects(g)) for g in svg.find("g") if g.classes] == [
        (["asked"], [[320, 0, 320, 5]]),
        (["true"], [[10, 20, 290, 380], [320, 0, 320, 5]]),
    ]
    assert [text.text for text in svg.find("text")] == ["a dog", "cat", "a dog"]
    assert "image 1, px: cat 10, 20, 300, 400; a dog 320, 0, 640, 5" in shown["boxed/00000000"].text
    assert [bool(figure.find("svg")) for figure in shown["pair/00000000"].find("figure")] == [False, True]
    assert shown["pair/00000000"].find("div", "say")[1].text == "It is image 2, px: cat 10, 20, 300, 400."
    assert "in answers: no boxes" in shown["nothing/00000000"].find("figure")[0].text
    assert not any(BOX_SLOT in card.text for card in shown.values())


@pytest.mark.parametrize(
    ("convention", "learnt", "given"),
    [
        # 288 x 192 pixels: 16 / 1000 * 288 = 4.61, 42 / 1000 * 192 = 8.06, (469 - 16) / 1000 * 288 = 130.46, ...
        ("relative_1000", [[4.61, 8.06, 130.46, 151.87], [144, 0, 144, 1.92]], [144, 0, 144, 1.92]),
        ("resized_pixels", [[4, 8, 131, 152], [144, 0, 144, 2]], [144, 0, 144, 2]),
    ],
)
def test_tokens_show_the_written_boxes_on_the_resized_image(convention, learnt, given, tmp_path):
    two = dataclasses.replace(boxed_sample("two/00000001"), images=boxed_sample().images * 2)
    question = dataclasses.replace(two.messages[0], text="<image>" + two.messages[0].text)
    two = dataclasses.replace(two, messages=(question, *two.messages[1:]))
    model = ModelDirectory(tiny_hf_dir())
    inputs = {"samples": convert(tmp_path, boxed_sample(), two), "processor": processor_input(model)}
    config = TokenizeConfig(
        max_seq_len=2048, max_pixels=None, max_skip_fraction=1.0, boxes=BoxFormat(convention=convention)
    )
    shown = cards(run_stage(TOKENIZE, config, inputs, tmp_path / "root").artifact, model=model)
    (svg,) = shown["boxed/00000000"].find("svg", "boxes")
    assert svg.attributes["viewbox"] == "0 0 288 192"
    assert {g.classes[0]: rects(g) for g in svg.find("g") if g.classes} == {"asked": [given], "true": learnt}
    assert "does not say of which of the images" in shown["two/00000001"].text
    assert not shown["two/00000001"].find("svg", "boxes")
