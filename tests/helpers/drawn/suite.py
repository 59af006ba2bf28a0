"""The drawn suite: six small sets in the formats of chartqa, docvqa, ai2d, textcaps, textvqa and CORD-V2.

Each set is for one metric: relaxed accuracy, ANLS, multiple choice, captions, VQA accuracy over ten annotators, trees
of a receipt. A picture shows the facts that its questions ask about as printed lines, above bars of random colours. A
row depends only on the seed, its set and its number.

The wording is that of the_cauldron: a short question ends with a line that asks for a short answer; an answer begins
with a capital and ends with a full stop, also a number: "14.". So a metric has to cope with it.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dataset_builders.sources.cord_target import Tree, to_json
from dataset_builders.sources.cord_v2 import PROMPTS, SPLITS, SourceSplit
from tests.helpers.drawn_pictures import encoded

Row = dict[str, list[dict[str, object]]]
CordRow = dict[str, object]
# A question, the answer that is trained on, and all right answers if there is more than one, with repeats.
Asked = tuple[str, str, Sequence[str]]
Drawn = tuple[list[str], list[Asked], str]  # printed lines, questions, the set's name in the_cauldron

SHORTLY = ("Give a very brief answer.", "Answer briefly.", "Short answer required.", "Keep it brief.")
CITIES = ("Oslo", "Rome", "Paris", "Cairo", "Lima", "Delhi", "Tokyo", "Quito")
NAMES = ("Ada Berg", "Noor Castro", "Mika Dahl", "Lena Evans", "Omar Farah", "Ruth Grant", "Jonas Hoang", "Vera Ito")
GOODS = ("Desk lamp", "Paper tray", "Wall clock", "Ladder", "Tool box", "Door handle", "Shelf board", "Rope")
LAYERS = ("Topsoil", "Clay", "Sand", "Gravel", "Chalk", "Bedrock", "Coal", "Marl")
WORDS = ("OPEN", "CLOSED", "EXIT", "TAXI", "BAKERY", "SALE", "CAFE", "HOTEL", "STOP", "MUSEUM", "BANK", "ZOO")
COLOURS = ("red", "blue", "green", "purple", "brown")
NUMBERS = {2: "two", 3: "three", 4: "four"}
HASTY = ("unanswerable", "answering does not require reading text in the image")


def draw(lines: Sequence[str], rng: np.random.Generator) -> bytes:
    """Return a PNG of the lines in Pillow's own font, whatever fonts and layout engines are installed."""
    image = Image.new("RGB", (440, 30 * len(lines) + 130), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=18)
    for place, line in enumerate(lines):
        pen.text((20, 15 + 30 * place), line, fill="#202020", font=font)
    for left, (height, *colour) in zip(range(20, 420, 50), rng.integers(20, 100, (8, 4)).tolist()):
        pen.rectangle((left, image.height - 10 - height, left + 40, image.height - 10), tuple(2 * c for c in colour))
    return encoded(image)


def sentence(text: str) -> str:
    """Return the_cauldron's form of an answer."""
    text = text.capitalize() if text[:1].islower() else text
    return text if text.endswith(".") else text + "."


def chart(rng: np.random.Generator) -> Drawn:
    """Return values of cities, with questions about one, two or all of them."""
    cities = rng.permutation(CITIES)[: rng.integers(4, 8)].tolist()
    unit = str(rng.choice(["", "%"]))
    value = dict(zip(cities, rng.permutation(np.arange(5, 96))[: len(cities)].tolist()))
    one, other = cities[:2]
    high, low = max(value, key=value.get), min(value, key=value.get)
    questions = {
        f"What is the value of {one}?": f"{value[one]}{unit}",
        "Which city has the highest value?": high,
        f"What is the sum of {one} and {other}?": f"{value[one] + value[other]}{unit}",
        "What is the difference between the highest and the lowest value?": f"{value[high] - value[low]}{unit}",
        "How many values does the chart show?": str(len(value)),
        f"Is the value of {one} higher than that of {other}?": "Yes" if value[one] > value[other] else "No",
    }
    asked = [(shortly(question, rng), sentence(answer), ()) for question, answer in questions.items()]
    return ["Visitors by city", *(f"{city}: {n}{unit}" for city, n in value.items())], some(asked, rng), "ChartQA"


