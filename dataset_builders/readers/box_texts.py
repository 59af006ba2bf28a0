"""Boxes that a text writes itself: where they stand, their numbers as they stand, and their labels.

    <|object_ref_start|>cat<|object_ref_end|><|box_start|>(10,20),(300,400)<|box_end|>    marks of Qwen2-VL
    [{"bbox_2d": [10, 20, 300, 400], "label": "cat"}]                                     JSON, also in ```json
    <loc0020><loc0010><loc0400><loc0300> cat ; <loc...                                    PaliGemma: y1 x1 y2 x2 label
    cat<loc_10><loc_20><loc_300><loc_400>                                                 Florence-2: label x1 y1 x2 y2

The tokens of the last two say themselves what their numbers are: the bins 0 to 1023 and 0 to 999. The numbers of the
first two may be pixels, 0 to 1000 or 0 to 1, which no text says.

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

_HINT = re.compile(r"<\|(?:box|object_ref)_(?:start|end)\|>|bbox_2d|<loc_?\d+>|<seg\d+>")
# What is left of a text without its boxes must not look like one: it would be trained on in a convention of its own.
# Repetitions that could overlap are possessive (*+): a megabyte of white space would take hours otherwise.
_REST = re.compile(
    r"""<\|(?:box|object_ref)_(?:start|end)\|>|bbox_2d["'\\\s]*+[:=]?["'\\\s]*+[\[({][\[({"'\s]*+-?\.?\d|<loc_?\d+>|<seg\d+>"""
)
_N = r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_JSON_BOX = re.compile(rf'"bbox_2d"\s*:\s*(\[\s*{_N}\s*,\s*{_N}\s*,\s*{_N}\s*,\s*{_N}\s*\])')
_INSIDE_JSON = re.compile(r"""(?:["']\s*:|\[)\s*$""")
_OPEN_LIST, _CLOSE_LIST = re.compile(r"\[\s*$"), re.compile(r"\s*\]")
_OPEN_FENCE, _CLOSE_FENCE = re.compile(r"```(?:json|JSON)?\s*$"), re.compile(r"\s*```")
_EMPTY = re.compile(r"(?:```(?:json|JSON)?\s*)?\[\s*\](?:\s*```)?")
_MARK = r"<\|box_start\|>[^<]*<\|box_end\|>"
_MARKED = re.compile(
    rf"<\|object_ref_start\|>(?P<label>(?:(?!<\|object_ref_).)*)<\|object_ref_end\|>(?:\s*{_MARK})*|{_MARK}", re.DOTALL
)
_IN_MARK = re.compile(r"<\|box_start\|>([^<]*)<\|box_end\|>")
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
    """Whether `find_boxes` may find something in a text, or it is an empty list: most texts are neither."""
    return _HINT.search(text) is not None or is_empty_list(text)


def find_boxes(text: str, is_answer: bool) -> list[WrittenBoxes]:
    """Return the boxes of a text, in order.

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
    for hit in re.finditer('"bbox_2d"', text):
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
        if "bbox_2d" in value:
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
            value.keys() <= {"bbox_2d", "label"}
            and isinstance(value.get("label", ""), str)
            and text.count('"bbox_2d"', first, last) == 1
            for first, last, value in run
        )
        if is_list:
            boxes = tuple((_four(value["bbox_2d"]), value.get("label", "").strip()) for _, _, value in run)
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
                yield WrittenBoxes(*each.span(1), ((_floats(each[1]), label),), is_list=False)
    starts = [first for first, _, _ in objects]
    for each in _JSON_BOX.finditer(text):  # of an object around others, or of one that is no JSON
        before = bisect(starts, each.start()) - 1
        if before < 0 or each.start() >= objects[before][1]:
            yield WrittenBoxes(*each.span(1), ((_floats(each[1]), ""),), is_list=False)


def _brackets(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the span with the brackets of a JSON list around it, if there are."""
    before, after = _OPEN_LIST.search(text, max(0, start - _NEAR), start), _CLOSE_LIST.match(text, end)
    return (start, end) if before is None or after is None else (before.start(), after.end())


def _four(value: object) -> Corners:
    if not isinstance(value, list) or len(value) != 4 or not all(map(is_number, value)):
        raise SkipSample("bad_box", f"{str(value)[:80]} where four numbers should be: x1, y1, x2, y2")
    return tuple(map(float, value))


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
        (each, (each["label"] or "").strip(), list(_IN_MARK.finditer(text, each.start(), each.end())))
        for each in marked
    ]
    if is_answer and all(own for *_, own in items) and _is_covered(text, [each.span() for each in marked]):
        boxes = tuple((_pairs(box), label) for _, label, own in items for box in own)
        yield WrittenBoxes(0, len(text), boxes, is_list=True)
        return
    for each, label, own in items:
        start, before = each.start(), label
        for box in own:
            before = f"{before} " if before else ""
            yield WrittenBoxes(start, box.end(), ((_pairs(box), label),), is_list=False, before=before)
            start, before = box.end(), ""
        if not own:
            yield WrittenBoxes(*each.span(), (), is_list=False, before=label)


def _pairs(mark: re.Match[str]) -> Corners:
    found = _PAIRS.fullmatch(mark[1])
    if found is None:
        raise SkipSample("bad_box", f"{mark[0][:80]!r} where (x1,y1),(x2,y2) should be")
    return tuple(map(float, found.groups()))


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
