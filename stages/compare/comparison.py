"""Two evaluations of the same questions: the gain, its interval, and the answers that differ.

`compare_predictions` compares the model before training ("base") with the trained one ("tuned"). `certainty_of` gives
the intervals of one score, and of its lead over another model's, for the registry.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.boxes import TrueBoxes
from dataset_builders.errors import InputError
from stages.evaluate.evaluation import BOOTSTRAP
from stages.evaluate.predictions import counted, read_predictions
from stages.shared.artifacts.artifact import Artifact
from stages.shared.scoring.intervals import (
    Bootstrap,
    Difference,
    Interval,
    Subset,
    difference,
    interval,
    overall,
    overall_difference,
)
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.names import METRIC_NAMES, OVERALL, SCORE
from stages.shared.scoring.subsets import SubsetMetrics, get_metric, read_metrics
from stages.shared.scoring.summary import AnswerSet, SubsetScores, score_subsets, upward_rows

_SAME = ("key", "turn", "question", "references")
_SCORED = ("key", "turn", "subset", "question", "references", "answer", "boxes", "pictures", "contaminated")


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


def compare_predictions(
    base: pa.Table, tuned: pa.Table, metrics_of: Mapping[str, SubsetMetrics], bootstrap: Bootstrap
) -> Comparison:
    """Compare two evaluations' predictions, row by row; InputError if they do not answer the same questions.
    `metrics_of` are the metrics of each subset."""
    _check_same(base, tuned)
    before, after = _answers_of(base), _answers_of(tuned)
    first, _ = score_subsets(before, metrics_of, bootstrap)
    second, _ = score_subsets(after, metrics_of, bootstrap)
    differences = {name: difference(first[name].statistics, second[name].statistics, bootstrap) for name in first}
    differences[OVERALL] = overall_difference(
        [scores.statistics for scores in first.values()], [scores.statistics for scores in second.values()], bootstrap
    )
    rows, names = np.zeros(len(before.subset)), np.array(before.subset)
    for name, scores in second.items():
        rows[names == name] = np.nan_to_num(upward_rows(scores) - upward_rows(first[name]))
    return Comparison(base=first, tuned=second, differences=differences, rows=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Certainty:
    """The confidence intervals of a model's score."""

    num_answers: int  # from which the score is computed
    score: Interval
    # The paired interval of the lead over another model's score; None if no other model answered the same questions.
    lead: Difference | None = None


def certainty_of(evaluated: Artifact, other: Artifact | None, name: str) -> Certainty | None:
    """Return the intervals of an evaluation's score of this name, and of its lead over another evaluation; None if the
    score is not computed from answers."""
    ours = ScoredAnswers(evaluated, name)
    score, lead = ours.interval(BOOTSTRAP), None
    with contextlib.suppress(InputError):  # the same samples in another order are not paired
        lead = None if other is None else ours.lead_over(ScoredAnswers(other, name), Bootstrap())
    return None if score is None else Certainty(num_answers=len(ours), score=score, lead=lead)


class ScoredAnswers:
    """The counted answers of an evaluation, arranged for one of its scores.

    Args:
        name: name of the score: `score` or a metric, without a subset or as metric/subset.
    """

    def __init__(self, evaluated: Artifact, name: str) -> None:
        self.predictions = counted(read_predictions(evaluated.dir, _SCORED))  # the answers that count
        metric, _, subset = name.partition("/")
        self._is_score = metric == SCORE
        # By subset for `score`, in one piece for a metric; empty if the score is not computed from answers (a loss, a
        # rate of the generation) or no subset has it.
        self.subsets: list[Subset] = []
        if not self._is_score and metric not in METRIC_NAMES:
            return
        answers = _answers_of(self.predictions)
        names = sorted({name for name in answers.subset if subset in ("", OVERALL, name)})
        metrics = read_metrics(evaluated.manifest.stats)
        if self._is_score:
            pieces = [(metrics[name].headline, [name]) for name in names]
        else:
            having = [name for name in names if metric in metrics[name].names]
            pieces = [(metric, having)] if having else []
        for measured_by, members in pieces:
            chosen = answers.take([row for row, name in enumerate(answers.subset) if name in members])
            computed = get_metric(measured_by)
            statistics = computed.statistics(chosen.judged)
            self.subsets.append(Subset(metric=computed, statistics=statistics, groups=chosen.groups))

    def __len__(self) -> int:
        return sum(len(subset.statistics) for subset in self.subsets)

    def interval(self, bootstrap: Bootstrap) -> Interval | None:
        """Return the interval of the score; None if there are no answers for it."""
        if not self.subsets:
            return None
        return overall(self.subsets, bootstrap) if self._is_score else interval(self.subsets[0], bootstrap)

    def lead_over(self, other: "ScoredAnswers", bootstrap: Bootstrap) -> Difference | None:
        """Return the difference of this score and the other one, by paired bootstrap; None if one has no interval.
        InputError if the two evaluations do not answer the same questions."""
        _check_same(other.predictions, self.predictions)
        if not self.subsets or not other.subsets:
            return None
        if self._is_score:
            return overall_difference(other.subsets, self.subsets, bootstrap)
        return difference(other.subsets[0], self.subsets[0], bootstrap)


def _answers_of(predictions: pa.Table) -> AnswerSet:
    columns = predictions.select(["key", "subset", "pictures"]).to_pydict()
    judged = [
        Judged(
            question=row["question"],
            references=tuple(row["references"]),
            answer=row["answer"],
            boxes=None if row["boxes"] is None else TrueBoxes.from_json(row["boxes"]),
        )
        for row in predictions.select(["question", "references", "answer", "boxes"]).to_pylist()
    ]
    return AnswerSet(subset=columns["subset"], sample=columns["key"], pictures=columns["pictures"], judged=judged)


def _check_same(base: pa.Table, tuned: pa.Table) -> None:
    """Raise InputError unless both tables answer the same questions, in the same order."""
    for name in _SAME:
        if not base[name].equals(tuned[name]):
            raise InputError(
                f"the two evaluations differ in {name} ({base.num_rows} and {tuned.num_rows} answers), so their models "
                "cannot be compared; evaluate both on the same samples with the same evaluate.max_samples_per_subset"
            )