def page(rng: np.random.Generator) -> Drawn:
    """Return an invoice, whose questions are answered by a span of it. A name is right with and without its title."""
    number, day = f"INV-{rng.integers(1000, 9999)}", f"{rng.integers(1, 29)} March 2024"
    name, goods = str(rng.choice(NAMES)), rng.permutation(GOODS)[:3].tolist()
    cents = rng.integers(500, 30_000, 3).tolist()
    amounts = [f"${value / 100:,.2f}" for value in (*cents, sum(cents))]
    lines = [f"Invoice No. {number}", f"Date: {day}", f"Bill to: Dr. {name}"]
    lines += [f"{item}: {amount}" for item, amount in zip([*goods, "Total due"], amounts)]
    questions = {
        "What is the invoice number?": [number],
        "What is the date of the invoice?": [day],
        "To whom is the invoice addressed?": [f"Dr. {name}", name],
        "What is the total amount due?": [amounts[-1]],
        f"What is the amount for the item {goods[0]}?": [amounts[0]],
    }
    asked = []
    for question, answers in questions.items():
        right = [sentence(answer) for answer in answers]
        asked.append((shortly(question, rng), right[0], right if len(right) > 1 else ()))
    return lines, some(asked, rng), "DocVQA"


def diagram(rng: np.random.Generator) -> Drawn:
    """Return layers from the top down, with questions that have four choices."""
    order = rng.permutation(LAYERS).tolist()
    labels, others = order[:5], order[5:]
    asked = []
    for above, below in itertools.pairwise(labels):
        wrong = [label for label in labels if label not in (above, below)] + others
        choices = rng.permutation([below, *wrong[:3]]).tolist()
        listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices))
        question = f"Question: Which layer lies directly below {above}?\nChoices:\n{listed}\nAnswer with the letter."
        asked.append((question, f"Answer: {'ABCD'[choices.index(below)]}", ()))
    return ["Layers of the ground", *labels], some(asked, rng), "AI2D"


def scene(rng: np.random.Generator) -> tuple[str, str, int]:
    """Return the word on a sign, the sign's colour, and the number of trees beside it."""
    return str(rng.choice(WORDS)), str(rng.choice(COLOURS)), int(rng.integers(2, 5))


def captioned(rng: np.random.Generator) -> Drawn:
    """Return a scene with five captions, the first of which is trained on."""
    word, colour, count = scene(rng)
    trees = f"{NUMBERS[count]} trees"
    captions = [
        f"A {colour} sign that says {word} stands to the left of {trees}.",
        f"The word {word} is printed on a {colour} sign next to {trees}.",
        f"{trees.capitalize()} are to the right of a {colour} sign with the word {word}.",
        f"A {colour} sign reads {word}.",
        f"There is a {colour} sign with {word} written on it and {trees} beside it.",
    ]
    prompt = str(rng.choice(["Caption this image.", "Provide a caption for this picture."]))
    return [f"{word} ({colour})", trees], [(prompt, captions[0], captions)], "TextCaps"


def annotated(rng: np.random.Generator) -> Drawn:
    """Return a scene with ten annotators' answers: at least seven are right, in two forms, the others hasty."""
    word, colour, count = scene(rng)
    questions = {
        "What does the sign say?": (word.lower(), word),
        "What colour is the sign?": (colour, colour.capitalize()),
        "How many trees are there?": (str(count), NUMBERS[count]),
    }
    question = str(rng.choice(list(questions)))
    usual, rare = questions[question]
    agreeing, rarely = int(rng.integers(7, 11)), int(rng.integers(0, 3))
    answers = [usual] * (agreeing - rarely) + [rare] * rarely + rng.choice(HASTY, 10 - agreeing).tolist()
    answers = rng.permutation(answers).tolist()
    learnt = Counter(answers).most_common(1)[0][0]
    return [f"{word} ({colour})", f"{count} trees"], [(shortly(question, rng), sentence(learnt), answers)], "TextVQA"


