"""Drawn shapes: every box holds its shape to the pixel, and every answer is right."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image

from dataset_builders.contracts.boxes import BOX_SLOT
from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.sources.conversations import OPENAI_MESSAGES, ConversationOptions
from dataset_builders.sources.shapes import COLOURS, KINDS, SUBSETS
from flows.pipeline.recipe import load_recipe
from stages.embedded_data.shapes import STAGE
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.config import EmbeddedShapesConfig
from tests.helpers.trees import tree_digest

pytestmark = pytest.mark.promise("Drawn shapes have boxes that hold exactly their pixels, and answers that are right.")

CONFIG = EmbeddedShapesConfig(kind="shapes", seed=3, num_one=60, num_many=90)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Artifact:
    return run_stage(STAGE, CONFIG, {}, tmp_path_factory.mktemp("root")).artifact


@pytest.fixture(scope="module")
def samples(made) -> list[Sample]:
    """Return every row as the builder reads it that the recipe names."""
    options = ConversationOptions(boxes="pixels")
    parts = OPENAI_MESSAGES.list_parts(made.dir, SUBSETS, options)
    return [sample for part in parts for sample in OPENAI_MESSAGES.iter_part(part, options)]


def boxes_of(sample: Sample):
    (place,) = sample.messages[1].boxes
    return place.boxes


def test_every_row_is_read_with_its_boxes_as_one_list(made, samples):
    assert made.manifest.stats["rows"] == {"shapes_one": 60, "shapes_many": 90}
    assert all(isinstance(sample, Sample) for sample in samples) and len(samples) == 150
    for sample in samples:
        assert sample.messages[1].text == BOX_SLOT and sample.messages[1].boxes[0].is_list
    numbers = {name: {len(boxes_of(s)) for s in samples if s.subset == name} for name in SUBSETS}
    assert numbers["shapes_one"] == {1} and numbers["shapes_many"] >= {0, 1, 2, 3}


def test_a_box_holds_the_pixels_of_its_shape_and_no_more(samples):
    looked_at = set()
    for sample in samples:
        pixels = np.asarray(Image.open(io.BytesIO(sample.images[0])))
        assert sample.messages[1].boxes[0].size == pixels.shape[1::-1]
        for box in boxes_of(sample):
            colour, kind = box.label.split()
            inside = (pixels == COLOURS[colour]).all(axis=-1)
            around = np.zeros_like(inside)
            around[int(box.y1) : int(box.y2), int(box.x1) : int(box.x2)] = True
            rows, columns = np.nonzero(inside & around)
            bounds = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            assert box.corners == bounds
            filled = (inside & around).sum() / around.sum()
            assert {"rectangle": filled == 1, "ellipse": 0.76 < filled < 0.81, "triangle": 0.49 < filled < 0.58}[kind]
            looked_at.add(kind)
    assert looked_at == set(KINDS)


def test_what_is_asked_for_is_found_and_nothing_else(samples):
    for sample in samples:
        pixels = np.asarray(Image.open(io.BytesIO(sample.images[0])))
        asked = sample.messages[0].text.removeprefix("<image>Find ").rstrip(".").split()
        boxes = boxes_of(sample)
        labels = [box.label.split() for box in boxes]
        if asked[0] == "the":
            assert labels == [asked[1:]]
        elif asked[1] in KINDS:
            assert {kind for _, kind in labels} <= {asked[1]}
        elif asked[1] in COLOURS:
            assert {colour for colour, _ in labels} <= {asked[1]}
            assert bool(labels) == bool((pixels == COLOURS[asked[1]]).all(axis=-1).any())
        else:
            found = {colour for colour in COLOURS if (pixels == COLOURS[colour]).all(axis=-1).any()}
            assert {colour for colour, _ in labels} == found and labels
        assert [(box.y1, box.x1) for box in boxes] == sorted((box.y1, box.x1) for box in boxes)
        for one, two in itertools.combinations(boxes, 2):
            assert one.x2 <= two.x1 or two.x2 <= one.x1 or one.y2 <= two.y1 or two.y2 <= one.y1


def test_drawn_again_it_has_the_same_bytes(made, tmp_path):
    assert tree_digest(run_stage(STAGE, CONFIG, {}, tmp_path).artifact.dir) == tree_digest(made.dir)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{kind: shape, seed: 0, num_one: 1, num_many: 1}", r"data\.kind='shape' should be 'shapes'"),
        ("{kind: shapes, seed: 0, num_one: 1}", r"data\.num_many is missing"),
        ("{kind: shapes, seed: 0, num_one: 1, num_many: 1, sides: [8]}", r"data\.sides\.0=8 "),
    ],
)
def test_wrong_settings_are_named(data, message):
    with pytest.raises(InputError, match=message):
        load_recipe("shapes", [f"data={data}"])
