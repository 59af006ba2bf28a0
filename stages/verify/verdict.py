"""The judgement of answers that another program gave: the same, explained by rounding or resizing, or different.

Both programs compute the same sums in another order. Rounding a number to a dtype of unit roundoff u changes it by at
most u of itself, and the changes of a chain of n roundings add up like a random walk, to some sqrt(n) u (Higham and
Mary, A new approach to probabilistic rounding error analysis, 2019). A layer adds `_ROUNDINGS` of them to the hidden
state. A relative error of the hidden state is an error of the logits of the same share of their spread over the
vocabulary. So two tokens may change places if their logits differ by less than

    _SAFETY * u * sqrt(_ROUNDINGS * layers) * spread

`tests/bench/bench_rounding.py` measures how far below this bound the differences lie.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
_ROUNDINGS = 8  # of a layer: two norms, attention's three, the MLP's two, the sums with the hidden state
_SAFETY = 6.0  # without it, two dense models that round differ by at most 5.5 times the rest (docs/decisions/scores.md)
_LEVELS = 1.0  # mean difference of pixels, of 255, up to which two programs resize alike; Pillow and torchvision: 0.5
SAME, ROUNDING, RESIZED, OTHER_PROMPT, OTHER_PIXELS, DIFFERENT = (
    *("same", "rounding", "resized", "other prompt", "other pixels", "different"),
)
EXPLAINED = (SAME, ROUNDING, RESIZED)


def margin_bound(dtype: str, layers: int, spread: float) -> float:
    """Return the largest difference of two logits that rounding may turn round, where both programs compute in `dtype`
    and the logits have this standard deviation over the vocabulary."""
    return _SAFETY * UNIT_ROUNDOFF[dtype] * math.sqrt(_ROUNDINGS * layers) * spread


def judge(row: Mapping[str, Any], dtype: str, layers: int, usual_spread: float) -> str:
    """Return the kind of one answer, from the row of a loader (see `loaders.py`). `usual_spread` is for a loader that
    returns no logits."""
    if row["prompt"] is not None:
        return OTHER_PROMPT
    if row.get("pixels", 0.0) > _LEVELS:
        return OTHER_PIXELS
    if row["position"] is None:
        return SAME
    if _is_rounding(row, dtype, layers, usual_spread):
        return ROUNDING
    again = row.get("with_our_pixels")
    if again is not None and (again["position"] is None or _is_rounding(again, dtype, layers, usual_spread)):
        return RESIZED
    return DIFFERENT


def _is_rounding(row: Mapping[str, Any], dtype: str, layers: int, usual_spread: float) -> bool:
    if "margin" not in row:
        return False
    return row["margin"] <= margin_bound(dtype, layers, row.get("spread", usual_spread))


def share(kinds: Sequence[str]) -> float:
    """Return the share of answers that are the same or explained."""
    return sum(kind in EXPLAINED for kind in kinds) / len(kinds)


def first_of(
    loader: str, kinds: Sequence[str], rows: Sequence[Mapping[str, Any]], keys: Sequence[str], text: Any
) -> str:
    """Return the first answer that is not explained, in words; "" if there is none."""
    for kind, row, key in zip(kinds, rows, keys):
        if kind in EXPLAINED:
            continue
        if kind == OTHER_PROMPT:
            return f"{loader} makes another prompt of {key}, from token {row['prompt']} on"
        if kind == OTHER_PIXELS:
            return f"{loader} makes other pixels of {key}: {row['pixels']:.3g} of 255 on average"
        if "margin" not in row:
            return f"{loader} answers {key} differently, from token {row['position']} on"
        theirs, ours = (text(row[name]) for name in ("theirs", "ours"))
        where = f"token {row['position']} is {theirs} for {ours}"
        return f"{loader} answers {key} differently: {where}, by a margin of {row['margin']:.3g}"
    return ""


def counted(kinds: Sequence[str]) -> dict[str, int]:
    """Return kind -> number of answers, the best kinds first."""
    counts = Counter(kinds)
    return {kind: counts[kind] for kind in (*EXPLAINED, OTHER_PROMPT, OTHER_PIXELS, DIFFERENT) if counts[kind]}
