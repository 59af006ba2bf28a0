"""Receipts: tree edit accuracy and field F1, as Donut scores CORD.

An answer is text in either form of `dataset_builders.cord_target`, by itself or in a Markdown code fence, which models
that were not tuned like to write. A receipt is an object or a list of objects. Everything else scores as an empty
receipt and is `unparsed`: free text too, although a text alone is a tree of tags.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein

from dataset_builders.contracts.errors import InputError
from dataset_builders.cord_target import Tree, from_json, from_tags
from stages.scoring.contract import Judged, MeanMetric, Metric

_FENCE = re.compile(r"```\w*\s(.*?)(?:```|\Z)", re.DOTALL)
_STARTS = ("{", "[", "<s_")

# What is left of a tree to compare: objects whose values are lists, of objects or of stripped texts.
Receipt = dict[str, list] | list
Field = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a receipt's tree: its key, or a leaf's text.

    Attributes:
        weight: what it costs to insert or to remove: a leaf's characters, else 1.
        first: the place, in the order of children first, of its leftmost leaf, or its own where it has no children.
    """

    label: str
    is_leaf: bool
    weight: int
    first: int


class CordTreeEdit(MeanMetric):
    name = "cord_nted"
    definition = (
        "mean of max(0, 1 - TED(answer, reference) / TED({}, reference)), best over references; TED is Zhang and"
        " Shasha's ordered tree distance with Levenshtein costs on leaves; what is no receipt scores as {}"
    )
    source = (
        "donut-python 1.0.9, donut/util.py, JSONParseEvaluator.cal_acc. An empty reference, which it divides by 0,"
        " scores 1 for an empty answer and else 0; text that holds '<leaf>' is text"
    )

    def score_one(self, answer: Judged) -> float:
        predicted = _nodes(_answer_of(answer) or {})
        return max(_accuracy(predicted, _nodes(reference)) for reference in _references_of(answer))

    def unparsed(self, answers: Sequence[Judged]) -> np.ndarray:
        return _unparsed(answers)


