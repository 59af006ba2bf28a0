"""Drawn till receipts as raw rows in the schema of naver-clova-ix/cord-v2, in any number and offline.

    image         a grey JPEG of a slip 480 pixels wide: one of eight fonts and three layouts, tilted by up to two
                  degrees, shaded, blurred and noisy
    ground_truth  {"gt_parse": {"menu": [{"nm": "NASI GORENG", "cnt": "2", "price": "30.000"}, ...],
                                "sub_total": {"subtotal_price": "90.000", "tax_price": "9.000"},
                                "total": {"total_price": "99.000", "cashprice": ..., "changeprice": ...}},
                   "meta": {...}, "valid_line": [{"words": [{"quad", "is_key", "row_id", "text"}], "category",
                   "group_id", "sub_group_id"}, ...], "roi": {}, "repeating_symbol": [], "dontcare": []}

A strip is one line of a receipt, or one field cut out tightly, in the same schema. Its parse has the fields that are
printed on it. A model with random weights reads letters on strips, where no field has to be located, long before it
reads whole slips.

CORD's conventions hold: a menu of one item is the item itself and not a list, and prices are text with the separator of
the slip. Every leaf of the parse is printed as it is, and `valid_line` gives its box. The sums are right: the prices
add up to the subtotal; the total is the subtotal minus discount plus service and tax; change is cash minus total. Names
are drawn from some 50,000 combinations of words, so most names of a held-out receipt are in no training receipt.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dataset_builders.pictures.slip import FONTS, Photo, Quad, Slip, text_width
from dataset_builders.sources.cord_target import Tree

T = TypeVar("T")
CordRow = dict[str, object]

WIDTH = 480  # pixels
_MARGIN = 24
_MAX_TILT = 2.0  # degrees
_SIZES = (27, 26, 24, 22, 21, 20)  # font sizes in pixels: the largest one at which every line fits is used
_MIN_SIDE = 32  # smallest side of a strip, in pixels
_CELL_SHARE = 0.5  # share of strips that show only one field
_GAP = 15  # smallest gap between two columns, in pixels
_ITEM_SHARES = (0.20, 0.24, 0.20, 0.16, 0.12, 0.08)  # shares of slips with 1, 2, ... items

_DISHES = (
    "Nasi Goreng", "Nasi Uduk", "Mie Ayam", "Mie Goreng", "Bakmi", "Soto", "Sate", "Gado Gado", "Rendang", "Bakso",
    "Pempek", "Rawon", "Lontong", "Martabak", "Roti Bakar", "Roti", "Croissant", "Donut", "Waffle", "Pizza", "Burger",
    "Pasta", "Steak", "Salad", "Sup", "Teh", "Es Teh", "Kopi", "Es Kopi", "Latte", "Jus", "Susu", "Soda", "Coklat",
    "Matcha", "Air Mineral",
)  # fmt: skip
_KINDS = (
    "Ayam", "Sapi", "Ikan", "Udang", "Telur", "Jamur", "Tahu", "Tempe", "Sayur", "Keju", "Pedas", "Manis", "Asin",
    "Spesial", "Komplit", "Panas", "Dingin", "Jumbo", "Kecil", "Besar", "Madura", "Padang", "Bali", "Jeruk", "Mangga",
    "Alpukat", "Melati", "Vanilla", "Karamel", "Bawang",
)  # fmt: skip
_OPTIONS = ("Extra Telur", "Extra Keju", "Tanpa Es", "Less Sugar", "Pedas", "Large", "Take Away", "Nasi Putih")
_SHOPS = ("Warung", "Kopi", "Toko Roti", "Dapur", "Bakmi", "Rumah Makan", "Kedai", "Resto")
_OWNERS = ("Melati", "Pagi", "Jaya", "Ibu Sri", "Lestari", "Bahagia", "Nusantara", "Sederhana", "Mawar", "Senja")
_STREETS = ("Jl. Merdeka", "Jl. Sudirman", "Jl. Kenanga", "Mall Lt.", "Ruko Blok", "Pasar Baru")
_THANKS = ("Terima kasih", "Thank you", "Selamat datang kembali", "See you again")
_LABELS = {
    "sub_total.subtotal_price": ("Subtotal", "Sub Total", "SUB-TOTAL", "Jumlah"),
    "sub_total.discount_price": ("Discount", "Diskon", "DISC"),
    "sub_total.service_price": ("Service 5%", "SVC CHG", "Service"),
    "sub_total.tax_price": ("Tax 10%", "PB1 10%", "Pajak", "PPN"),
    "total.total_price": ("TOTAL", "Grand Total", "Total Bayar"),
    "total.cashprice": ("Cash", "TUNAI", "CASH"),
    "total.changeprice": ("Change", "KEMBALI", "Kembalian"),
}
_LAYOUTS = ("columns", "below", "times")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A line of the menu. Prices are whole rupiah.

    Attributes:
        option: an extra that is printed below the item with its price; empty: none.
    """

    name: str
    count: int
    unit_price: int
    option: str = ""
    option_price: int = 0

    @property
    def price(self) -> int:
        return self.count * self.unit_price


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The facts that are printed on a slip. Prices are whole rupiah.

    Attributes:
        layout: the order of an item's fields: "columns" is count, name, price; "below" has count and unit price in a
            line below the name; "times" is name, count, price.
        separator: the separator between thousands.
        discount, service, tax, cash: 0 where the slip has no such line.
    """

    layout: str
    separator: str
    items: tuple[Item, ...]
    discount: int
    service: int
    tax: int
    cash: int

    @property
    def subtotal(self) -> int:
        return sum(item.price + item.option_price for item in self.items)

    @property
    def total(self) -> int:
        return self.subtotal - self.discount + self.service + self.tax

    def printed(self, price: int) -> str:
        return f"{price:,}".replace(",", self.separator)

    @property
    def sums(self) -> list[tuple[str, str]]:
        """The (category, printed price) of each line below the menu, from top to bottom."""
        lines = [("sub_total.subtotal_price", self.subtotal)]
        lines += [("sub_total.discount_price", self.discount)] if self.discount else []
        lines += [("sub_total.service_price", self.service)] if self.service else []
        lines += [("sub_total.tax_price", self.tax)] if self.tax else []
        lines += [("total.total_price", self.total)]
        if self.cash:
            lines += [("total.cashprice", self.cash), ("total.changeprice", self.cash - self.total)]
        return [(category, self.printed(price)) for category, price in lines]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A text in a line of the slip.

    Attributes:
        category: the category in CORD's valid_line, "menu.nm".
        is_key: whether the text is the label of the field and not its value.
        value: the leaf of the parse, where it differs from the text: "2" for "2 x".
    """

    text: str
    x: float
    align: str
    category: str
    is_key: bool = False
    value: str = ""


