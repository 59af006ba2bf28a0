"""Pages with printed fields and questions that a span of the page answers: rows in the shape of docvqa.

    an invoice, a letter or a staff table; names, dates, numbers and amounts from lists and the seed
    "What is the invoice number?\\nAnswer briefly."          "INV-4821."
    "To whom is the letter addressed?\\nKeep it brief."      "Ms. Ada Berg."  references: "Ms. Ada Berg.", "Ada Berg."

Every answer less its full stop stands on the page as it is, in one printed line.
"""

from collections.abc import Callable, Iterator

import numpy as np

from tests.helpers.drawn.canvas import Canvas
from tests.helpers.drawn.rows import Asked, Row, cauldron_row, choose, row_streams, sample_of, sentence, shortly

Question = tuple[str, tuple[str, ...]]  # a question and its right answers; the first one is trained on
Page = tuple[Canvas, list[Question]]

COMPANIES = ("Harbour Lamps Ltd", "Berg and Sons", "Northern Paper Co", "Green Valley Tools", "Old Mill Bakery")
CITIES = ("Oslo", "Leeds", "Turin", "Basel", "Porto", "Ghent", "Malmo", "Graz")
STREETS = ("Mill Road", "Station Street", "King Square", "Park Lane", "River Walk")
FIRST_NAMES = ("Ada", "Noor", "Mika", "Lena", "Omar", "Ruth", "Jonas", "Vera")
LAST_NAMES = ("Berg", "Castro", "Dahl", "Evans", "Farah", "Grant", "Hoang", "Ito")
ITEMS = ("Desk lamp", "Paper tray", "Wall clock", "Ladder", "Tool box", "Door handle", "Shelf board", "Rope")
ROLES = ("Sales Manager", "Head of Stores", "Chief Clerk", "Director")
DEPARTMENTS = ("Accounts", "Stores", "Design", "Transport", "Research")
_MONTHS = ("January", "March", "April", "June", "August", "October", "December")
_WIDTH = 440


def iter_page_rows(seed: int, stream: int) -> Iterator[Row]:
    """Yield an endless sequence of pages, each with two or three questions."""
    for rng in row_streams(seed, stream):
        canvas, questions = make_page(rng)
        asked = [_asked(question, rng) for question in sample_of(rng, questions, int(rng.integers(2, 4)))]
        yield cauldron_row(canvas, asked, "DocVQA")


def make_page(rng: np.random.Generator) -> Page:
    """Return a drawn page and all questions that can be asked about it."""
    makers: tuple[Callable[[np.random.Generator], Page], ...] = (_invoice, _letter, _staff_table)
    return choose(rng, makers)(rng)


def _asked(question: Question, rng: np.random.Generator) -> Asked:
    text, answers = question
    right = tuple(sentence(answer) for answer in answers)
    return Asked(question=shortly(text, rng), answer=right[0], references=right if len(right) > 1 else ())


def _invoice(rng: np.random.Generator) -> Page:
    company, city = choose(rng, COMPANIES), choose(rng, CITIES)
    number, day, due = f"INV-{rng.integers(1000, 9999)}", _date(rng), _date(rng, 2025)
    buyer = _name(rng)
    cents = [int(rng.integers(500, 30_000)) for _ in range(int(rng.integers(2, 5)))]
    items = list(zip(sample_of(rng, ITEMS, len(cents)), (int(rng.integers(1, 13)) for _ in cents), cents))
    canvas = Canvas(_WIDTH, 320 + 28 * len(items))
    canvas.text((28, 36), company, 24)
    canvas.text((28, 64), f"{rng.integers(1, 90)} {choose(rng, STREETS)}, {city}", 14)
    canvas.text((412, 36), "INVOICE", 22, align="right")
    canvas.line([(28, 86), (412, 86)], 2)
    for i, (label, value) in enumerate((("Invoice No.", number), ("Date", day), ("Due date", due), ("Bill to", buyer))):
        canvas.text((28, 112 + 28 * i), label, 15)
        canvas.text((140, 112 + 28 * i), value, 15)
    bottom = _table(canvas, 236, ("Item", "Quantity", "Amount"), [(n, str(c), _money(v)) for n, c, v in items])
    canvas.text((300, bottom + 30), "Total due", 16, align="right")
    canvas.text((412, bottom + 30), _money(sum(cents)), 18, align="right")
    return canvas, [
        ("What is the invoice number?", (number,)),
        ("What is the date of the invoice?", (day,)),
        ("By which date is the invoice due?", (due,)),
        ("To whom is the invoice addressed?", (buyer, _without_title(buyer))),
        ("Which company sent the invoice?", (company,)),
        ("What is the total amount due?", (_money(sum(cents)),)),
        *((f"What is the amount for the item {name}?", (_money(value),)) for name, _, value in items),
    ]


