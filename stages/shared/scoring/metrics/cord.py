"""Scores of receipts: tree edit accuracy and field F1, as Donut scores CORD.

An answer is text in either form of `dataset_builders.sources.cord_target`, with or without a Markdown code fence, which
untuned models often write. A receipt is an object or a list of objects. Everything else scores as an empty receipt and
is `unparsed`. So is free text, although a mere text would be a valid tree in tags.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein

from dataset_builders.errors import InputError
from dataset_builders.sources.cord_target import Tree, from_json, from_tags
from stages.shared.scoring.metrics.contract import Judged, MeanMetric, SumMetric

_FENCE = re.compile(r"```\w*\s(.*?)(?:```|\Z)", re.DOTALL)
_STARTS = ("{", "[", "<s_")

# The normal form for comparison: objects whose values are lists of objects or of stripped texts.
Receipt = dict[str, list] | list
Field = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a receipt's tree, labelled by its key or a leaf's text."""

    label: str
    is_leaf: bool
    weight: int  # the cost to insert or remove the node: a leaf's number of characters, else 1
    first: int  # the index of its leftmost leaf in postorder; its own index if it has no children


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
        predicted = _nodes(read_receipt(answer.answer) or {})
        scores = []
        for reference in map(_nodes, _references_of(answer)):
            # The cheapest edit from {}, which is only the root, is to insert every other node.
            size = sum(node.weight for node in reference[:-1])
            if size:
                scores.append(max(0.0, 1 - tree_distance(predicted, reference) / size))
            else:
                scores.append(float(len(predicted) == 1))
        return max(scores)

    def unparsed(self, answers: Sequence[Judged]) -> np.ndarray:
        return _unparsed(answers)


class CordFieldF1(SumMetric):
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
        rows = [[pairs.total() for pairs in _compared(answer)] for answer in answers]
        return np.array(rows, np.float64).reshape(-1, 3)

    def value(self, sums: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return sums[..., 0] / (sums[..., 0] + (sums[..., 1] + sums[..., 2]) / 2)

    def unparsed(self, answers: Sequence[Judged]) -> np.ndarray:
        return _unparsed(answers)

    def fields(self, answers: Sequence[Judged]) -> dict[str, dict[str, float]]:
        """Return path -> F1 and numbers of pairs, sorted by path, for every path in a reference or an answer."""
        counts = tuple(Counter[str]() for _ in range(3))
        for answer in answers:
            for total, pairs in zip(counts, _compared(answer)):
                for (path, _), number in pairs.items():
                    total[path] += number
        scores = {}
        for path in sorted(set().union(*counts)):
            numbers = [total[path] for total in counts]
            scores[path] = {"f1": float(self.value(np.array(numbers))), **dict(zip(self.columns, numbers))}
        return scores


def read_receipt(text: str) -> Receipt | None:
    """Return the receipt in a text, normalised; None if there is none.

    Normalisation: keys are sorted by length, then alphabetically; a single value becomes a list of one; leaves are
    stripped texts. Values that are empty, 0, false or null are removed. From a list with a leaf, everything except
    texts and numbers is removed.
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


def _references_of(answer: Judged) -> list[Receipt]:
    receipts = [read_receipt(reference) for reference in answer.references]
    for text, receipt in zip(answer.references, receipts):
        if receipt is None:
            raise InputError(
                f"the reference {text[:80]!r} is not a receipt; give this subset another metric than cord_*"
            )
    return receipts


def _unparsed(answers: Sequence[Judged]) -> np.ndarray:
    return np.array([read_receipt(answer.answer) is None for answer in answers], bool)


def _normalise(tree: Tree) -> Receipt:
    if not tree:
        return {}
    if isinstance(tree, dict):
        values = ((key, _normalise(tree[key])) for key in sorted(tree, key=lambda key: (len(key), key)))
        return {key: value if isinstance(value, list) else [value] for key, value in values if value}
    if not isinstance(tree, list):
        return [str(tree).strip()]
    if all(isinstance(item, dict) for item in tree):
        return [receipt for item in tree if (receipt := _normalise(item))]
    # bool is an int to isinstance, and Donut removes it.
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
    """Return the right, excess and missing (path, text) pairs, for the reference with the fewest wrong pairs."""
    predicted = Counter(_fields(read_receipt(answer.answer) or {}))
    references = [Counter(_fields(reference)) for reference in _references_of(answer)]
    nearest = min(references, key=lambda one: ((predicted - one).total() + (one - predicted).total(), -one.total()))
    return predicted & nearest, predicted - nearest, nearest - predicted


def _nodes(receipt: Receipt) -> list[Node]:
    """Return the tree's nodes in postorder: one per key, a <subtree> per listed object, a leaf per text, and a root."""
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
    """Return the lowest cost of edits that convert one ordered tree into the other.

    Algorithm: Zhang and Shasha 1989, Simple fast algorithms for the editing distance between trees and related
    problems. Equal to `zss.distance` of zss 1.2.0, which also stores the edits and takes at least ten times as long.
    """
    changes = [[_change(node, other) for other in two] for node in one]
    distances = [[0] * len(two) for _ in one]
    for i in _key_roots(one):
        for j in _key_roots(two):
            _fill(one[one[i].first : i + 1], two[two[j].first : j + 1], changes, distances)
    return distances[-1][-1]


def _key_roots(nodes: list[Node]) -> list[int]:
    """Return the highest node of each leftmost leaf, in the order of nodes."""
    return sorted({node.first: at for at, node in enumerate(nodes)}.values())


def _fill(one: list[Node], two: list[Node], changes: list[list[int]], distances: list[list[int]]) -> None:
    """Fill in the distances of all subtrees on the left edges of two subtrees, from the distances of inner subtrees."""
    top, leftmost = one[0].first, two[0].first
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
            if on_edge and other.first == leftmost:
                best = distance[leftmost + y] = min(best, above[y] + change[leftmost + y])
            else:
                best = min(best, inner[other.first - leftmost] + distance[leftmost + y])
            row.append(best)
        forest.append(row)


def _change(node: Node, other: Node) -> int:
    if node.is_leaf and other.is_leaf:
        return Levenshtein.distance(node.label, other.label)
    if node.is_leaf or other.is_leaf:
        return 1 + (node if node.is_leaf else other).weight
    return int(node.label != other.label)
