"""Boxes that a text writes itself: where they stand, their numbers as they stand, and their labels.

    <|object_ref_start|>cat<|object_ref_end|><|box_start|>(10,20),(300,400)<|box_end|>    marks of Qwen2-VL
    <ref>cat</ref><box>(10,20),(300,400)</box>, or <box>[[10, 20, 300, 400]]</box>        of Qwen-VL, and InternVL
    [{"bbox_2d": [10, 20, 300, 400], "label": "cat"}]                                     JSON, also in ```json
    [{"box_2d": [20, 10, 400, 300], "label": "cat"}]                                      Gemini: y1 x1 y2 x2
    [10, 20, 300, 400]                                                                    a whole answer
    <loc0020><loc0010><loc0400><loc0300> cat ; <loc...                                    PaliGemma: y1 x1 y2 x2 label
    cat<loc_10><loc_20><loc_300><loc_400>                                                 Florence-2: label x1 y1 x2 y2

The tokens of the last two say themselves what their numbers are: the bins 0 to 1023 and 0 to 999. The numbers of the
others may be pixels, 0 to 1000 or 0 to 1, which no text says. An answer of four numbers may be no box at all: it is one
only where an option says what the numbers are.

Where a whole answer, or a JSON value, consists of boxes and labels, it is one list, which a prompt writes in the
recipe's form. Else the text around the numbers is the row's own, and each four numbers are a place: JSON with further
keys, a mark within a sentence, whose label stays as text, and tokens and marks in questions.
"""

import json
import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dataset_builders.contracts.sample import SkipSample

Corners = tuple[float, float, float, float]  # x1, y1, x2, y2 as the text writes them

PALIGEMMA, FLORENCE = "loc_1024", "florence"

_HINT = re.compile(
    r"<\|(?:box|object_ref)_(?:start|end)\|>|<ref>|<box>|b?box_2d|<loc_?\d+>|<seg\d+>|point_2d|<points?\s"
)
# What is left of a text without its boxes must not look like one: it would be trained on in a convention of its own.
# Repetitions that could overlap are possessive (*+): a megabyte of white space would take hours otherwise.
_REST = re.compile(
    r"""<\|(?:box|object_ref)_(?:start|end)\|>|<box>[\s\[(]*+-?\.?\d|<loc_?\d+>|<seg\d+>|<points?\s[^<>]{0,99}?\bx\d*\s*="""
    r"""|(?:b?box|point)_2d["'\\\s]*+[:=]?["'\\\s]*+[\[({][\[({"'\s]*+-?\.?\d"""
)
_N = r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_QUAD = rf"\[\s*{_N}\s*,\s*{_N}\s*,\s*{_N}\s*,\s*{_N}\s*\]"
_KEY = re.compile('"b?box_2d"')
_JSON_BOX = re.compile(rf'"(?P<key>b?box_2d)"\s*:\s*(?P<quad>{_QUAD})')
_BARE = re.compile(rf"\s*{_QUAD}[\s.]*")
_INSIDE_JSON = re.compile(r"""(?:["']\s*:|\[)\s*$""")
_OPEN_LIST, _CLOSE_LIST = re.compile(r"\[\s*$"), re.compile(r"\s*\]")
_OPEN_FENCE, _CLOSE_FENCE = re.compile(r"```(?:json|JSON)?\s*$"), re.compile(r"\s*```")
_EMPTY = re.compile(r"(?:```(?:json|JSON)?\s*)?\[\s*\](?:\s*```)?")
_MARK = r"(?:<\|box_start\|>[^<]*<\|box_end\|>|<box>[^<a-zA-Z]*</box>)"
_MARKED = re.compile(
    r"(?:<\|object_ref_start\|>(?P<label>(?:(?!<\|object_ref_).)*)<\|object_ref_end\|>"
    rf"|<ref>(?P<short>(?:(?!</?ref>).)*)</ref>)(?:\s*{_MARK})*|{_MARK}",
    re.DOTALL,
)
_IN_MARK = re.compile(r"(?:<\|box_start\|>|<box>)([^<]*)(?:<\|box_end\|>|</box>)")
_QUADS = re.compile(rf"\s*(?:{_QUAD}|\[(?:\s*{_QUAD}\s*,?)+\s*\])\s*")
_PAIRS = re.compile(rf"\s*\[?\s*\(\s*({_N})\s*,\s*({_N})\s*\)\s*,\s*\(\s*({_N})\s*,\s*({_N})\s*\)\s*\]?\s*")
_BETWEEN = re.compile(r"[\s,;.]*")
_LOCS, _LOC_S = r"(?:<loc\d{4}>){4}", r"(?:<loc_\d{1,3}>){4}"
_PALIGEMMA_LIST = re.compile(rf"\s*(?:{_LOCS}[^<;]*+(?:;\s*)?)+")
_PALIGEMMA_ITEM = re.compile(rf"({_LOCS})([^<;]*)")
_FLORENCE_LIST = re.compile(rf"(?:[^<]*+{_LOC_S})+\s*")
_FLORENCE_ITEM = re.compile(rf"([^<]*)((?:{_LOC_S})+)")


