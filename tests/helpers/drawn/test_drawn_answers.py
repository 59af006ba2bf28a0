"""Answers about drawn images, found again from the printed and painted pixels and not from the drawing's input."""

import io
import itertools
import json
import math
import re
from collections import Counter
from decimal import Decimal

import numpy as np
import pytest
from PIL import Image

from dataset_builders.sources.cord_target import from_json
from tests.helpers.drawn.charts import ask_about_chart, draw_chart, iter_chart_rows, make_chart
from tests.helpers.drawn.diagrams import draw_diagram, iter_diagram_rows, make_diagram
from tests.helpers.drawn.pages import make_page
from tests.helpers.drawn.receipts import draw_receipt, iter_cord_rows, iter_receipt_rows, make_receipt, parse_of
from tests.helpers.drawn.rows import row_streams
from tests.helpers.drawn.scenes import (
    COLOURS,
    draw_scene,
    iter_annotated_rows,
    iter_caption_rows,
    make_scene,
    questions_about,
)


def streams(count, stream=0):
    return itertools.islice(row_streams(5, stream), count)


def pixels(canvas):
    return np.asarray(Image.open(io.BytesIO(canvas.png())))


def middle(text):
    left, top, right, bottom = text.box
    return (left + right) / 2, (top + bottom) / 2


def number(text):
    return Decimal(text.strip("%$").replace(",", ""))


def printed_values(chart):
    """Return label -> the value printed for it, by the positions of the two on the sheet."""
    canvas = draw_chart(chart)
    texts = canvas.texts[1:]  # the title comes first
    values = [text for text in texts if re.fullmatch(r"[\d.]+%?", text.text)]
    labels = [text for text in texts if text not in values]
    assert len(values) == len(labels)
    if chart.kind == "pie":
        picture = pixels(canvas)
        slices = {tuple(picture[round(v.box[1]) - 3, round(v.box[0]) - 3]): v.text for v in values}
        squares = {tuple(picture[round(middle(label)[1]), 324]): label.text for label in labels}
        assert len(slices) == len(values) and slices.keys() == squares.keys()
        return {squares[colour]: number(slices[colour]) for colour in squares}
    nearest = {label.text: min(values, key=lambda v: abs(middle(v)[0] - middle(label)[0])).text for label in labels}
    assert len(set(nearest.values())) == len(nearest)
    return {label: number(text) for label, text in nearest.items()}


def chart_answer(question, values):
    names = [name for name in re.findall(r"[A-Z][a-z]+", question) if name in values]
    if "highest and the lowest" in question:
        return max(values.values()) - min(values.values())
    if "highest value" in question or "lowest value" in question:
        return (max if "highest" in question else min)(values, key=values.get)
    if "How many" in question:
        return Decimal(len(values))
    if "higher than" in question:
        return "Yes" if values[names[0]] > values[names[1]] else "No"
    return sum(values[name] for name in names)


def test_charts():
    kinds, forms = Counter(), Counter()
    for rng in streams(60):
        chart = make_chart(rng)
        values = printed_values(chart)
        kinds[chart.kind] += 1
        for asked in ask_about_chart(chart, rng):
            question, line = asked.question.split("\n")
            right = chart_answer(question, values)
            assert line.endswith(".") and asked.answer.endswith(".") and not asked.references
            answer = asked.answer[:-1]
            assert (number(answer) if isinstance(right, Decimal) else answer) == right, (question, values)
            if isinstance(right, Decimal) and "How many" not in question:
                assert answer.endswith("%") == (chart.form == "percent")
            forms[type(right)] += 1
    assert min(kinds[kind] for kind in ("bar", "line", "pie")) > 10 and len(forms) == 2
    (row,) = itertools.islice(iter_chart_rows(5, 0), 1)
    assert row["texts"][0]["source"] == "ChartQA" and row["texts"][0]["references"] is None


def test_bars_are_as_high_and_slices_as_large_as_their_values():
    for rng in streams(30, 1):
        chart = make_chart(rng)
        if chart.kind == "line":
            continue
        picture = pixels(draw_chart(chart)).reshape(-1, 3).astype(np.int64)
        colours, sizes = np.unique(picture @ [1 << 16, 1 << 8, 1], return_counts=True)
        is_bright = np.ptp(colours[:, None] >> np.array([16, 8, 0]) & 255, axis=1) > 40
        painted = np.sort(sizes[is_bright])[: -len(chart.labels) - 1 : -1]
        values = sorted(chart.tenths, reverse=True)
        shares = [value / sum(values) for value in values]
        assert np.allclose(painted / painted.sum(), shares, atol=0.02), chart