class CordFieldF1(Metric):
    name = "cord_f1"
    definition = (
        "micro F1 = tp / (tp + (fp + fn) / 2) over all answers' (path, text) pairs as multisets, against the best"
        " reference; paths are keys joined by dots without places in lists; what is no receipt scores as {}"
    )
    source = (
        "donut-python 1.0.9, donut/util.py, JSONParseEvaluator.cal_f1. VLMEvalKit's kie_evaluator.py adds 1e-6 to the"
        " divisor, counts null, false and 0 as the texts 'None', 'False' and '0', and respells texts; not done here"
    )
    columns = ("true_positives", "false_positives", "false_negatives")

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        rows = [[sum(part.values()) for part in _compared(answer)] for answer in answers]
        return np.array(rows, np.float64).reshape(-1, 3)

    def value(self, sums: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return sums[..., 0] / (sums[..., 0] + (sums[..., 1] + sums[..., 2]) / 2)

    def unparsed(self, answers: Sequence[Judged]) -> np.ndarray:
        return _unparsed(answers)

    def fields(self, answers: Sequence[Judged]) -> dict[str, dict[str, float]]:
        return {path: asdict(found) for path, found in scores_by_field(answers).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldScore:
    """One field over all answers: (path, text) pairs that are right, too many, and missing; F1 as in CordFieldF1."""

    f1: float
    true_positives: int
    false_positives: int
    false_negatives: int


def scores_by_field(answers: Sequence[Judged]) -> dict[str, FieldScore]:
    """Path -> its score, sorted by path; every path that occurs in a reference or an answer."""
    counts = tuple(Counter[str]() for _ in range(3))
    for answer in answers:
        for total, part in zip(counts, _compared(answer)):
            for (path, _), number in part.items():
                total[path] += number
    found = {}
    for path in sorted(set().union(*counts)):
        right, extra, missing = (total[path] for total in counts)
        found[path] = FieldScore(
            f1=right / (right + (extra + missing) / 2),
            true_positives=right,
            false_positives=extra,
            false_negatives=missing,
        )
    return found


def read_receipt(text: str) -> Receipt | None:
    """The receipt that a text holds, normalised; None where it holds none.

    Normalised is: keys by length, then by letters; a single value is a list of it; leaves are stripped texts; what is
    empty, 0, false or null is left out, and in a list with a leaf everything but texts and numbers.
    """
    text = text.strip()
    if not text.startswith(_STARTS) and (fence := _FENCE.search(text)):
        text = fence[1].strip()
    try:
        tree = from_json(text) if text.startswith(("{", "[")) else from_tags(text)
    except ValueError:
        return None
    if not isinstance(tree, dict | list):
        return None
    return _normalise(tree)


def _answer_of(answer: Judged) -> Receipt | None:
    return read_receipt(answer.answer)


def _references_of(answer: Judged) -> list[Receipt]:
    found = [read_receipt(reference) for reference in answer.references]
    for text, receipt in zip(answer.references, found):
        if receipt is None:
            raise InputError(f"the reference {text[:80]!r} is no receipt; give this subset another metric than cord_*")
    return found


def _unparsed(answers: Sequence[Judged]) -> np.ndarray:
    return np.array([_answer_of(answer) is None for answer in answers], bool)


def _normalise(tree: Tree) -> Receipt:
    if not tree:
        return {}
    if isinstance(tree, dict):
        values = ((key, _normalise(tree[key])) for key in sorted(tree, key=lambda key: (len(key), key)))
        return {key: value if isinstance(value, list) else [value] for key, value in values if value}
    if not isinstance(tree, list):
        return [str(tree).strip()]
    if all(isinstance(item, dict) for item in tree):
        return [kept for item in tree if (kept := _normalise(item))]
    # bool is an int to isinstance, and Donut leaves it out.
    texts = (str(item).strip() for item in tree if type(item) in (str, int, float))
    return [text for text in texts if text]


def _fields(receipt: Receipt | str, path: str = "") -> Iterator[Field]:
    if isinstance(receipt, dict):
        for key, value in receipt.items():
            yield from _fields(value, f"{path}.{key}" if path else key)
    elif isinstance(receipt, list):
        for item in receipt:
            yield from _fields(item, path)
    else:
        yield path, receipt


def _compared(answer: Judged) -> tuple[Counter[Field], Counter[Field], Counter[Field]]:
    """(path, text) pairs that are right, too many, and missing, against the reference that gives the fewest wrong."""
    predicted = Counter(_fields(_answer_of(answer) or {}))
    references = [Counter(_fields(reference)) for reference in _references_of(answer)]
    wanted = min(references, key=lambda one: ((predicted - one).total() + (one - predicted).total(), -one.total()))
    return predicted & wanted, predicted - wanted, wanted - predicted


def _accuracy(predicted: list[Node], reference: list[Node]) -> float:
    # From {}, the bare root, the cheapest way is to insert every other node.
    size = sum(node.weight for node in reference[:-1])
    if size == 0:
        return float(len(predicted) == 1)
    return max(0.0, 1 - tree_distance(predicted, reference) / size)


def _nodes(receipt: Receipt) -> list[Node]:
    """The tree, children first: a node a key, a <subtree> a listed object, a leaf a text, below a root."""
    nodes: list[Node] = []

    def add(tree: Receipt | str, label: str) -> None:
        first = len(nodes)
        if isinstance(tree, str):
            nodes.append(Node(tree, True, len(tree), first))
            return
        for key, child in tree.items() if isinstance(tree, dict) else (("<subtree>", child) for child in tree):
            add(child, key)
        nodes.append(Node(label, False, 1, first))

    add(receipt, "<root>")
    return nodes


def tree_distance(one: list[Node], two: list[Node]) -> int:
    """The least cost of edits that turn the one ordered tree into the other.

    Zhang and Shasha 1989, Simple fast algorithms for the editing distance between trees and related problems. Equal to
    `zss.distance` of zss 1.2.0, which also keeps the edits themselves and takes ten times as long or more.
    """
    changes = [[_change(node, other) for other in two] for node in one]
    distances = [[0] * len(two) for _ in one]
    for i in _key_roots(one):
        for j in _key_roots(two):
            _fill(one[one[i].first : i + 1], two[two[j].first : j + 1], changes, distances)
    return distances[-1][-1]


def _key_roots(nodes: list[Node]) -> list[int]:
    """The highest node of each leftmost leaf, lowest first."""
    return sorted({node.first: at for at, node in enumerate(nodes)}.values())


def _fill(one: list[Node], two: list[Node], changes: list[list[int]], distances: list[list[int]]) -> None:
    """Distances of all subtrees on the left edges of two subtrees, given those of the subtrees inside."""
    top, left = one[0].first, two[0].first
    forest = [[0]]
    for other in two:
        forest[0].append(forest[0][-1] + other.weight)
    for x, node in enumerate(one):
        above, row = forest[x], [forest[x][0] + node.weight]
        inner = forest[node.first - top]
        change, distance = changes[top + x], distances[top + x]
        on_edge = node.first == top
        for y, other in enumerate(two):
            best = min(above[y + 1] + node.weight, row[y] + other.weight)
            if on_edge and other.first == left:
                best = distance[left + y] = min(best, above[y] + change[left + y])
            else:
                best = min(best, inner[other.first - left] + distance[left + y])
            row.append(best)
        forest.append(row)


def _change(node: Node, other: Node) -> int:
    if node.is_leaf and other.is_leaf:
        return Levenshtein.distance(node.label, other.label)
    if node.is_leaf or other.is_leaf:
        return 1 + (node if node.is_leaf else other).weight
    return int(node.label != other.label)