_LARGEST = 1e9
_NEAR = 200  # characters before a list in which its bracket and fence stand
_MOST_BROKEN = 100  # objects of one text that are tried and are no JSON


@dataclass(frozen=True, slots=True)
class WrittenBoxes:
    """A list of boxes in a text, or a single box."""

    start: int  # the characters that the place takes the position of
    end: int
    boxes: tuple[tuple[Corners, str], ...]  # with labels; none: a mark around a label alone
    is_list: bool
    convention: str | None = None  # PALIGEMMA or FLORENCE; None: the text does not say what the numbers are
    before: str = ""  # text that stays before a single box: its label


def may_hold_boxes(text: str) -> bool:
    """Whether `find_boxes` may find something in a text, or it is an empty list or bare: most texts are none of it."""
    return _HINT.search(text) is not None or is_empty_list(text) or is_bare(text)


def is_bare(text: str) -> bool:
    """Whether a whole answer is four numbers in brackets."""
    return _BARE.fullmatch(text) is not None


def bare_box(text: str) -> WrittenBoxes:
    return WrittenBoxes(0, len(text), ((_floats(text), ""),), is_list=True)


def find_boxes(text: str, is_answer: bool) -> list[WrittenBoxes]:
    """Return the boxes of a text, in order; not that of a bare answer.

    Raises:
        SkipSample: bad_box, for something that looks like a box and is none.
    """
    if _HINT.search(text) is None:
        return []
    found = [*_in_json(text), *_in_marks(text, is_answer), *_in_tokens(text, is_answer)]
    found.sort(key=lambda each: each.start)
    ends = [0, *(each.end for each in found)]
    for end, start in zip(ends, [*(each.start for each in found), len(text)], strict=True):
        if end > start:
            raise SkipSample("bad_box", f"two forms of boxes in one another: {text[start : end + 40][:80]!r}")
        if (rest := _REST.search(text, end, start)) is not None:
            raise SkipSample(
                "bad_box",
                f"{text[rest.start() :][:80]!r} is no box that can be read; mend it, or keep it as text (literal)",
            )
    return found


def is_empty_list(text: str) -> bool:
    """Whether a whole answer is an empty JSON list, by which answers in JSON say that there is nothing to find."""
    return _EMPTY.fullmatch(text.strip()) is not None


def _in_json(text: str) -> Iterator[WrittenBoxes]:
    decoder = json.JSONDecoder()
    objects: list[tuple[int, int, dict]] = []
    end = num_broken = 0
    for hit in _KEY.finditer(text):
        if hit.start() < end:
            continue
        start = text.rfind("{", end, hit.start())
        end = hit.end()
        if start < 0 or num_broken > _MOST_BROKEN:
            continue
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            num_broken += 1
            continue
        if _key(value) is not None:
            objects.append((start, end, value))
    runs: list[list[tuple[int, int, dict]]] = []
    for each in objects:  # those that only a comma or white space parts are one list
        if runs and text[runs[-1][-1][1] : each[0]].strip() in ("", ","):
            runs[-1].append(each)
        else:
            runs.append([each])
    for run in runs:
        start, end = _brackets(text, run[0][0], run[-1][1])
        is_list = _INSIDE_JSON.search(text, max(0, start - _NEAR), start) is None and all(
            value.keys() <= {_key(value), "label"}
            and isinstance(value.get("label", ""), str)
            and len(_KEY.findall(text, first, last)) == 1
            for first, last, value in run
        )
        if is_list:
            boxes = tuple((_four(value), value.get("label", "").strip()) for _, _, value in run)
            fence, close = _OPEN_FENCE.search(text, max(0, start - _NEAR), start), _CLOSE_FENCE.match(text, end)
            if fence is not None and close is not None:
                start, end = fence.start(), close.end()
            yield WrittenBoxes(start, end, boxes, is_list=True)
            continue
        for first, last, value in run:
            numbers = list(_JSON_BOX.finditer(text, first, last))
            label = value.get("label")
            label = label.strip() if isinstance(label, str) and len(numbers) == 1 else ""
            for each in numbers:
                yield WrittenBoxes(*each.span("quad"), ((_quad(each), label),), is_list=False)
    starts = [first for first, _, _ in objects]
    for each in _JSON_BOX.finditer(text):  # of an object around others, or of one that is no JSON
        before = bisect(starts, each.start()) - 1
        if before < 0 or each.start() >= objects[before][1]:
            yield WrittenBoxes(*each.span("quad"), ((_quad(each), ""),), is_list=False)