def order_of(diagram):
    """Return the labels in reading order: along the arrows, or from the top down."""
    canvas = draw_diagram(diagram)
    labels = canvas.texts[1:]
    if diagram.kind == "chain":
        return [t.text for t in sorted(labels, key=lambda t: t.box[0])]
    if diagram.kind == "layers":
        return [t.text for t in sorted(labels, key=lambda t: t.box[1])]
    x, y = np.mean([middle(text) for text in labels], axis=0)
    turn = {t.text: math.atan2(middle(t)[0] - x, y - middle(t)[1]) % (2 * math.pi) for t in labels}  # clockwise
    return sorted(turn, key=lambda name: (turn[name] + 0.2) % (2 * math.pi))


def diagram_answer(question, order):
    found = [name for name in order if re.search(rf"\b{name}\b", question)]
    if not found:
        return order[0] if re.search("producer|top", question) else order[-1]
    step = 1 if re.search("after|below|organism eats", question) else -1
    return order[(order.index(found[0]) + step) % len(order)]


def test_diagrams():
    letters = Counter()
    for i, row in enumerate(itertools.islice(iter_diagram_rows(5, 0), 60)):
        order = order_of(make_diagram(np.random.default_rng([5, 0, i])))
        for text in row["texts"]:
            form = r"Question: (.+\?)\nChoices:\nA\. (.+)\nB\. (.+)\nC\. (.+)\nD\. (.+)\nAnswer with the letter\."
            question, *choices = re.fullmatch(form, text["user"]).groups()
            letter = re.fullmatch("Answer: ([A-D])", text["assistant"])[1]
            letters[letter] += 1
            assert len(set(choices)) == 4
            assert choices["ABCD".index(letter)] == diagram_answer(question, order), (question, order)
            assert not any(re.search(rf"\b{choice}\b", question) for choice in choices)
    assert len(letters) == 4 and max(letters.values()) < 2 * min(letters.values()) + 10


def beside(canvas, label):
    """Return the texts on the same line as this text."""
    (mark,) = [text for text in canvas.texts if text.text == label]
    line = [t for t in canvas.texts if t is not mark and abs(middle(t)[1] - middle(mark)[1]) < 6]
    return [t.text for t in sorted(line, key=lambda t: t.box[0])]


BESIDE = {
    "What is the invoice number?": ("Invoice No.", 0),
    "What is the date of the invoice?": ("Date", 0),
    "By which date is the invoice due?": ("Due date", 0),
    "To whom is the invoice addressed?": ("Bill to", 0),
    "What is the total amount due?": ("Total due", -1),
}
NAMED = r"What is the (?:amount for the item|extension of) (.+)\?|In which department does (.+) work\?"


def test_pages():
    titles, read = Counter(), 0
    for rng in streams(60):
        canvas, questions = make_page(rng)
        printed = [text.text for text in canvas.texts]
        titles[next((t for t in ("INVOICE", "Telephone list") if t in printed), "letter")] += 1
        assert len({question for question, _ in questions}) == len(questions)
        for question, answers in questions:
            assert all(any(answer in line for line in printed) for answer in answers)
            if question in BESIDE:
                label, place = BESIDE[question]
                assert beside(canvas, label)[place] == answers[0]
            elif found := re.fullmatch(NAMED, question):
                place = 0 if found[2] else -1
                assert beside(canvas, found[1] or found[2])[place] == answers[0]
                read += 1
        if "INVOICE" in printed:
            amounts = [number(answers[0]) for question, answers in questions if "for the item" in question]
            assert number(dict(questions)["What is the total amount due?"][0]) == sum(amounts)
    assert len(titles) == 3 and min(titles.values()) > 10 and read > 130


def runs_of(line, colour):
    """Return the number of separate stretches of a line of pixels that have this colour."""
    is_colour = (line == np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])).all(axis=1)
    return int(is_colour[0]) + int((is_colour[1:] & ~is_colour[:-1]).sum())


def seen(scene):
    """Return (word, colour, side, thing, number of things) from the painted image."""
    canvas = draw_scene(scene)
    (word,) = canvas.texts
    picture = pixels(canvas)
    x = middle(word)[0]
    name = {tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)): name for name, c in COLOURS.items()}
    colour = name[tuple(picture[round(word.box[1]) - 4, round(x)])]
    painted = {  # a row of pixels that crosses each thing once, and its colour there
        "house": runs_of(picture[220], "#f2ead8"),
        "tree": runs_of(picture[190], "#3f7f45"),
        "ball": runs_of(picture[235], "#e0a030"),
    }
    things = {thing: count for thing, count in painted.items() if count}
    assert len(things) == 1
    return word.text, colour, "left" if x < 240 else "right", *things.popitem()


NUMBERS = {"a": 1, "one": 1, "two": 2, "three": 3}


