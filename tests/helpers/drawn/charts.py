"""Charts with printed values and questions whose answers can be computed: rows in the shape of chartqa.

    bar, line or pie; four to seven labels; whole numbers, tenths or per cent, all different
    "Which city has the highest value?\\nAnswer briefly."   "Oslo."
    "What is the difference between the highest and the lowest value?\\nKeep it brief."   "14.5."

The other questions: the value of a label, the sum of two labels, how many labels there are, and which of two is higher.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.helpers.drawn.canvas import PAPER, Canvas
from tests.helpers.drawn.rows import Asked, Row, cauldron_row, choose, row_streams, sample_of, sentence, shortly

COLOURS = ("#3b6fb6", "#d1495b", "#3a8f5c", "#b36a1e", "#7a4fa3", "#2a8c8c", "#8a5a44")
_TOPICS = (
    ("Visitors by city", "city", ("Oslo", "Rome", "Paris", "Cairo", "Lima", "Delhi", "Tokyo", "Quito")),
    ("Fruit sold", "fruit", ("Apple", "Pear", "Plum", "Cherry", "Lemon", "Fig", "Melon", "Grape")),
    ("Rain by month", "month", ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug")),
    ("Books lent by day", "day", ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")),
    ("Trees by kind", "kind", ("Oak", "Pine", "Birch", "Maple", "Beech", "Elm", "Ash")),
    ("Sales by shop", "shop", ("North", "South", "East", "West", "Harbour", "Station", "Market")),
)
_MIN_SLICE = 8  # per cent; the smallest slice still has room for its value
_PLOT = (44, 60, 436, 300)  # left, top, right, bottom of the axes
_SIZE = (460, 340)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """The content of a chart.

    Attributes:
        noun: what a label is: city, month.
        tenths: the value of each label, in tenths, all different.
        form: the format in which values are printed.
    """

    kind: Literal["bar", "line", "pie"]
    title: str
    noun: str
    labels: tuple[str, ...]
    tenths: tuple[int, ...]
    form: Literal["whole", "tenths", "percent"]

    def printed(self, tenths: int) -> str:
        """Return a value, a sum or a difference as this chart prints it."""
        if self.form == "tenths":
            return f"{tenths / 10:.1f}"
        return f"{tenths // 10}%" if self.form == "percent" else str(tenths // 10)


def iter_chart_rows(seed: int, stream: int) -> Iterator[Row]:
    """Yield an endless sequence of charts, each with one or two questions."""
    for rng in row_streams(seed, stream):
        chart = make_chart(rng)
        yield cauldron_row(draw_chart(chart), ask_about_chart(chart, rng), "ChartQA")


def make_chart(rng: np.random.Generator) -> Chart:
    title, noun, pool = choose(rng, _TOPICS)
    kind = choose(rng, ("bar", "line", "pie"))
    labels = sample_of(rng, pool, int(rng.integers(4, 6 if kind == "pie" else 8)))
    if noun in ("month", "day"):
        labels.sort(key=pool.index)
    if kind == "pie":
        form, tenths = "percent", _shares(rng, len(labels))
    else:
        form = choose(rng, ("whole", "tenths", "percent"))
        highest, step = (400, 1) if form == "tenths" else (96, 10)
        tenths = tuple(step * int(v) for v in rng.permutation(np.arange(5, highest))[: len(labels)])
    return Chart(kind=kind, title=title, noun=noun, labels=tuple(labels), tenths=tenths, form=form)


def ask_about_chart(chart: Chart, rng: np.random.Generator) -> list[Asked]:
    """Return one or two questions of different kinds."""
    possible = _questions(chart, rng)
    return [
        Asked(question=shortly(q, rng), answer=sentence(a)) for q, a in sample_of(rng, possible, rng.integers(1, 3))
    ]


def draw_chart(chart: Chart) -> Canvas:
    canvas = Canvas(*_SIZE)
    unit = " (%)" if chart.form == "percent" else ""
    canvas.text((_SIZE[0] / 2, 24), chart.title + unit, 20, align="center")
    if chart.kind == "pie":
        _draw_pie(canvas, chart)
        return canvas
    left, top, right, bottom = _PLOT
    canvas.line([(left, top), (left, bottom), (right, bottom)], 2)
    places = [left + (right - left) * (i + 0.5) / len(chart.labels) for i in range(len(chart.labels))]
    floor = bottom if chart.kind == "bar" else bottom - 28  # there is room for the value below a low point
    heights = [floor - (floor - top - 24) * value / max(chart.tenths) for value in chart.tenths]
    for x, label in zip(places, chart.labels):
        canvas.text((x, bottom + 18), label, 14, align="center")
    draw = _draw_bars if chart.kind == "bar" else _draw_line
    draw(canvas, chart, places, heights)
    return canvas


def _shares(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    """Return shares in tenths of a per cent. They are whole per cents, all different, and their sum is 100."""
    while True:
        cuts = np.sort(rng.permutation(np.arange(1, 100))[: count - 1])
        shares = np.diff([0, *cuts, 100])
        if min(shares) >= _MIN_SLICE and len(set(shares)) == count:
            return tuple(10 * int(share) for share in shares)


def _questions(chart: Chart, rng: np.random.Generator) -> list[tuple[str, str]]:
    value = dict(zip(chart.labels, chart.tenths))
    one, other = sample_of(rng, chart.labels, 2)
    highest, lowest = max(value, key=value.get), min(value, key=value.get)
    return [
        (f"What is the value of {one}?", chart.printed(value[one])),
        (f"Which {chart.noun} has the highest value?", highest),
        (f"Which {chart.noun} has the lowest value?", lowest),
        (f"What is the sum of {one} and {other}?", chart.printed(value[one] + value[other])),
        (
            "What is the difference between the highest and the lowest value?",
            chart.printed(value[highest] - value[lowest]),
        ),
        ("How many values does the chart show?", str(len(value))),
        (f"Is the value of {one} higher than that of {other}?", "Yes" if value[one] > value[other] else "No"),
    ]


def _draw_bars(canvas: Canvas, chart: Chart, places: list[float], heights: list[float]) -> None:
    half = 0.32 * (_PLOT[2] - _PLOT[0]) / len(places)
    for i, (x, y) in enumerate(zip(places, heights)):
        canvas.box((round(x - half), round(y), round(x + half), _PLOT[3] - 1), COLOURS[i % len(COLOURS)])
        canvas.text((x, y - 12), chart.printed(chart.tenths[i]), 14, align="center")


def _draw_line(canvas: Canvas, chart: Chart, places: list[float], heights: list[float]) -> None:
    canvas.line(list(zip(places, heights)), 3, COLOURS[0])
    for x, y in zip(places, heights):
        canvas.ellipse((x - 5, y - 5, x + 5, y + 5), COLOURS[0])
    for i, (x, y) in enumerate(zip(places, heights)):
        rises_left = i > 0 and heights[i - 1] < y
        rises_right = i + 1 < len(heights) and heights[i + 1] < y
        aside = 17 * (rises_left - rises_right)  # on the side where the line leaves room
        below = (rises_left and rises_right) or (i == 0 and rises_right)
        at = (x, y + 16) if below else (x + aside, y - 14)
        canvas.text(at, chart.printed(chart.tenths[i]), 14, align="center", paper=PAPER)


def _draw_pie(canvas: Canvas, chart: Chart) -> None:
    x, y, radius, angle = 150, 190, 120, -90.0
    for i, (label, share) in enumerate(zip(chart.labels, chart.tenths)):
        turn = 0.36 * share
        canvas.slice((x - radius, y - radius, x + radius, y + radius), angle, angle + turn, COLOURS[i])
        middle = math.radians(angle + turn / 2)
        at = (x + 0.68 * radius * math.cos(middle), y + 0.68 * radius * math.sin(middle))
        canvas.text(at, chart.printed(share), 15, align="center", ink="#ffffff")
        line = 120 + 32 * i
        canvas.box((316, line - 8, 332, line + 8), COLOURS[i])
        canvas.text((342, line), label, 16)
        angle += turn
