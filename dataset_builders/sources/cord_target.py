"""Lossless conversion of a receipt's parse to the target text, JSON or the tags of Donut, and back.

A parse is a tree of objects with text keys, lists, and leaves. CORD's parses are like {"menu": [{"nm": "Nasi", "price":
"9.000"}, ...], "total": {"total_price": "9.000"}}, where a menu of one item is the item itself, not a list.

JSON      {"menu":{"nm":"Nasi","price":"9.000"},"total":{"total_price":"9.000"}}
          compact, keys sorted, characters not escaped. Every JSON tree is restored exactly.
tags      <s_total><s_total_price>9.000</s_total_price></s_total><s_menu><s_price>9.000</s_price>...</s_menu>
          an object is its tags, keys sorted backwards; a list is its items with <sep/> between them.

The tags equal the output of `json2token` in clovaai/donut, donut/model.py, byte for byte, wherever that form determines
the tree. Some trees are ambiguous in it, and Donut's `token2json` does not restore every tree. The differences here:

    a list of one item   Donut writes the item, which does not read as a list.   <one/>item
    an empty list        Donut writes nothing.                                   <list/>
    an empty object      Donut writes nothing.                                   <dict/>
    {"text_sequence": t} Donut writes t without a tag.                           <s_text_sequence>t</s_text_sequence>
    white space          token2json strips it from the leaves.                   it stays
    a key inside itself  token2json ends at the first closing tag.               tags are matched

A tree without a form in tags is refused (NoTagForm): leaves that are not text (Donut's str() would make 1 and "1" the
same), a list with items directly in a list (Donut's <sep/> would join the two), and keys that contain < or >. Text that
contains a tag is refused as InnerTag, because it would be read as a tag.
"""

import json
import re
from typing import Any

Tree = dict[str, Any] | list[Any] | str | int | float | bool | None

MAX_DEPTH = 64
_ONE, _LIST, _DICT, _SEP = "<one/>", "<list/>", "<dict/>", "<sep/>"
_TAG = re.compile(r"<s_[^<>]*>|</s_[^<>]*>|<sep/>|<one/>|<list/>|<dict/>")


class NoTagForm(ValueError):
    """A part of the tree has no form in tags."""


class InnerTag(NoTagForm):
    """A text of the tree contains a tag."""


def to_json(tree: Tree) -> str:
    """Return the tree as one line of JSON; equal trees give equal texts."""
    return json.dumps(tree, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> Tree:
    """Return the tree of any JSON text; ValueError also for a key twice in an object, NaN, and more than MAX_DEPTH."""
    try:
        tree = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    _check_depth(tree, MAX_DEPTH)
    return tree


def to_tags(tree: Tree) -> str:
    """Return the tree in Donut's tags, with the differences listed above; NoTagForm if it has no such form."""
    if isinstance(tree, dict):
        pieces = []
        for key in sorted(tree, reverse=True):
            if not isinstance(key, str) or "<" in key or ">" in key:
                raise NoTagForm(f"the key {key!r}")
            pieces.append(f"<s_{key}>{to_tags(tree[key])}</s_{key}>")
        return "".join(pieces) or _DICT
    if isinstance(tree, list):
        # An empty list in a list has a form of its own, <list/>.
        if any(isinstance(item, list) and item for item in tree):
            raise NoTagForm("a list directly in a list")
        items = [to_tags(item) for item in tree]
        return _LIST if not items else _ONE + items[0] if len(items) == 1 else _SEP.join(items)
    if not isinstance(tree, str):
        raise NoTagForm(f"a leaf that is no text: {tree!r}")
    if tag := _TAG.search(tree):
        raise InnerTag(f"text that holds {tag[0]}")
    return tree


def from_tags(text: str) -> Tree:
    """Return the tree of a text in tags. Inverse of `to_tags`; ValueError for any other text."""
    pieces, end = [], 0
    for tag in _TAG.finditer(text):
        pieces += [text[end : tag.start()], tag[0]]
        end = tag.end()
    tree, after = _read_value([*pieces, text[end:]], 0, 0)
    if after != len(pieces) + 1:
        raise ValueError(f"{pieces[after]} closes nothing")
    return tree


def _read_value(pieces: list[str], at: int, depth: int) -> tuple[Tree, int]:
    """Return the value that begins with the text pieces[at], and the index of the closing tag, or of the end, after it.

    Pieces are text, tag, text, tag, ..., text. Every even index holds a text, which may be empty.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    is_one = not pieces[at] and at + 1 < len(pieces) and pieces[at + 1] == _ONE
    item, at = _read_item(pieces, at + 2 if is_one else at, depth)
    if is_one:
        return [item], at
    items = [item]
    while at < len(pieces) and pieces[at] == _SEP:
        item, at = _read_item(pieces, at + 1, depth)
        items.append(item)
    return (items if len(items) > 1 else item), at


def _read_item(pieces: list[str], at: int, depth: int) -> tuple[Tree, int]:
    """Return an object, an empty list or a text, and the index of the tag after it (len(pieces) at the end)."""
    fields: dict[str, Tree] = {}
    text = pieces[at]
    while at + 1 < len(pieces):
        tag = pieces[at + 1]
        if tag in (_DICT, _LIST) and not (fields or text or pieces[at + 2]):
            return ({} if tag == _DICT else []), at + 3
        if not tag.startswith("<s_"):
            break
        key = tag[3:-1]
        value, end = _read_value(pieces, at + 2, depth + 1)
        if end >= len(pieces) or pieces[end] != f"</s_{key}>":
            raise ValueError(f"{tag} is not closed")
        if key in fields or text or pieces[end + 1]:
            raise ValueError(f"{key!r} twice in one object" if key in fields else f"text beside {tag}")
        fields[key], at = value, end + 1
    return (fields or text), at + 1


def _distinct(pairs: list[tuple[str, Tree]]) -> dict[str, Tree]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key twice in one object")
    return fields


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _check_depth(tree: Tree, levels: int) -> None:
    if isinstance(tree, dict | list):
        if levels == 0:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        for item in tree.values() if isinstance(tree, dict) else tree:
            _check_depth(item, levels - 1)