def test_captions():
    for i, row in enumerate(itertools.islice(iter_caption_rows(5, 0), 40)):
        word, colour, side, thing, count = seen(make_scene(np.random.default_rng([5, 0, i])))
        (text,) = row["texts"]
        assert len(set(text["references"])) == 5 and text["assistant"] == text["references"][0]
        for caption in text["references"]:
            assert word in caption and f"{colour} " in caption and caption.endswith(".")
        form = r"A (\w+) (?:sign|truck|box) that says (\w+) stands to the (\w+) of (\w+) (\w+?)s?\."
        found = re.fullmatch(form, text["assistant"]).groups()
        assert (*found[:3], NUMBERS[found[3]], found[4]) == (colour, word, side, count, thing)


def test_ten_annotators():
    kinds = Counter()
    for i, row in enumerate(itertools.islice(iter_annotated_rows(5, 0), 60)):
        scene = make_scene(np.random.default_rng([5, 0, i]))
        word, colour, side, _, count = seen(scene)
        (text,) = row["texts"]
        question = text["user"].split("\n")[0]
        kind = next(k for k in ("say", "colour", "How many", "side") if k in question)
        right = {"say": word.lower(), "colour": colour, "How many": str(count), "side": side}[kind]
        answers = text["references"]
        as_number = {"two": "2", "three": "3", "one": "1"}
        agreeing = [a for a in answers if as_number.get(a, a.lower().removeprefix("the ")) == right]
        assert len(answers) == 10 and len(agreeing) >= 7
        assert text["assistant"].lower() == f"{right}." and Counter(answers).most_common(1)[0][0] == right
        assert question in dict(questions_about(scene))
        kinds[kind] += 1
    assert len(kinds) == 4


def leaves(tree, path=()):
    if isinstance(tree, dict):
        return [leaf for key, inner in tree.items() for leaf in leaves(inner, (*path, key))]
    return [leaf for item in tree for leaf in leaves(item, path)] if isinstance(tree, list) else [(path, tree)]


def whole(text):
    return int(re.sub("[.,]", "", text))


def test_receipts_add_up():
    single, several = 0, 0
    for rng in streams(40):
        receipt = make_receipt(rng)
        parse = parse_of(receipt)
        menu = parse["menu"]
        single, several = single + isinstance(menu, dict), several + isinstance(menu, list)
        items = menu if isinstance(menu, list) else [menu]
        assert len(items) == len(receipt.items) and (len(items) > 1) == isinstance(menu, list)
        for item in items:
            if "unitprice" in item:
                assert whole(item["unitprice"]) * int(item["cnt"]) == whole(item["price"])
        sub_total, total = parse["sub_total"], parse["total"]
        prices = [whole(item["price"]) + whole(item.get("sub", {}).get("price", "0")) for item in items]
        assert sum(prices) == whole(sub_total["subtotal_price"])
        assert sum(whole(price) for price in sub_total.values()) == whole(total["total_price"])
        if "cashprice" in total:
            assert whole(total["cashprice"]) - whole(total["changeprice"]) == whole(total["total_price"])
        printed = Counter(text.text for text in draw_receipt(receipt)[0].texts)
        assert not Counter(value for _, value in leaves(parse)) - printed
    assert single > 3 and several > 10


def parse_of_lines(lines):
    """Return CORD's parse, rebuilt only from its valid_line."""
    groups, parse = {}, {}
    for line in lines:
        top, _, name = line["category"].partition(".")
        value = " ".join(word["text"] for word in line["words"] if not word["is_key"])
        if top != "menu":
            parse.setdefault(top, {})[name] = value
            continue
        item = groups.setdefault(line["group_id"], {})
        place = item.setdefault("sub", {}) if name.startswith("sub_") else item
        place[name.removeprefix("sub_")] = value
    menu = list(groups.values())
    return {"menu": menu if len(menu) > 1 else menu[0], **parse}


def test_cords_lines_say_the_parse_and_where_it_is_printed():
    for row in itertools.islice(iter_cord_rows(5, 0, "train"), 25):
        truth = json.loads(row["ground_truth"])
        assert parse_of_lines(truth["valid_line"]) == truth["gt_parse"]
        picture = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
        assert truth["meta"]["image_size"] == {"width": picture.shape[1], "height": picture.shape[0]}
        for word in (word for line in truth["valid_line"] for word in line["words"]):
            quad = word["quad"]
            inside = picture[quad["y1"] : quad["y3"], quad["x1"] : quad["x3"]]
            assert inside.min() < 90, "no ink where the word should be"


def test_a_receipt_in_either_schema_is_the_same():
    pairs = zip(itertools.islice(iter_receipt_rows(5, 0), 5), iter_cord_rows(5, 0, "test"))
    for row, cord in pairs:
        assert row["images"][0] == cord["image"]
        assert from_json(row["texts"][0]["assistant"]) == json.loads(cord["ground_truth"])["gt_parse"]


@pytest.mark.parametrize("rows_of", [iter_caption_rows, iter_annotated_rows])
def test_references_are_lists(rows_of):
    (row,) = itertools.islice(rows_of(5, 0), 1)
    assert isinstance(row["texts"][0]["references"], list)
