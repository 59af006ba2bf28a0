"""Scenes with a printed word: rows in the shape of textcaps (captions) and of textvqa (ten annotators' answers).

    a board with a word on it, and a house, trees or balls to its left or right
    textcaps  "Caption this image."   "A red sign that says OPEN stands to the left of two trees."
              references: five captions by rule, the one above the first of them
    textvqa   "What does the sign say?\\nAnswer briefly."   "Open."
              references: ten answers, seven or more of them right, the others what hasty people say

The metric of ten answers is VQA accuracy, of captions CIDEr; both need the list of references.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.helpers.drawn.canvas import Canvas
from tests.helpers.drawn.rows import Asked, Row, cauldron_row, choose, row_streams, sample_of, sentence, shortly

NUM_ANNOTATORS = 10
_MIN_AGREEING = 7
CAPTION_PROMPTS = ("Caption this image.", "Provide a caption for this picture.", "What does this picture show?")
WORDS = ("OPEN", "CLOSED", "EXIT", "TAXI", "BAKERY", "SALE", "CAFE", "HOTEL", "STOP", "MUSEUM", "BANK", "ZOO")
COLOURS = {"red": "#b3262e", "blue": "#2453a6", "green": "#2c7a3f", "purple": "#6a3d9a", "brown": "#7a4a21"}
_NUMBERS = {1: "one", 2: "two", 3: "three"}
_PLURALS = {"house": "houses", "tree": "trees", "ball": "balls"}
_SKIES = ("#dbeafb", "#f7e9d2", "#e4e4ee")
_GROUNDS = ("#b9d6a3", "#d9c9a3", "#c3c7cc")
_SIZE = (480, 320)
_GROUND = 230
_HASTY = ("unanswerable", "answering does not require reading text in the image")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The content of a scene.

    Attributes:
        board: the object that the word is written on.
        colour: colour of the board; a name in COLOURS.
        side: the side of the other things on which the board is.
        things: the other things, and their number.
    """

    word: str
    board: Literal["sign", "truck", "box"]
    colour: str
    side: Literal["left", "right"]
    things: Literal["house", "tree", "ball"]
    count: int
    sky: str
    ground: str


def iter_caption_rows(seed: int, stream: int) -> Iterator[Row]:
    """Yield an endless sequence of scenes, each with five captions. The first caption is trained on."""
    for rng in row_streams(seed, stream):
        scene = make_scene(rng)
        captions = captions_of(scene)
        asked = Asked(question=choose(rng, CAPTION_PROMPTS), answer=captions[0], references=captions)
        yield cauldron_row(draw_scene(scene), [asked], "TextCaps")


def iter_annotated_rows(seed: int, stream: int) -> Iterator[Row]:
    """Yield an endless sequence of scenes, each with one question and ten annotators' answers."""
    for rng in row_streams(seed, stream):
        scene = make_scene(rng)
        question, right = choose(rng, questions_about(scene))
        answers = _annotators(right, rng)
        learnt = Counter(answers).most_common(1)[0][0]
        asked = Asked(question=shortly(question, rng), answer=sentence(learnt), references=answers)
        yield cauldron_row(draw_scene(scene), [asked], "TextVQA")


def make_scene(rng: np.random.Generator) -> Scene:
    return Scene(
        word=choose(rng, WORDS),
        board=choose(rng, ("sign", "truck", "box")),
        colour=choose(rng, tuple(COLOURS)),
        side=choose(rng, ("left", "right")),
        things=choose(rng, tuple(_PLURALS)),
        count=int(rng.integers(1, 4)),
        sky=choose(rng, _SKIES),
        ground=choose(rng, _GROUNDS),
    )


def captions_of(scene: Scene) -> tuple[str, ...]:
    """Return five captions of a scene."""
    board, word, things = f"{scene.colour} {scene.board}", scene.word, _counted(scene)
    other = "right" if scene.side == "left" else "left"
    verb = "is" if scene.count == 1 else "are"
    return (
        f"A {board} that says {word} stands to the {scene.side} of {things}.",
        f"The word {word} is printed on a {board} next to {things}.",
        f"{things.capitalize()} {verb} to the {other} of a {board} with the word {word}.",
        f"A {board} reads {word}.",
        f"There is a {board} with {word} written on it and {things} beside it.",
    )


