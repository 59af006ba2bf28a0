"""What an evaluation gathers, its scores, and the page that shows the worst answers first."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dataset_builders.contracts.sample import Sample
from dataset_builders.images import preview_png
from stages.metrics import health
from stages.predictions import Prediction, Scored
from stages.reference_loss import reference_loss
from stages.report import Histogram, Pictures, Section, Table, write_report
from stages.scoring.contract import Judged
from stages.scoring.intervals import Bootstrap, Interval
from stages.scoring.names import OVERALL
from stages.scoring.summary import SCORE, Answered, SubsetScores, score_subsets, table_of, upward_rows, upwards
from trainer.contract import HeldoutRow

_WRONG_PICTURES = 48
_RIGHT_PICTURES = 12
_WRONG_ROWS = 200
_THUMBNAIL_SIDE = 160  # pixels
BOOTSTRAP = Bootstrap(resamples=2000)  # of the intervals; two models are compared with more
_POINT = Bootstrap(resamples=1)  # where only the value is looked at


class Evaluation:
    """Predictions by sample, and what they are worth once `score` was called.

    Args:
        overrides: subset -> its metrics, for those that do not have the table's.
        losses: key of the sample -> the loss of its reference answers, where the trainer measured it.

    Attributes:
        predictions: in the order they came.
        table: {subset or overall: {metric: value}}, without contaminated samples.
        with_contaminated: subset or overall -> `score` if they counted; empty where there are none.
    """

    def __init__(self, overrides: Mapping[str, Sequence[str]], losses: Mapping[str, HeldoutRow] | None = None) -> None:
        self.predictions: list[Prediction] = []
        self.table: dict[str, dict[str, float]] = {}
        self.with_contaminated: dict[str, float] = {}
        self._overrides, self._losses = overrides, losses or {}
        self._pictures: list[list[str]] = []
        self._rows: dict[str, list[int]] = defaultdict(list)
        self._scores: dict[str, SubsetScores] = {}
        self._scored: list[Scored] = []
        self._overall: Interval | None = None

    def add(self, pictures: list[str], predictions: Sequence[Prediction]) -> None:
        """Take in the predictions of a sample.

        Args:
            pictures: digests of its pictures.
        """
        for prediction in predictions:
            self._rows[prediction.key].append(len(self.predictions))
            self.predictions.append(prediction)
            self._pictures.append(pictures)

    def score(self) -> None:
        """Score what was added. Contaminated samples get scores of their own but count in no other.

        Raises:
            ValueError: nothing was added that counts.
        """
        every = self._answered()
        self._scored = [Scored("", None)] * len(self.predictions)
        if len(self._counted()) < len(self.predictions):
            scores, overall = score_subsets(every, self._overrides, _POINT)
            self._set_rows(scores, self._groups(range(len(self.predictions))))
            self.with_contaminated = {n: upwards(found) for n, found in scores.items()} | {OVERALL: overall.value}
        answered, groups = every.take(self._counted()), self._groups(self._counted())
        self._scores, self._overall = score_subsets(answered, self._overrides, BOOTSTRAP)
        self._set_rows(self._scores, groups)
        table = table_of(answered, self._scores, self._overall)
        self.table = {name: table[name] | self._beside(rows) for name, rows in groups.items()}

    def _beside(self, rows: Sequence[int]) -> dict[str, float]:
        """What is said of answers whatever their metric."""
        predictions = [self.predictions[row] for row in rows]
        return health(predictions) | reference_loss(self._losses, {p.key for p in predictions})

    def _answered(self) -> Answered:
        judged = [Judged(question=p.question, references=p.references, answer=p.answer) for p in self.predictions]
        subsets, samples = ([getattr(p, name) for p in self.predictions] for name in ("subset", "key"))
        return Answered(subset=subsets, sample=samples, pictures=self._pictures, judged=judged)

    def _set_rows(self, scores: Mapping[str, SubsetScores], groups: Mapping[str, Sequence[int]]) -> None:
        for name, found in scores.items():
            for row, value in zip(groups[name], upward_rows(found).tolist()):
                self._scored[row] = Scored(found.metrics.headline, None if math.isnan(value) else value)

    def of(self, key: str) -> list[tuple[Prediction, Scored]]:
        """The predictions of a sample with their scores; none for one that could not be asked."""
        return [(self.predictions[row], self._scored[row]) for row in self._rows.get(key, [])]

    def scored(self) -> list[tuple[Prediction, Scored]]:
        """All of them, in the order they came."""
        return list(zip(self.predictions, self._scored))

    def headlines(self) -> dict[str, Interval]:
        """The headline metric of every subset, and under `overall` the mean of them, with their intervals."""
        found = {name: scores.headline for name, scores in self._scores.items()}
        return found if self._overall is None else found | {OVERALL: self._overall}

    def names(self) -> dict[str, tuple[str, str]]:
        """Subset -> its headline metric, and why it has that."""
        return {name: (scores.metrics.headline, scores.metrics.reason) for name, scores in self._scores.items()}

    def fields(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """Subset -> metric -> field -> its scores, where a metric of the subset knows fields."""
        return {name: scores.fields for name, scores in self._scores.items() if scores.fields}

    def counts(self) -> dict[str, dict[str, int]]:
        """Samples, answers and distinct pictures that count, and contaminated samples, which do not, for each subset,
        and for everything under `overall`."""
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
        """Subset -> those of these rows that are of it; all of them under `overall`."""
        groups: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            groups[self.predictions[row].subset].append(row)
        return dict(sorted(groups.items())) | {OVERALL: sorted(row for found in groups.values() for row in found)}


class Gallery:
    """The first pictures with answers that are not fully right, and a few that are."""

    def __init__(self) -> None:
        self.shown: dict[bool, list[tuple[bytes, str]]] = {False: [], True: []}

    def add(self, window: Sequence[Sample], rows: Sequence[tuple[Prediction, Scored]]) -> None:
        """Take what is still wanted of these samples."""
        images = {sample.key: sample.images for sample in window}
        for prediction, scored in rows:
            kept = self.shown[is_right := _is_right(scored)]
            if images[prediction.key] and len(kept) < (_RIGHT_PICTURES if is_right else _WRONG_PICTURES):
                kept.append((preview_png(images[prediction.key], _THUMBNAIL_SIDE), _caption(prediction, scored)))


def write_evaluation_report(
    directory: Path, evaluation: Evaluation, gallery: Gallery, skips: Mapping[str, int]
) -> None:
    """report.json and report.html: scores, then the wrong answers with their pictures, then a few right ones."""
    counts = evaluation.counts()
    summary: dict[str, object] = {name.replace("_", " "): value for name, value in evaluation.table[OVERALL].items()}
    summary |= counts[OVERALL]
    if skips:
        summary["left out"] = dict(sorted(skips.items()))
    wrong = [(p, s) for p, s in evaluation.scored() if not _is_right(s)]
    sections: list[Section] = [
        _headlines(evaluation, counts),
        *_contaminated(evaluation, counts),
        _scores_table(evaluation.table),
        *_fields(evaluation),
        Pictures(f"Not fully right ({len(wrong)} in all; the first with pictures)", gallery.shown[False]),
        _wrong_table(wrong),
        Pictures("Right answers (the first with pictures)", gallery.shown[True]),
        Histogram("Length of the answers", [p.num_tokens for p in evaluation.predictions], "tokens"),
    ]
    write_report(directory, title="Evaluation", summary=summary, sections=sections)


def _is_right(scored: Scored) -> bool:
    return scored.score is not None and scored.score >= 1


def _headlines(evaluation: Evaluation, counts: Mapping[str, Mapping[str, int]]) -> Table:
    names, rows = evaluation.names(), []
    for name, found in evaluation.headlines().items():
        metric, why = names.get(name, (SCORE, "the mean of the subsets' headlines, each counting the same"))
        rows.append([name, metric, found.value, f"{found.low:.4f} to {found.high:.4f}", *counts[name].values(), why])
    level = f"{BOOTSTRAP.level:.0%} interval"
    return Table("Headline of each subset", ["subset", "metric", "value", level, *counts[OVERALL], "why"], rows)


def _contaminated(evaluation: Evaluation, counts: Mapping[str, Mapping[str, int]]) -> list[Table]:
    """What the score would be if samples with pictures of train counted; no table where there are none."""
    rows = [
        [name, counts[name]["contaminated"], evaluation.table.get(name, {}).get(SCORE), value]
        for name, value in evaluation.with_contaminated.items()
        if counts[name]["contaminated"]
    ]
    title = "Held-out samples with a picture that occurs in train, in no score but here"
    return [Table(title, ["subset", "samples", "score", "score with them"], rows)] if rows else []


def _scores_table(table: Mapping[str, Mapping[str, float]]) -> Table:
    metrics = list(dict.fromkeys(metric for values in table.values() for metric in values))
    return Table("All metrics", ["subset", *metrics], [[n, *(v.get(m) for m in metrics)] for n, v in table.items()])


def _fields(evaluation: Evaluation) -> list[Table]:
    tables = []
    for subset, metrics in evaluation.fields().items():
        for metric, fields in metrics.items():
            columns = list(dict.fromkeys(name for values in fields.values() for name in values))
            rows = [[field, *(values[name] for name in columns)] for field, values in fields.items()]
            titles = [name.replace("_", " ") for name in columns]
            tables.append(Table(f"{metric} of {subset} by field", ["field", *titles], rows))
    return tables


def _wrong_table(wrong: Sequence[tuple[Prediction, Scored]]) -> Table:
    columns = ["key", "turn", "question", "reference", "answer", "stopped"]
    rows = [[*(getattr(p, name) for name in columns), s.metric, s.score] for p, s in wrong[:_WRONG_ROWS]]
    return Table(f"Not fully right, the first {len(rows)} of {len(wrong)}", [*columns, "metric", "score"], rows)


def _caption(prediction: Prediction, scored: Scored) -> str:
    said = prediction.answer if prediction.stopped else f"{prediction.answer} ... (cut)"
    worth = "" if scored.score is None else f"\n{scored.metric} {scored.score:.3g}"
    worth += "" if prediction.contaminated is None else f"\noccurs in train ({prediction.contaminated})"
    return f"{prediction.question}\nanswer: {said}\nreference: {prediction.reference}{worth}\n{prediction.key}"
