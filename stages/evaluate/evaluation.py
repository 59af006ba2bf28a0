"""The predictions of an evaluation, their scores, and the scores' intervals.

Two kinds of figures need no right answer: the health of the generation (how many answers stop, how many are empty, how
long they are), and the loss of the reference answers, which the trainer wrote for each held-out sample.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from dataset_builders.contracts.sample import whole_key
from stages.evaluate.predictions import Prediction, Scored
from stages.shared.scoring.box_readings import BetterReading, better_reading
from stages.shared.scoring.intervals import Bootstrap, Interval
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.names import HEALTH_NAMES, LOSS, OVERALL, PERPLEXITY
from stages.shared.scoring.subsets import SubsetMetrics
from stages.shared.scoring.summary import AnswerSet, SubsetScores, score_subsets, table_of, upward_rows, upwards
from trainer.contract.result import HeldoutRow

BOOTSTRAP = Bootstrap(resamples=2000)  # for the intervals; a comparison of two models uses more resamples
HEALTH: dict[str, Callable[[Prediction], float]] = {
    "stop_rate": lambda a: a.stopped,  # the cheapest detector of an untrained end-of-turn token
    "empty_rate": lambda a: not a.answer.strip(),
    "mean_answer_tokens": lambda a: a.num_tokens,
}
assert tuple(HEALTH) == HEALTH_NAMES
_POINT = Bootstrap(resamples=1)  # for a value whose interval is not used
_LARGEST = 700.0  # exp of a larger number is not a float64


class Evaluation:
    """Predictions by sample, and their scores after a call of `score`.

    Args:
        losses: key of a sample -> the loss of its reference answers, if the trainer measured it.
    """

    def __init__(self, losses: Mapping[str, HeldoutRow] | None = None) -> None:
        self.predictions: list[Prediction] = []  # in the order in which they were added
        self.table: dict[str, dict[str, float]] = {}  # by subset or overall, and metric; without contaminated samples
        self.subsets: dict[str, SubsetScores] = {}  # subset -> its scores, without contaminated samples
        self.overall: Interval | None = None  # the mean of the subsets' headlines; None before `score`
        self.with_contaminated: dict[str, float] = {}  # subset or overall -> `score` with them; empty if there are none
        self.better_readings: dict[str, BetterReading] = {}  # subset -> another reading of boxes that fits better
        self._losses = losses or {}
        self._pictures: list[list[str]] = []
        self._rows: dict[str, list[int]] = defaultdict(list)
        self._scored: list[Scored] = []

    def add(self, pictures: list[str], predictions: Sequence[Prediction]) -> None:
        """Add the predictions of a sample; `pictures` are the digests of its images."""
        for prediction in predictions:
            self._rows[prediction.key].append(len(self.predictions))
            self.predictions.append(prediction)
            self._pictures.append(pictures)

    def num_boxes(self, subset: str) -> list[int | None]:
        """Return the number of true boxes of each answer of a subset; None for an answer that is no boxes."""
        boxes = [prediction.boxes for prediction in self.predictions if prediction.subset == subset]
        return [None if each is None else len(each.boxes) for each in boxes]

    def score(self, metrics_of: Mapping[str, SubsetMetrics]) -> None:
        """Score all predictions that were added; ValueError if none of them counts.

        Args:
            metrics_of: subset -> its metrics, for all subsets.
        """
        predictions, rows = self.predictions, self._counted()
        judged = [
            Judged(question=p.question, references=p.references, answer=p.answer, boxes=p.boxes) for p in predictions
        ]
        subsets, samples = ([getattr(p, name) for p in predictions] for name in ("subset", "key"))
        everything = AnswerSet(subset=subsets, sample=samples, pictures=self._pictures, judged=judged)
        self._scored = [Scored("", None)] * len(predictions)
        # Contaminated samples get scores per answer, but no other score counts them.
        if len(rows) < len(predictions):
            scores, overall = score_subsets(everything, metrics_of, _POINT)
            self._set_rows(scores, self._groups(range(len(predictions))))
            self.with_contaminated = {name: upwards(s) for name, s in scores.items()} | {OVERALL: overall.value}
        counted, groups = everything.take(rows), self._groups(rows)
        self.subsets, self.overall = score_subsets(counted, metrics_of, BOOTSTRAP)
        self._set_rows(self.subsets, groups)
        self.table = table_of(counted, self.subsets, self.overall)
        for name in self.subsets:
            answers = counted.of(name)
            if (found := better_reading(answers.judged, answers.groups, BOOTSTRAP)) is not None:
                self.better_readings[name] = found
        for name, members in groups.items():
            answers = [predictions[row] for row in members]
            self.table[name] |= health(answers) | reference_loss(self._losses, {answer.key for answer in answers})

    def _set_rows(self, scores_of: Mapping[str, SubsetScores], groups: Mapping[str, Sequence[int]]) -> None:
        for name, scores in scores_of.items():
            for row, value in zip(groups[name], upward_rows(scores).tolist()):
                self._scored[row] = Scored(scores.metrics.headline, None if math.isnan(value) else value)

    def of(self, key: str) -> list[tuple[Prediction, Scored]]:
        """Return a sample's predictions with their scores; empty if the model could not be asked."""
        return [(self.predictions[row], self._scored[row]) for row in self._rows.get(key, [])]

    def scored(self) -> list[tuple[Prediction, Scored]]:
        """Return all predictions with their scores, in the order in which they were added."""
        return list(zip(self.predictions, self._scored))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return, for each subset, and under `overall` for all: the counted samples, answers and distinct images, and
        the contaminated samples, which are not counted."""
        counted = self._groups(self._counted())
        return {
            name: {
                "samples": len({self.predictions[row].key for row in counted.get(name, ())}),
                "answers": len(counted.get(name, ())),
                "pictures": len({picture for row in counted.get(name, ()) for picture in self._pictures[row]}),
                "contaminated": len({p.key for p in (self.predictions[row] for row in rows) if p.contaminated}),
            }
            for name, rows in self._groups(range(len(self.predictions))).items()
        }

    def _counted(self) -> list[int]:
        return [row for row, prediction in enumerate(self.predictions) if prediction.contaminated is None]

    def _groups(self, rows: Iterable[int]) -> dict[str, list[int]]:
        """Return subset -> its rows among `rows`, which ascend; all rows under `overall`."""
        groups: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            groups[self.predictions[row].subset].append(row)
        return dict(sorted(groups.items())) | {OVERALL: list(rows)}


def health(answers: Sequence[Prediction]) -> dict[str, float]:
    """Return the mean of each figure over a set of answers; ValueError if it is empty."""
    if not answers:
        raise ValueError("no answers to score")
    return {name: sum(metric(answer) for answer in answers) / len(answers) for name, metric in HEALTH.items()}


def by_sample(rows: Iterable[HeldoutRow]) -> dict[str, HeldoutRow]:
    """Return key of a sample -> its loss; for a cut conversation, the mean over all its parts."""
    parts: dict[str, list[HeldoutRow]] = {}
    for row in rows:
        parts.setdefault(whole_key(row.key), []).append(row)
    return {
        key: HeldoutRow(key=key, loss=_mean_loss(of_key), loss_tokens=sum(row.loss_tokens for row in of_key))
        if len(of_key) > 1
        else of_key[0]
        for key, of_key in parts.items()
    }


def reference_loss(losses: Mapping[str, HeldoutRow], keys: Collection[str]) -> dict[str, float]:
    """Return the mean loss over the loss tokens of these samples, in nats per token, and its exponential.

    Samples that are in no bin (too long) are not counted; the result is empty if no token is left.
    """
    rows = [losses[key] for key in set(keys) if key in losses]
    loss = _mean_loss(rows)
    return {} if loss is None else {LOSS: loss, PERPLEXITY: math.exp(min(loss, _LARGEST))}


def _mean_loss(rows: Sequence[HeldoutRow]) -> float | None:
    tokens = sum(row.loss_tokens for row in rows)
    return math.fsum(row.loss * row.loss_tokens for row in rows if row.loss is not None) / tokens if tokens else None