_PrintedLine = tuple[list[tuple[_Cell, Quad]], int]  # cells and the boxes of their ink; the group's number


def receipt_row(seed: int, split: str, index: int) -> CordRow:
    """Return one row: {"image": {"bytes", "path"}, "ground_truth": text}. The same arguments give the same row.

    Args:
        split: train or validation. The receipts of the two splits have only the words in common.
    """
    rng = np.random.default_rng([seed, len(split), index])
    receipt = make_receipt(rng)
    slip, lines = _print_slip(receipt, rng)
    return _row(split, index, parse_of(receipt), slip, lines, rng)


def strip_row(seed: int, index: int) -> CordRow:
    """Return one row of the split train whose image is a strip. The same arguments give the same row."""
    rng = np.random.default_rng([seed, 0, index])
    receipt, font, size = make_receipt(rng), _choose(rng, FONTS), _choose(rng, _SIZES)
    lines = [cells for item in receipt.items for cells in _item_lines(receipt, item)]
    lines += [_sum_line(*line, rng) for line in receipt.sums]
    cells = _choose(rng, lines)
    width, height = WIDTH, max(_MIN_SIDE, round(size * rng.uniform(1.5, 2.2)))
    if rng.random() < _CELL_SHARE or not _fits(cells, font, size):
        cell = _choose(rng, [cell for cell in cells if not cell.is_key])
        left, right = rng.integers(6, 36, 2).tolist()
        width = max(_MIN_SIDE, round(text_width(cell.text, font, size)) + left + right)
        cells = [dataclasses.replace(cell, x=left, align="left")]
    slip = Slip(width, height, paper=int(rng.integers(225, 256)), ink=int(rng.integers(0, 70)))
    boxes = [(cell, slip.text(cell.x, height / 2, cell.text, font, size, cell.align)) for cell in cells]
    return _row("train", index, _parse_of_cells(cells), slip, [(boxes, 0)], rng)