def _brackets(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the span with the brackets of a JSON list around it, if there are."""
    before, after = _OPEN_LIST.search(text, max(0, start - _NEAR), start), _CLOSE_LIST.match(text, end)
    return (start, end) if before is None or after is None else (before.start(), after.end())


def _key(value: dict) -> str | None:
    return next((key for key in ("bbox_2d", "box_2d") if key in value), None)


def _four(value: dict) -> Corners:
    key = _key(value)
    if not isinstance(four := value[key], list) or len(four) != 4 or not all(map(is_number, four)):
        raise SkipSample("bad_box", f"{str(four)[:80]} where {key} should have four numbers")
    return _by_key(key, tuple(map(float, four)))


def _quad(found: re.Match[str]) -> Corners:
    return _by_key(found["key"], _floats(found["quad"]))


def _by_key(key: str, four: Corners) -> Corners:
    """Return the corners in our order: Gemini writes box_2d as y1, x1, y2, x2."""
    return four if key == "bbox_2d" else (four[1], four[0], four[3], four[2])


def is_number(value: object) -> bool:
    """Whether a parsed JSON value is a number that an image can have: neither NaN nor of hundreds of digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _floats(text: str) -> Corners:
    return tuple(map(float, re.findall(_N, text)))


def _in_marks(text: str, is_answer: bool) -> Iterator[WrittenBoxes]:
    marked = list(_MARKED.finditer(text))
    if not marked:
        return
    items = [
        (each, (each["label"] or each["short"] or "").strip(), list(_IN_MARK.finditer(text, each.start(), each.end())))
        for each in marked
    ]
    if is_answer and all(own for *_, own in items) and _is_covered(text, [each.span() for each in marked]):
        boxes = tuple((corners, label) for _, label, own in items for box in own for corners in _in_mark(box))
        yield WrittenBoxes(0, len(text), boxes, is_list=True)
        return
    for each, label, own in items:
        start, before = each.start(), label
        for box in own:
            before = f"{before} " if before else ""
            boxes = tuple((corners, label) for corners in _in_mark(box))
            yield WrittenBoxes(start, box.end(), boxes, is_list=len(boxes) > 1, before=before)
            start, before = box.end(), ""
        if not own:
            yield WrittenBoxes(*each.span(), (), is_list=False, before=label)


def _in_mark(mark: re.Match[str]) -> list[Corners]:
    if (pairs := _PAIRS.fullmatch(mark[1])) is not None:
        return [tuple(map(float, pairs.groups()))]
    if _QUADS.fullmatch(mark[1]) is None:
        raise SkipSample("bad_box", f"{mark[0][:80]!r} where (x1,y1),(x2,y2) or [[x1, y1, x2, y2]] should be")
    return [_floats(quad) for quad in re.findall(_QUAD, mark[1])]


def _is_covered(text: str, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether nothing but commas, full stops and white space is outside of these spans."""
    ends, starts = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
    return all(_BETWEEN.fullmatch(text, end, start) for end, start in zip(ends, starts, strict=True))


def _in_tokens(text: str, is_answer: bool) -> Iterator[WrittenBoxes]:
    if is_answer and _PALIGEMMA_LIST.fullmatch(text):
        boxes = tuple((_yxyx(item[1]), item[2].strip()) for item in _PALIGEMMA_ITEM.finditer(text))
        yield WrittenBoxes(0, len(text), boxes, is_list=True, convention=PALIGEMMA)
    elif is_answer and _FLORENCE_LIST.fullmatch(text):
        boxes = tuple(
            (_numbers(quad[0]), item[1].strip())
            for item in _FLORENCE_ITEM.finditer(text.rstrip())
            for quad in re.finditer(_LOC_S, item[2])
        )
        yield WrittenBoxes(0, len(text), boxes, is_list=True, convention=FLORENCE)
    else:
        for quad in re.finditer(_LOCS, text):
            yield WrittenBoxes(*quad.span(), ((_yxyx(quad[0]), ""),), is_list=False, convention=PALIGEMMA)
        for quad in re.finditer(_LOC_S, text):
            yield WrittenBoxes(*quad.span(), ((_numbers(quad[0]), ""),), is_list=False, convention=FLORENCE)


def _numbers(tokens: str) -> Corners:
    return tuple(map(float, re.findall(r"\d+", tokens)))


def _yxyx(tokens: str) -> Corners:
    y1, x1, y2, x2 = _numbers(tokens)
    return x1, y1, x2, y2
