"""Till receipts and their parses: rows in the schema of CORD-V2, or the same receipts in the_cauldron's.

    a long narrow slip: menu items with count and price, some with a unit price or an option below them, subtotal,
    tax or service, total, cash and change
    ground_truth  {"gt_parse": {"menu": [{"nm": "Nasi Goreng", "cnt": "2", "price": "30.000"}, ...],
                                "sub_total": {"subtotal_price": ..., "tax_price": ...}, "total": {...}},
                   "meta": {...}, "valid_line": [{"words": [{"quad", "is_key", "row_id", "text"}], "category",
                   "group_id", "sub_group_id"}, ...], "roi": {}, "repeating_symbol": [], "dontcare": []}

As in CORD a menu of one item is the item itself, no list, and prices are text with the slip's own separator. Sums are
right: the prices make the subtotal, with tax and service the total, with the change the cash. Every leaf of the parse
is printed on the slip as it is, and `valid_line` says where.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dataset_builders.sources.cord_target import Tree, to_json
from dataset_builders.sources.cord_v2 import PROMPTS
from tests.helpers.drawn.canvas import Canvas, PrintedText
from tests.helpers.drawn.rows import Asked, Row, cauldron_row, choose, row_streams, sample_of

CordRow = dict[str, object]

_SHOPS = ("Warung Melati", "Kopi Pagi", "Toko Roti Jaya", "Dapur Ibu", "Bakmi Lestari")
_DISHES = ("Nasi Goreng", "Mie Ayam", "Sate Ayam", "Soto Betawi", "Gado Gado", "Teh Manis", "Es Jeruk", "Kopi Susu")
_OPTIONS = ("Extra Telur", "Tanpa Es", "Pedas", "Keju")
_WIDTH = 260
_LEFT, _RIGHT = 16, 244
_LINE = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A line of the menu. Prices are whole rupiah.

    Attributes:
        option: an option printed below the item, with its price; empty for none.
        shows_unit: whether the price of one unit is printed too.
    """

    name: str
    count: int
    unit_price: int
    option: str = ""
    option_price: int = 0
    shows_unit: bool = False

    @property
    def price(self) -> int:
        return self.count * self.unit_price


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The content of a slip. Prices are whole rupiah.

    Attributes:
        separator: the separator of thousands.
        tax, service, cash: 0 if the slip has no such line.
    """

    shop: str
    number: int
    separator: str
    items: tuple[Item, ...]
    tax: int
    service: int
    cash: int

    @property
    def subtotal(self) -> int:
        return sum(item.price + item.option_price for item in self.items)

    @property
    def total(self) -> int:
        return self.subtotal + self.tax + self.service

    def printed(self, price: int) -> str:
        return f"{price:,}".replace(",", self.separator)


@dataclass(frozen=True, slots=True)
class Field:
    """A part of the parse and its position on the slip.

    Attributes:
        category: category as in CORD's valid_line, for example "menu.nm".
        group: the line of the slip that the field belongs to.
        key: the word in front of the field, for example "TOTAL"; None if there is none.
    """

    category: str
    group: int
    value: PrintedText
    key: PrintedText | None = None


def iter_receipt_rows(seed: int, stream: int) -> Iterator[Row]:
    """Yield an endless sequence of receipts in the_cauldron's schema. The answer is the parse as JSON, and the question
    is that of the cord_v2 builder."""
    for rng in row_streams(seed, stream):
        receipt = make_receipt(rng)
        asked = Asked(question=PROMPTS["json"], answer=to_json(parse_of(receipt)))
        yield cauldron_row(draw_receipt(receipt)[0], [asked], "CORD-v2")


def iter_cord_rows(seed: int, stream: int, split: str) -> Iterator[CordRow]:
    """Yield the same receipts in CORD-V2's schema.

    Args:
        split: the split that `meta` names.
    """
    for i, rng in enumerate(row_streams(seed, stream)):
        receipt = make_receipt(rng)
        canvas, fields = draw_receipt(receipt)
        size = {"width": canvas.width, "height": canvas.height}
        truth = {
            "gt_parse": parse_of(receipt),
            "meta": {"version": "2.0.0", "split": split, "image_id": i, "image_size": size},
            "valid_line": [_valid_line(field, row_id) for row_id, field in enumerate(fields)],
            "roi": {},
            "repeating_symbol": [],
            "dontcare": [],
        }
        yield {"image": {"bytes": canvas.png(), "path": None}, "ground_truth": json.dumps(truth)}


def make_receipt(rng: np.random.Generator) -> Receipt:
    names = sample_of(rng, _DISHES, int(rng.integers(1, 5)))
    items = tuple(_make_item(name, rng) for name in names)
    plain = Receipt(shop="", number=0, separator=",", items=items, tax=0, service=0, cash=0)
    tax = plain.subtotal // 10 if rng.random() < 0.6 else 0
    service = plain.subtotal // 20 if rng.random() < 0.3 else 0
    total = plain.subtotal + tax + service
    return Receipt(
        shop=choose(rng, _SHOPS),
        number=int(rng.integers(1000, 9999)),
        separator=choose(rng, (".", ",")),
        items=items,
        tax=tax,
        service=service,
        cash=-(-total // 50_000) * 50_000 if rng.random() < 0.7 else 0,
    )


def parse_of(receipt: Receipt) -> dict[str, Tree]:
    """Return the slip's parse as CORD-V2 writes it."""
    menu = [_menu_entry(receipt, item) for item in receipt.items]
    sub_total = {"subtotal_price": receipt.printed(receipt.subtotal)}
    sub_total |= {"tax_price": receipt.printed(receipt.tax)} if receipt.tax else {}
    sub_total |= {"service_price": receipt.printed(receipt.service)} if receipt.service else {}
    total = {"total_price": receipt.printed(receipt.total)}
    if receipt.cash:
        total |= {"cashprice": receipt.printed(receipt.cash)}
        total |= {"changeprice": receipt.printed(receipt.cash - receipt.total)}
    return {"menu": menu if len(menu) > 1 else menu[0], "sub_total": sub_total, "total": total}