def slip(rng: np.random.Generator) -> tuple[list[str], dict[str, Tree]]:
    """Return the lines of a receipt, and its parse in CORD's form: a menu of one item is the item and not a list."""
    menu, lines, total = [], [str(rng.choice(WORDS))], 0
    for name in rng.permutation(GOODS)[: rng.integers(1, 5)].tolist():
        count, price = int(rng.integers(1, 13)), 500 * int(rng.integers(4, 150))
        item: dict[str, Tree] = {"nm": name, "cnt": str(count), "price": f"{count * price:,}"}
        lines.append(f"{count} x {name}   {item['price']}")
        total += count * price
        if rng.random() < 0.3:
            item["sub"] = {"nm": "Delivery", "price": "5,000"}
            lines.append("Delivery   5,000")
            total += 5000
        menu.append(item)
    parse: dict[str, Tree] = {"menu": menu if len(menu) > 1 else menu[0], "total": {"total_price": f"{total:,}"}}
    return [*lines, f"Total   {total:,}"], parse


def receipt(rng: np.random.Generator) -> Drawn:
    lines, parse = slip(rng)
    return lines, [(PROMPTS["json"], to_json(parse), ())], "CORD-v2"


def shortly(question: str, rng: np.random.Generator) -> str:
    return f"{question}\n{rng.choice(SHORTLY)}"


def some(asked: Sequence[Asked], rng: np.random.Generator) -> list[Asked]:
    return [asked[i] for i in rng.permutation(len(asked))[: rng.integers(1, 3)]]


# subset -> what a row of it shows; the place in this table is part of a row's seed, so new subsets are appended
_SETS: dict[str, Callable[[np.random.Generator], Drawn]] = {
    "chartqa": chart,
    "docvqa": page,
    "ai2d": diagram,
    "textcaps": captioned,
    "textvqa": annotated,
    "cord_v2": receipt,
}
SUBSETS = tuple(_SETS)
_CORD_SHARES = {"train": 0.8, "validation": 0.1}  # as in CORD-V2; the test split is the rest


def iter_suite_rows(seed: int, counts: Mapping[str, int]) -> Iterator[tuple[str, Row]]:
    """Yield (subset, row) in the order of SUBSETS, in the_cauldron's schema with an additional list of references.

    Args:
        counts: number of rows of each subset; a subset that is not named has no rows.
    """
    for stream, subset in enumerate(SUBSETS):
        for number in range(counts.get(subset, 0)):
            rng = np.random.default_rng([seed, stream, number])
            lines, asked, source = _SETS[subset](rng)
            image = {"bytes": draw(lines, rng), "path": None}
            texts = [
                {"user": question, "assistant": answer, "source": source, "references": list(references) or None}
                for question, answer, references in asked
            ]
            yield subset, {"images": [image], "texts": texts}


def iter_cord_splits(seed: int, count: int) -> Iterator[tuple[SourceSplit, CordRow]]:
    """Yield (split, row) of `count` receipts in CORD-V2's schema: 80 % train, 10 % validation, 10 % test."""
    left = count
    for split in SPLITS:
        share = min(left, round(count * _CORD_SHARES[split])) if split in _CORD_SHARES else left
        left -= share
        for number in range(share):
            rng = np.random.default_rng([seed, len(_SETS), SPLITS.index(split), number])
            lines, parse = slip(rng)
            truth = json.dumps({"gt_parse": parse, "meta": {}})
            yield split, {"image": {"bytes": draw(lines, rng), "path": None}, "ground_truth": truth}