def _letter(rng: np.random.Generator) -> Page:
    company, day, reader, role = choose(rng, COMPANIES), _date(rng), _name(rng), choose(rng, ROLES)
    writer = f"{choose(rng, FIRST_NAMES)} {choose(rng, LAST_NAMES)}"
    order, parcels, sent = (
        f"{rng.integers(100, 999)}/{choose(rng, 'ABCDEF')}",
        str(rng.integers(2, 40)),
        _date(rng, 2025),
    )
    canvas = Canvas(_WIDTH, 430)
    canvas.text((220, 38), company, 26, align="center")
    canvas.text((220, 68), f"{rng.integers(1, 90)} {choose(rng, STREETS)}, {choose(rng, CITIES)}", 14, align="center")
    canvas.line([(28, 90), (412, 90)], 2)
    canvas.text((412, 118), day, 15, align="right")
    canvas.text((28, 150), reader, 15)
    canvas.text((28, 172), choose(rng, CITIES), 15)
    lines = (
        f"We thank you for your order {order}.",
        f"It fills {parcels} parcels, which leave our house on",
        f"{sent}.",
    )
    for i, line in enumerate((f"Dear {reader},", *lines, "Yours faithfully,")):
        canvas.text((28, (214, 244, 268, 292, 328)[i]), line, 16)
    canvas.text((28, 372), writer, 20)
    canvas.text((28, 398), role, 15)
    return canvas, [
        ("What is the date of the letter?", (day,)),
        ("To whom is the letter addressed?", (reader, _without_title(reader))),
        ("Who signed the letter?", (writer,)),
        ("What is the position of the person who signed?", (role,)),
        ("Which order is the letter about?", (order,)),
        ("How many parcels are there?", (parcels,)),
        ("On which date do the parcels leave?", (sent,)),
    ]


def _staff_table(rng: np.random.Generator) -> Page:
    count = int(rng.integers(3, 6))
    names = sample_of(rng, [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES], count)
    phones = sample_of(rng, [str(number) for number in range(200, 900)], count)
    rows = [(name, choose(rng, DEPARTMENTS), phone) for name, phone in zip(names, phones)]
    company, day = choose(rng, COMPANIES), _date(rng)
    canvas = Canvas(_WIDTH, 210 + 28 * count)
    canvas.text((28, 36), "Telephone list", 24)
    canvas.text((28, 68), company, 16)
    canvas.text((412, 68), day, 15, align="right")
    bottom = _table(canvas, 108, ("Name", "Department", "Extension"), rows)
    editor = f"{choose(rng, FIRST_NAMES)} {choose(rng, LAST_NAMES)}"
    canvas.text((28, bottom + 36), f"Changes to: {editor}", 15)
    return canvas, [
        ("Which company is the list of?", (company,)),
        ("What is the date of the list?", (day,)),
        ("To whom are changes told?", (editor,)),
        *((f"What is the extension of {name}?", (phone,)) for name, _, phone in rows),
        *((f"In which department does {name} work?", (place,)) for name, place, _ in rows),
    ]


def _table(canvas: Canvas, top: int, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> int:
    """Draw three columns with 28 pixels per line. Return the y position of the table's end."""
    canvas.box((28, top - 14, 412, top + 14), "#e4e8ee")
    for i, row in enumerate((heads, *rows)):
        y = top + 28 * i
        canvas.text((36, y), row[0], 15)
        canvas.text((220, y), row[1], 15)
        canvas.text((404, y), row[2], 15, align="right")
        canvas.line([(28, y + 14), (412, y + 14)], 1, "#a0a8b4")
    return top + 28 * len(rows) + 14


def _name(rng: np.random.Generator) -> str:
    return f"{choose(rng, ('Ms.', 'Mr.', 'Dr.'))} {choose(rng, FIRST_NAMES)} {choose(rng, LAST_NAMES)}"


def _without_title(name: str) -> str:
    return name.split(" ", 1)[1]


def _date(rng: np.random.Generator, year: int = 2024) -> str:
    return f"{rng.integers(1, 29)} {choose(rng, _MONTHS)} {year}"


def _money(cents: int) -> str:
    return f"${cents / 100:,.2f}"