def questions_about(scene: Scene) -> list[tuple[str, tuple[str, ...]]]:
    """Return every question with the forms in which people write its right answer."""
    number = _NUMBERS[scene.count]
    return [
        (f"What does the {scene.board} say?", (scene.word.lower(), scene.word)),
        (f"What colour is the {scene.board}?", (scene.colour, scene.colour.capitalize())),
        (f"How many {_PLURALS[scene.things]} are there?", (str(scene.count), number)),
        (f"On which side is the {scene.board}?", (scene.side, f"the {scene.side}")),
    ]


def draw_scene(scene: Scene) -> Canvas:
    canvas = Canvas(*_SIZE, paper=scene.sky)
    canvas.box((0, _GROUND, _SIZE[0], _SIZE[1]), scene.ground)
    left, first = (40, 250) if scene.side == "left" else (270, 30)
    for i in range(scene.count):
        _draw_thing(canvas, scene.things, first + 70 * i)
    _draw_board(canvas, scene, left)
    return canvas


def _annotators(right: tuple[str, ...], rng: np.random.Generator) -> tuple[str, ...]:
    """Return ten answers. Seven to ten of them are right, most of them in the first form."""
    agreeing = int(rng.integers(_MIN_AGREEING, NUM_ANNOTATORS + 1))
    otherwise = int(rng.integers(0, 3))
    answers = [right[0]] * (agreeing - otherwise) + [right[1]] * otherwise
    answers += [choose(rng, _HASTY) for _ in range(NUM_ANNOTATORS - agreeing)]
    return tuple(sample_of(rng, answers, NUM_ANNOTATORS))


def _counted(scene: Scene) -> str:
    return f"a {scene.things}" if scene.count == 1 else f"{_NUMBERS[scene.count]} {_PLURALS[scene.things]}"


def _draw_board(canvas: Canvas, scene: Scene, left: int) -> None:
    """Draw the board, 170 pixels wide, with the word in its middle."""
    fill, middle = COLOURS[scene.colour], left + 85
    if scene.board == "sign":
        canvas.box((middle - 5, 150, middle + 5, 280), "#5a5a5a")
        canvas.box((left, 80, left + 170, 160), fill, "#303030", round_by=12)
        at = (middle, 120)
    elif scene.board == "truck":
        canvas.box((left, 150, left + 126, 250), fill, "#303030")
        canvas.box((left + 128, 180, left + 170, 250), "#8f979f", "#303030", round_by=6)
        canvas.box((left + 142, 188, left + 164, 212), "#e8f2fa", "#303030")
        for x in (left + 30, left + 148):
            canvas.ellipse((x - 18, 234, x + 18, 270), "#202020")
            canvas.ellipse((x - 7, 245, x + 7, 259), "#b0b0b0")
        at = (left + 63, 194)
    else:
        canvas.box((left + 10, 170, left + 160, 280), fill, "#303030")
        canvas.line([(left + 10, 192), (left + 160, 192)], 2, "#303030")
        at = (middle, 236)
    canvas.text(at, scene.word, 26, align="center", ink="#ffffff")


def _draw_thing(canvas: Canvas, thing: str, left: int) -> None:
    """Draw a thing, 60 pixels wide, at the front of the ground."""
    if thing == "house":
        canvas.box((left + 4, 200, left + 56, 268), "#f2ead8", "#505050")
        canvas.polygon([(left, 200), (left + 30, 160), (left + 60, 200)], "#8c4632")
        canvas.box((left + 22, 236, left + 38, 268), "#6b4a2f")
    elif thing == "tree":
        canvas.box((left + 25, 220, left + 35, 270), "#6b4a2f")
        canvas.ellipse((left + 4, 150, left + 56, 230), "#3f7f45")
    else:
        canvas.ellipse((left + 8, 226, left + 52, 270), "#e0a030", "#7a5512")
        canvas.line([(left + 9, 248), (left + 51, 248)], 2, "#7a5512")
