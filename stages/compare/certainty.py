"""Confidence intervals for one score of an evaluation, and for the lead of one model over another."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from dataset_builders.errors import InputError
from stages.compare.difference import answers_of, check_same
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
from stages.shared.scoring.names import METRIC_NAMES, OVERALL
from stages.shared.scoring.subsets import metrics_of
from stages.shared.scoring.summary import SCORE
from stages.shared.scoring.table import get_metric

_COLUMNS = ("key", "turn", "subset", "question", "references", "answer", "pictures", "contaminated")


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
        self.predictions = counted(read_predictions(evaluated.dir, _COLUMNS))  # the answers that count
        self._overrides = evaluated.manifest.config.get("metrics", {})
        metric, _, subset = name.partition("/")
        self._is_score = metric == SCORE
        # By subset for `score`, in one piece for a metric; empty if the score is not computed from answers (a loss, a
        # rate of the generation) or no subset has it.
        self.subsets = _subsets_of(self.predictions, metric, subset, self._overrides)

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
        check_same(other.predictions, self.predictions)
        if not self.subsets or not other.subsets:
            return None
        if self._is_score:
            return overall_difference(other.subsets, self.subsets, bootstrap)
        return difference(other.subsets[0], self.subsets[0], bootstrap)


def _subsets_of(
    predictions: pa.Table, metric: str, subset: str, overrides: Mapping[str, Sequence[str]]
) -> list[Subset]:
    if metric != SCORE and metric not in METRIC_NAMES:
        return []
    answers = answers_of(predictions)
    names = sorted({name for name in answers.subset if subset in ("", OVERALL, name)})
    metrics = {name: metrics_of(name, overrides) for name in names}
    if metric == SCORE:
        pieces = [(metrics[name].headline, [name]) for name in names]
    else:
        pieces = [(metric, having)] if (having := [name for name in names if metric in metrics[name].names]) else []
    subsets = []
    for measured_by, members in pieces:
        chosen = answers.take([row for row, name in enumerate(answers.subset) if name in members])
        computed = get_metric(measured_by)
        statistics = computed.statistics(chosen.judged)
        subsets.append(Subset(metric=computed, statistics=statistics, groups=chosen.groups))
    return subsets
