"""Receipts written by hand, to which Donut's numbers in tests/golden/cord.json belong."""

from pathlib import Path
from typing import Any

CORD_JSON = Path(__file__).parents[4] / "golden" / "cord.json"

ONE = {"menu": {"nm": "Nasi", "price": "9.000"}, "total": {"total_price": "9.000"}}
TWO = {
    "menu": [{"nm": "Nasi Goreng", "cnt": "2", "price": "18.000"}, {"nm": "Es Teh", "cnt": "1", "price": "5.000"}],
    "sub_total": {"subtotal_price": "23.000", "tax_price": "2.300"},
    "total": {"total_price": "25.300", "cashprice": "30.000", "changeprice": "4.700"},
}
SUB = {
    "menu": [
        {"nm": "Set A", "price": "50.000", "sub": {"nm": "Coke", "cnt": "1"}},
        {"nm": "Set B", "price": "60.000", "sub": [{"nm": "Tea"}, {"nm": "Fries", "cnt": "2"}]},
    ],
    "total": {"total_price": "110.000", "menuqty_cnt": "2"},
}


def _with(tree: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**tree, **changed}


# (prediction, reference)
RECEIPTS: list[tuple[Any, Any]] = [
    (ONE, ONE),
    (TWO, TWO),
    (SUB, SUB),
    ({}, ONE),
    ({}, TWO),
    (TWO, ONE),
    (ONE, TWO),
    (SUB, TWO),
    (_with(ONE, total={"total_price": "9.00"}), ONE),
    (_with(ONE, total={"total": "9.000"}), ONE),
    (_with(ONE, menu=[ONE["menu"]]), ONE),
    (_with(TWO, menu=TWO["menu"][:1]), TWO),
    (_with(TWO, menu=TWO["menu"][::-1]), TWO),
    (_with(TWO, menu=TWO["menu"] * 2), TWO),
    (_with(TWO, menu=[]), TWO),
    ({"total": TWO["total"]}, TWO),
    (_with(TWO, menu=[{"nm": "NASI GORENG", "cnt": "2", "price": "18,000"}, TWO["menu"][1]]), TWO),
    (_with(TWO, sub_total={"tax_price": "23.000", "subtotal_price": "2.300"}), TWO),
    (_with(TWO, extra="text"), TWO),
    (_with(TWO, extra={"a": {"b": {"c": "deep"}}}), TWO),
    (_with(SUB, menu=[{**item, "sub": {}} for item in SUB["menu"]]), SUB),
    (_with(SUB, menu=[item["sub"] for item in SUB["menu"]]), SUB),
    ({"menu": {"nm": " Nasi ", "price": "9.000\n"}, "total": {"total_price": "9.000"}}, ONE),
    ({"menu": {"nm": "", "price": "9.000"}, "total": {}}, ONE),
    ({"menu": {"nm": ["Nasi", "Goreng"], "price": "9.000"}, "total": {"total_price": "9.000"}}, ONE),
    (ONE, {"menu": {"nm": ["Nasi", "Goreng"], "price": "9.000"}, "total": {"total_price": "9.000"}}),
    ({"menu": {"nm": ["Goreng", "Nasi"]}}, {"menu": {"nm": ["Nasi", "Goreng"]}}),
    ({"menu": {"nm": "a"}}, {"menu": {"nm": "a", "cnt": "a", "price": "a"}}),
    ({"menu": {"nm": ["a", "a", "b"]}}, {"menu": {"nm": ["a", "b", "b"]}}),
    ({"menu": "Nasi 9.000", "total": "9.000"}, ONE),
    (ONE, {"menu": "Nasi 9.000", "total": "9.000"}),
    ({"menu": {"nm": "x" * 60}, "total": {"total_price": "y" * 60}}, ONE),
    (
        {"menu": {"nm": "caf\u00e9 \u9ed2\u7cd6", "price": "\u00a53"}},
        {"menu": {"nm": "cafe \u9ed2\u7cd6", "price": "\u00a530"}},
    ),
    ({"menu": {"nm": " "}}, {"menu": {"nm": "a"}}),
    ({"b": "1", "aa": "2", "a": "3"}, {"a": "3", "b": "1", "aa": "2"}),
    ([{"nm": "a", "price": "1"}, {"nm": "b", "price": "2"}], [{"nm": "a", "price": "1"}, {"nm": "c", "price": "2"}]),
    # Values that are not texts have no form in tags.
    ({"total": {"total_price": 9000, "n": 1.5}}, {"total": {"total_price": "9000", "n": "1.5"}}),
    ({"total": {"a": 0, "b": False, "c": None, "d": True, "e": "1"}}, {"total": {"a": "0", "d": "True", "e": "1"}}),
    ({"menu": [{"nm": "a"}, "b", None, ["c"], 4, True]}, {"menu": [{"nm": "a"}, {"nm": "b"}]}),
    ({"menu": [["a", "b"], ["c"]]}, {"menu": {"nm": "a"}}),
]
