"""The page of an evaluation: its scores, then the answers that are not fully right."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dataset_builders.contracts.sample import Sample
from dataset_builders.pictures.images import preview_png
from stages.evaluate.evaluation import BOOTSTRAP, Evaluation
from stages.evaluate.predictions import Prediction, Scored
from stages.shared.pages.report import Histogram, Pictures, Section, Table, write_report
from stages.shared.scoring.names import OVERALL
from stages.shared.scoring.summary import SCORE

_WRONG_PICTURES = 48
_RIGHT_PICTURES = 12
_WRONG_ROWS = 200
_THUMBNAIL_SIDE = 160  # pixels


class Gallery:
    """The first images with answers that are not fully right, and a few images with right answers.

    Attributes:
        shown: whether the answer is right -> key and turn -> image and caption.
    """

    def __init__(self) -> None:
        self.shown: dict[bool, dict[tuple[str, int], tuple[bytes, str]]] = {False: {}, True: {}}

    def add(self, window: Sequence[Sample], rows: Sequence[tuple[Prediction, Scored]]) -> None:
        """Keep the images of these samples that the page will show."""
        images = {sample.key: sample.images for sample in window}
        for prediction, scored in rows:
            pictures = self.shown[is_right := _is_right(scored)]
            if images[prediction.key] and len(pictures) < (_RIGHT_PICTURES if is_right else _WRONG_PICTURES):
                picture = preview_png(images[prediction.key], _THUMBNAIL_SIDE)
                pictures[prediction.key, prediction.turn] = (picture, _caption(prediction, scored))


def write_evaluation_report(
    directory: Path, evaluation: Evaluation, gallery: Gallery, skips: Mapping[str, int]
) -> None:
    """Write report.json: scores, then wrong answers, those with images first, then a few right ones."""
    counts = evaluation.counts()
    summary: dict[str, object] = {SCORE: evaluation.table[OVERALL][SCORE], **counts[OVERALL]}
    if skips:
        summary["left out"] = dict(sorted(skips.items()))
    metrics = list(dict.fromkeys(metric for values in evaluation.table.values() for metric in values))
    scores = [[name, *(values.get(metric) for metric in metrics)] for name, values in evaluation.table.items()]
    wrong = [(p, s) for p, s in evaluation.scored() if not _is_right(s)]
    others = [(p, s) for p, s in wrong if (p.key, p.turn) not in gallery.shown[False]]
    columns = ["key", "turn", "question", "reference", "answer", "stopped"]
    rows = [[*(getattr(p, name) for name in columns), s.metric, s.score] for p, s in others[:_WRONG_ROWS]]
    pictures = {is_right: list(shown.values()) for is_right, shown in gallery.shown.items()}
    sections: list[Section] = [
        _headlines(evaluation, counts),
        *_contaminated(evaluation, counts),
        Table("All metrics", ["subset", *metrics], scores),
        *_fields(evaluation),
        Pictures(f"Not fully right ({len(wrong)} in all; the first with pictures)", pictures[False]),
        Table(f"Not fully right, {len(rows)} of the {len(others)} others", [*columns, "metric", "score"], rows),
        Pictures("Right answers (the first with pictures)", pictures[True]),
        Histogram("Length of the answers", [p.num_tokens for p in evaluation.predictions], "tokens"),
    ]
    write_report(directory, title="Evaluation", summary=summary, sections=sections)


def _is_right(scored: Scored) -> bool:
    return scored.score is not None and scored.score >= 1


def _headlines(evaluation: Evaluation, counts: Mapping[str, Mapping[str, int]]) -> Table:
    names, rows = evaluation.names(), []
    for name, headline in evaluation.headlines().items():
        metric, why = names.get(name, (SCORE, "the mean of the subsets' headlines, each counting the same"))
        rows.append(
            [name, metric, headline.value, f"{headline.low:.4f} to {headline.high:.4f}", *counts[name].values(), why]
        )
    level = f"{BOOTSTRAP.level:.0%} interval"
    return Table("Headline of each subset", ["subset", "metric", "value", level, *counts[OVERALL], "why"], rows)


def _contaminated(evaluation: Evaluation, counts: Mapping[str, Mapping[str, int]]) -> list[Table]:
    """Return one table of scores that include contaminated samples; empty if there are no such samples."""
    rows = [
        [name, counts[name]["contaminated"], evaluation.table.get(name, {}).get(SCORE), value]
        for name, value in evaluation.with_contaminated.items()
        if counts[name]["contaminated"]
    ]
    title = "Held-out samples with a picture that occurs in train or looks alike, in no score but here"
    return [Table(title, ["subset", "samples", "score", "score with them"], rows)] if rows else []


def _fields(evaluation: Evaluation) -> list[Table]:
    tables = []
    for subset, metrics in evaluation.fields().items():
        for metric, fields in metrics.items():
            columns = list(dict.fromkeys(name for values in fields.values() for name in values))
            rows = [[field, *(values[name] for name in columns)] for field, values in fields.items()]
            titles = [name.replace("_", " ") for name in columns]
            tables.append(Table(f"{metric} of {subset} by field", ["field", *titles], rows))
    return tables


def _caption(prediction: Prediction, scored: Scored) -> str:
    answer = prediction.answer if prediction.stopped else f"{prediction.answer} ... (cut)"
    notes = "" if scored.score is None else f"\n{scored.metric} {scored.score:.3g}"
    if prediction.contaminated is not None:
        is_near = prediction.contaminated == "near"
        notes += "\nlooks like a picture in train" if is_near else f"\noccurs in train ({prediction.contaminated})"
    return f"{prediction.question}\nanswer: {answer}\nreference: {prediction.reference}{notes}\n{prediction.key}"