def draw_receipt(receipt: Receipt) -> tuple[Canvas, list[Field]]:
    """Draw the slip. Return the drawing, and the position of each leaf of its parse."""
    canvas = Canvas(_WIDTH, _height(receipt), paper="#fbfaf6")
    canvas.text((_WIDTH / 2, 30), receipt.shop, 22, align="center")
    canvas.text((_WIDTH / 2, 56), f"Bill {receipt.number}", 13, align="center")
    fields: list[Field] = []
    y = _rule(canvas, 76)
    for group, item in enumerate(receipt.items):
        y = _draw_item(canvas, fields, receipt, item, group, y)
    y = _rule(canvas, y)
    for number, (label, category, price) in enumerate(_sums(receipt)):
        size = 19 if category == "total.total_price" else 15
        key = _print(canvas, (_LEFT, y), label, size)
        value = _print(canvas, (_RIGHT, y), receipt.printed(price), size, "right")
        fields.append(Field(category, len(receipt.items) + number, value, key))
        y += _LINE
    canvas.text((_WIDTH / 2, y + 14), "Terima kasih", 15, align="center")
    return canvas, fields


def _make_item(name: str, rng: np.random.Generator) -> Item:
    has_option = rng.random() < 0.25
    return Item(
        name=name,
        count=int(rng.integers(1, 6)),
        unit_price=500 * int(rng.integers(10, 91)),
        option=choose(rng, _OPTIONS) if has_option else "",
        option_price=500 * int(rng.integers(2, 11)) if has_option else 0,
        shows_unit=bool(rng.random() < 0.3),
    )


def _menu_entry(receipt: Receipt, item: Item) -> dict[str, Tree]:
    entry: dict[str, Tree] = {"nm": item.name, "cnt": str(item.count), "price": receipt.printed(item.price)}
    if item.shows_unit:
        entry["unitprice"] = receipt.printed(item.unit_price)
    if item.option:
        entry["sub"] = {"nm": item.option, "price": receipt.printed(item.option_price)}
    return entry


def _sums(receipt: Receipt) -> list[tuple[str, str, int]]:
    """Return (label, category, price) of the lines below the menu."""
    lines = [("Subtotal", "sub_total.subtotal_price", receipt.subtotal)]
    lines += [("Tax 10%", "sub_total.tax_price", receipt.tax)] if receipt.tax else []
    lines += [("Service 5%", "sub_total.service_price", receipt.service)] if receipt.service else []
    lines += [("TOTAL", "total.total_price", receipt.total)]
    if receipt.cash:
        lines += [("Cash", "total.cashprice", receipt.cash)]
        lines += [("Change", "total.changeprice", receipt.cash - receipt.total)]
    return lines


def _height(receipt: Receipt) -> int:
    lines = sum(1 + item.shows_unit + bool(item.option) for item in receipt.items) + len(_sums(receipt))
    return 150 + _LINE * lines


def _draw_item(canvas: Canvas, fields: list[Field], receipt: Receipt, item: Item, group: int, y: int) -> int:
    """Draw an item. Return the y position of the next line."""

    def put(category: str, x: float, text: str, size: int = 15, align: str = "left") -> None:
        fields.append(Field(category, group, _print(canvas, (x, y), text, size, align)))

    put("menu.cnt", _LEFT, str(item.count))
    put("menu.nm", _LEFT + 24, item.name)
    put("menu.price", _RIGHT, receipt.printed(item.price), align="right")
    y += _LINE
    if item.shows_unit:
        canvas.text((_LEFT + 24, y), "@", 13)
        put("menu.unitprice", _LEFT + 42, receipt.printed(item.unit_price), 13)
        y += _LINE
    if item.option:
        put("menu.sub_nm", _LEFT + 36, item.option, 13)
        put("menu.sub_price", _RIGHT, receipt.printed(item.option_price), 13, "right")
        y += _LINE
    return y


def _print(canvas: Canvas, at: tuple[float, float], text: str, size: int, align: str = "left") -> PrintedText:
    canvas.text(at, text, size, align=align)
    return canvas.texts[-1]


def _rule(canvas: Canvas, y: int) -> int:
    """Draw a line across the slip. Return the y position of the next line of text."""
    canvas.line([(_LEFT, y), (_RIGHT, y)], 1, "#606060")
    return y + 18


def _valid_line(field: Field, row_id: int) -> dict[str, object]:
    words = [_word(field.key, row_id, True)] if field.key else []
    words.append(_word(field.value, row_id, False))
    return {"words": words, "category": field.category, "group_id": field.group, "sub_group_id": 0}


def _word(printed: PrintedText, row_id: int, is_key: bool) -> dict[str, object]:
    left, top, right, bottom = (round(edge) for edge in printed.box)
    quad = {"x1": left, "y1": top, "x2": right, "y2": top, "x3": right, "y3": bottom, "x4": left, "y4": bottom}
    return {"quad": quad, "is_key": int(is_key), "row_id": row_id, "text": printed.text}