def _row(
    split: str, index: int, parse: dict[str, Tree], slip: Slip, lines: list[_PrintedLine], rng: np.random.Generator
) -> CordRow:
    """Photograph a printed slip, and return its row."""
    photo = Photo(
        tilt=float(rng.uniform(-_MAX_TILT, _MAX_TILT)),
        shade=float(rng.uniform(-30, 30)),
        blur=float(rng.choice((0.0, 0.0, 0.4, 0.7))),
        noise=float(rng.uniform(0, 10)),
        quality=int(rng.integers(60, 95)),
    )
    truth = {
        "gt_parse": parse,
        "meta": {
            "version": "2.0.0",
            "split": split,
            "image_id": index,
            "image_size": {"width": slip.size[0], "height": slip.size[1]},
        },
        "valid_line": _valid_lines(slip, lines, photo.tilt),
        "roi": {},
        "repeating_symbol": [],
        "dontcare": [],
    }
    return {"image": {"bytes": slip.jpeg(photo, rng), "path": None}, "ground_truth": json.dumps(truth)}


def make_receipt(rng: np.random.Generator) -> Receipt:
    """Return a random receipt."""
    upper = rng.random() < 0.4
    items = tuple(_make_item(upper, rng) for _ in range(1 + int(rng.choice(len(_ITEM_SHARES), p=_ITEM_SHARES))))
    subtotal = sum(item.price + item.option_price for item in items)
    discount = subtotal // 10 if rng.random() < 0.2 else 0
    service = subtotal // 20 if rng.random() < 0.3 else 0
    tax = subtotal // 10 if rng.random() < 0.6 else 0
    total = subtotal - discount + service + tax
    return Receipt(
        layout=_choose(rng, _LAYOUTS),
        separator=_choose(rng, (".", ",")),
        items=items,
        discount=discount,
        service=service,
        tax=tax,
        cash=-(-total // 50_000) * 50_000 if rng.random() < 0.6 else 0,
    )


def parse_of(receipt: Receipt) -> dict[str, Tree]:
    """Return the parse of a receipt, in the form of CORD-V2."""
    menu = [_menu_entry(receipt, item) for item in receipt.items]
    parse: dict[str, Tree] = {"menu": menu if len(menu) > 1 else menu[0]}
    for category, price in receipt.sums:
        group, key = category.split(".")
        parse.setdefault(group, {})[key] = price
    return parse


def _parse_of_cells(cells: Sequence[_Cell]) -> dict[str, Tree]:
    """Return the parse of the fields in some cells."""
    parse: dict[str, Tree] = {}
    for cell in cells:
        if cell.is_key:
            continue
        group, key = cell.category.split(".")
        fields = parse.setdefault(group, {})
        if key.startswith("sub_"):
            fields, key = fields.setdefault("sub", {}), key.removeprefix("sub_")
        fields[key] = cell.value or cell.text
    return parse


def _make_item(upper: bool, rng: np.random.Generator) -> Item:
    words = [_choose(rng, _DISHES), *(_choose(rng, _KINDS) for _ in range(int(rng.choice(3, p=(0.3, 0.55, 0.15)))))]
    has_option = rng.random() < 0.2
    return Item(
        name=_cased(" ".join(dict.fromkeys(words)), upper),
        count=int(rng.choice((1, 1, 1, 2, 2, 3, 4, 5, 10, 12))),
        unit_price=500 * int(rng.integers(4, 150)),
        option=_cased(_choose(rng, _OPTIONS), upper) if has_option else "",
        option_price=500 * int(rng.integers(2, 20)) if has_option else 0,
    )


def _menu_entry(receipt: Receipt, item: Item) -> dict[str, Tree]:
    entry: dict[str, Tree] = {"nm": item.name, "cnt": str(item.count), "price": receipt.printed(item.price)}
    if receipt.layout == "below":
        entry["unitprice"] = receipt.printed(item.unit_price)
    if item.option:
        entry["sub"] = {"nm": item.option, "price": receipt.printed(item.option_price)}
    return entry


def _print_slip(receipt: Receipt, rng: np.random.Generator) -> tuple[Slip, list[_PrintedLine]]:
    """Print a receipt.

    Returns:
        The slip, and its lines that have fields.
    """
    font = _choose(rng, FONTS)
    body = [(cells, group) for group, item in enumerate(receipt.items) for cells in _item_lines(receipt, item)]
    sums = [(_sum_line(*line, rng), group) for group, line in enumerate(receipt.sums, len(receipt.items))]
    size = next((size for size in _SIZES if all(_fits(cells, font, size) for cells, _ in body)), _SIZES[-1])
    head, foot, rule = _head_lines(rng), _choose(rng, (*_THANKS, "")), _choose(rng, ("line", "-", "="))
    step = round(size * rng.uniform(1.3, 1.6))
    height = step * (len(head) + len(body) + len(sums) + bool(foot) + 2) + 2 * _MARGIN
    slip = Slip(WIDTH, height, paper=int(rng.integers(225, 256)), ink=int(rng.integers(0, 70)))
    y = _MARGIN + step // 2
    for text in head:
        slip.text(WIDTH / 2, y, text, font, size, "center")
        y += step
    printed = []
    for lines in (body, sums):
        _print_rule(slip, y, rule, font, size)
        y += step
        for cells, group in lines:
            boxes = [(cell, slip.text(cell.x, y, cell.text, font, size, cell.align)) for cell in cells]
            printed.append((boxes, group))
            y += step
    if foot:
        slip.text(WIDTH / 2, y, foot, font, size, "center")
    return slip, printed


def _item_lines(receipt: Receipt, item: Item) -> list[list[_Cell]]:
    """Return the lines of an item, from top to bottom."""
    left, right = _MARGIN, WIDTH - _MARGIN
    name = _Cell(item.name, left, "left", "menu.nm")
    price = _Cell(receipt.printed(item.price), right, "right", "menu.price")
    if receipt.layout == "columns":
        lines = [
            [_Cell(str(item.count), left, "left", "menu.cnt"), _Cell(item.name, left + 45, "left", "menu.nm"), price]
        ]
    elif receipt.layout == "times":
        lines = [[name, _Cell(f"x{item.count}", right - 117, "right", "menu.cnt", value=str(item.count)), price]]
    else:
        unit = _Cell(receipt.printed(item.unit_price), left + 90, "left", "menu.unitprice")
        count = _Cell(f"{item.count} x", left + 75, "right", "menu.cnt", value=str(item.count))
        lines = [[name], [count, unit, price]]
    if item.option:
        option_price = _Cell(receipt.printed(item.option_price), right, "right", "menu.sub_price")
        lines.append([_Cell(item.option, left + 60, "left", "menu.sub_nm"), option_price])
    return lines


def _sum_line(category: str, price: str, rng: np.random.Generator) -> list[_Cell]:
    label = _Cell(_choose(rng, _LABELS[category]), _MARGIN, "left", category, is_key=True)
    return [label, _Cell(price, WIDTH - _MARGIN, "right", category)]


def _head_lines(rng: np.random.Generator) -> list[str]:
    lines = [
        f"{_choose(rng, _SHOPS)} {_choose(rng, _OWNERS)}",
        f"{_choose(rng, _STREETS)} {rng.integers(1, 200)}",
        f"{rng.integers(1, 29):02d}/{rng.integers(1, 13):02d}/20{rng.integers(18, 27)} {rng.integers(8, 23):02d}:"
        f"{rng.integers(60):02d}",
        f"Bill {rng.integers(1000, 99999)}",
    ]
    return lines[: int(rng.integers(1, len(lines) + 1))]


def _fits(cells: Sequence[_Cell], font: str, size: int) -> bool:
    """Whether the cells of a line, given from left to right, do not touch."""
    edges = []
    for cell in cells:
        width = text_width(cell.text, font, size)
        edges.append((cell.x - width, cell.x) if cell.align == "right" else (cell.x, cell.x + width))
    is_apart = all(left[1] + _GAP <= right[0] for left, right in itertools.pairwise(edges))
    return is_apart and edges[-1][1] <= WIDTH - _MARGIN


def _print_rule(slip: Slip, y: int, rule: str, font: str, size: int) -> None:
    if rule == "line":
        slip.rule(y, _MARGIN)
    else:
        count = int((WIDTH - 2 * _MARGIN) / text_width(rule, font, size))
        slip.text(WIDTH / 2, y, rule * count, font, size, "center")


def _valid_lines(slip: Slip, lines: list[_PrintedLine], tilt: float) -> list[dict[str, object]]:
    """Return CORD's list of fields with the box of each word."""
    fields: dict[tuple[str, int], dict[str, object]] = {}
    for row_id, (cells, group) in enumerate(lines):
        for cell, quad in cells:
            corners = slip.tilted(quad, tilt)
            corner_places = {f"{axis}{n}": corners[n - 1][i] for n in range(1, 5) for i, axis in enumerate("xy")}
            field = fields.setdefault(
                (cell.category, group), {"words": [], "category": cell.category, "group_id": group, "sub_group_id": 0}
            )
            field["words"].append(
                {"quad": corner_places, "is_key": int(cell.is_key), "row_id": row_id, "text": cell.text}
            )
    return list(fields.values())


def _cased(text: str, upper: bool) -> str:
    return text.upper() if upper else text


def _choose(rng: np.random.Generator, items: Sequence[T]) -> T:
    return items[int(rng.integers(len(items)))]
