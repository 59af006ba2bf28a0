"""Drawn clips: what is said to move moves there and then, nothing else does, and the same seed gives the same clips."""

from itertools import pairwise

import numpy as np
import pytest

from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.sources.conversations import OPENAI_MESSAGES, ConversationOptions
from dataset_builders.sources.moves import DIRECTIONS, SUBSETS
from dataset_builders.sources.shapes import COLOURS
from dataset_builders.videos.decode import probe, read_frames
from flows.pipeline.recipe import load_recipe
from stages.embedded_data.moves import STAGE
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.config import EmbeddedMovesConfig
from stages.shared.scoring.metrics.times import read_span
from tests.helpers.trees import tree_digest

pytestmark = pytest.mark.promise("Drawn clips show what their answers say: what moves, where and when.")

CONFIG = EmbeddedMovesConfig(kind="moves", seed=3, num_what=20, num_where=40, num_when=40)
RATE = CONFIG.fps


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Artifact:
    return run_stage(STAGE, CONFIG, {}, tmp_path_factory.mktemp("root")).artifact


@pytest.fixture(scope="module")
def samples(made) -> dict[str, list[Sample]]:
    """Return the rows of each subset, as the builder reads them."""
    options = ConversationOptions()
    parts = OPENAI_MESSAGES.list_parts(made.dir, SUBSETS, options)
    items = [sample for part in parts for sample in OPENAI_MESSAGES.iter_part(part, options)]
    assert all(isinstance(item, Sample) for item in items)
    return {subset: [item for item in items if item.subset == subset] for subset in SUBSETS}


def centres(sample: Sample, colour: str) -> np.ndarray:
    """Return (n, 2) the x and y of the centre of a colour in each frame, in pixels."""
    (video,) = sample.videos
    frames = read_frames(video, range(CONFIG.num_frames)).astype(int)
    far = np.abs(frames - np.array(COLOURS[colour])).max(-1)
    return np.array([[np.nonzero(frame < 60)[axis].mean() for axis in (1, 0)] for frame in far])


def test_every_row_has_one_clip_of_the_rate_that_was_asked_for(made, samples):
    assert made.manifest.stats["rows"] == {"moves_what": 20, "moves_where": 40, "moves_when": 40}
    for sample in (each for rows in samples.values() for each in rows[:5]):
        facts = probe(sample.videos[0])
        assert facts.times == tuple(number / RATE for number in range(8)) and (facts.height, facts.width) == (96, 96)
        assert sample.messages[0].text.startswith("<video>W")


def test_what_moves_is_what_the_answer_names_and_nothing_else_does(samples):
    for sample in samples["moves_what"]:
        colour = sample.messages[1].text.split()[0]
        moved = {each: centres(sample, each) for each in COLOURS if _is_there(sample, each)}
        assert len(moved) == 2 and np.ptp(moved.pop(colour), axis=0).max() > 10
        (rests,) = moved.values()
        assert np.ptp(rests, axis=0).max() < 1


def test_it_moves_in_the_direction_of_the_answer(samples):
    answers = set()
    for sample in samples["moves_where"]:
        colour, direction = sample.messages[0].text.split()[3], sample.messages[1].text
        x, y = (steps := np.diff(centres(sample, colour), axis=0)).T
        along, across = (x, y) if direction in ("left", "right") else (y, x)
        assert (np.sign(along.round()) == sum(DIRECTIONS[direction])).all() and np.abs(across).max() < 1, steps
        answers.add(direction)
    assert answers == set(DIRECTIONS)


def test_it_moves_between_the_times_of_the_answer_and_rests_otherwise(samples):
    begins = set()
    for sample in samples["moves_when"]:
        colour = sample.messages[0].text.split()[3]
        start, end = read_span(sample.messages[1].text)
        moves = np.abs(np.diff(centres(sample, colour), axis=0)).max(1) > 0.7
        times = pairwise(number / RATE for number in range(CONFIG.num_frames))
        assert [start <= a and b <= end for a, b in times] == moves.tolist(), sample.messages[1].text
        begins.add(start)
    assert len(begins) > 3


def test_a_seed_gives_the_same_files_and_another_gives_others(made, tmp_path):
    again = run_stage(STAGE, CONFIG, {}, tmp_path / "again").artifact
    other = run_stage(STAGE, CONFIG.model_copy(update={"seed": 4}), {}, tmp_path / "other").artifact
    digests = [tree_digest(each.dir) for each in (made, again, other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_recipe_may_name_them(tmp_path):
    data = {"kind": "moves", "seed": 0, "num_what": 2, "num_where": 2, "num_when": 2}
    assert load_recipe("shapes", [f"data={data}"]).config.data == EmbeddedMovesConfig(**data)
    with pytest.raises(InputError, match=r"data\.num_frames"):
        load_recipe("shapes", [f"data={data | {'num_frames': 2}}"])


def _is_there(sample: Sample, colour: str) -> bool:
    frame = read_frames(sample.videos[0], [0])[0].astype(int)
    return bool((np.abs(frame - np.array(COLOURS[colour])).max(-1) < 30).sum() > 40)
