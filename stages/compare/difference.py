"""Comparison of two models' answers to the same questions: the gain, its interval, and the answers that differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataset_builders.errors import InputError
from stages.shared.scoring.intervals import Bootstrap, Difference, difference, overall_difference
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.names import OVERALL
from stages.shared.scoring.summary import SCORE, AnswerSet, SubsetScores, score_subsets, upward_rows

_SAME = ("key", "turn", "question", "references")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The comparison of the base and the tuned model on the same questions."""

    base: dict[str, SubsetScores]  # subset -> its scores
    tuned: dict[str, SubsetScores]
    # Tuned minus base in the headline metric of every subset; under `overall`, in the mean of these metrics, with signs
    # such that more is better.
    differences: dict[str, Difference]
    rows: np.ndarray  # (n,) gain of each answer by its subset's headline metric; above 0, the tuned model's is better

    def gains(self) -> dict[str, tuple[float, float]]:
        """Return the low and the high end of each gain, above 0 if tuned is better: for `score`, and for each subset's
        `score` and headline metric."""
        bounds = {SCORE: (self.differences[OVERALL].low, self.differences[OVERALL].high)}
        for name, scores in self.tuned.items():
            low, high = self.differences[name].low, self.differences[name].high
            if not scores.statistics.metric.higher_is_better:
                low, high = -high, -low
            bounds |= {f"{SCORE}/{name}": (low, high), f"{scores.metrics.headline}/{name}": (low, high)}
        return bounds


def answers_of(predictions: pa.Table) -> AnswerSet:
    columns = predictions.select(["key", "subset", "question", "references", "answer", "pictures"]).to_pydict()
    judged = [
        Judged(question=question, references=tuple(references), answer=answer)
        for question, references, answer in zip(columns["question"], columns["references"], columns["answer"])
    ]
    return AnswerSet(subset=columns["subset"], sample=columns["key"], pictures=columns["pictures"], judged=judged)


def compare_predictions(
    base: pa.Table, tuned: pa.Table, overrides: Mapping[str, Sequence[str]], bootstrap: Bootstrap
) -> Comparison:
    """Compare two evaluations' predictions, row by row; InputError if they do not answer the same questions."""
    check_same(base, tuned)
    before, after = answers_of(base), answers_of(tuned)
    first, _ = score_subsets(before, overrides, bootstrap)
    second, _ = score_subsets(after, overrides, bootstrap)
    differences = {name: difference(first[name].statistics, second[name].statistics, bootstrap) for name in first}
    differences[OVERALL] = overall_difference(
        [scores.statistics for scores in first.values()], [scores.statistics for scores in second.values()], bootstrap
    )
    return Comparison(base=first, tuned=second, differences=differences, rows=_rows(before.subset, first, second))


def _rows(subsets: Sequence[str], first: Mapping[str, SubsetScores], second: Mapping[str, SubsetScores]) -> np.ndarray:
    rows, names = np.zeros(len(subsets)), np.array(subsets)
    for name, scores in second.items():
        rows[names == name] = np.nan_to_num(upward_rows(scores) - upward_rows(first[name]))
    return rows


def check_same(base: pa.Table, tuned: pa.Table) -> None:
    """Raise InputError unless both tables answer the same questions, in the same order."""
    for name in _SAME:
        if not base[name].equals(tuned[name]):
            raise InputError(
                f"the two evaluations differ in {name} ({base.num_rows} and {tuned.num_rows} answers), so their models "
                "cannot be compared; evaluate both on the same samples with the same evaluate.max_samples_per_subset"
            )
