"""What an evaluation gathers, its scores, and the page that shows the wrong answers first."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from dataset_builders.contracts.sample import Sample, image_digests
from dataset_builders.images import preview_png
from stages.metrics import METRICS, score
from stages.predictions import Prediction
from stages.report import Histogram, Pictures, Section, Table, write_report

OVERALL = "overall"
_WRONG_PICTURES = 48
_RIGHT_PICTURES = 12
_WRONG_ROWS = 200
_THUMBNAIL_SIDE = 160  # pixels


class Evaluation:
    """Predictions so far, by subset, and the pictures that the report will show.

    Attributes:
        predictions: in the order they came.
        num_samples: samples with at least one prediction.
    """

    def __init__(self) -> None:
        self.predictions: list[Prediction] = []
        self.shown: dict[bool, list[tuple[bytes, str]]] = {False: [], True: []}
        self._samples: dict[str, set[str]] = defaultdict(set)
        self._pictures: dict[str, set[str]] = defaultdict(set)

    @property
    def num_samples(self) -> int:
        return sum(len(keys) for keys in self._samples.values())

    def add(self, window: Sequence[Sample], predictions: Sequence[Prediction]) -> None:
        """Take in the predictions of these samples."""
        self.predictions += predictions
        by_key = {sample.key: sample for sample in window}
        for prediction in predictions:
            sample = by_key[prediction.key]
            if prediction.key not in self._samples[prediction.subset]:
                self._samples[prediction.subset].add(prediction.key)
                self._pictures[prediction.subset].update(image_digests(sample))
            kept = self.shown[prediction.correct]
            if sample.images and len(kept) < (_RIGHT_PICTURES if prediction.correct else _WRONG_PICTURES):
                kept.append((preview_png(sample.images, _THUMBNAIL_SIDE), _caption(prediction)))

    def scores(self) -> dict[str, dict[str, float]]:
        """Metric means for each subset in the order of their names, and for everything under `overall`."""
        return {name: score(rows) for name, rows in self._groups().items()}

    def counts(self) -> dict[str, dict[str, int]]:
        """Samples, answers and distinct pictures for each subset, and for everything under `overall`."""
        every = {OVERALL: set().union(*self._pictures.values())} | self._pictures
        samples = {OVERALL: self.num_samples} | {name: len(keys) for name, keys in self._samples.items()}
        return {
            name: {"samples": samples[name], "answers": len(rows), "pictures": len(every[name])}
            for name, rows in self._groups().items()
        }

    def _groups(self) -> dict[str, list[Prediction]]:
        groups: dict[str, list[Prediction]] = defaultdict(list)
        for prediction in self.predictions:
            groups[prediction.subset].append(prediction)
        return dict(sorted(groups.items())) | {OVERALL: self.predictions}


def write_evaluation_report(directory: Path, evaluation: Evaluation, skips: Mapping[str, int]) -> None:
    """report.json and report.html: scores, then the wrong answers with their pictures, then a few right ones."""
    scores, counts = evaluation.scores(), evaluation.counts()
    summary: dict[str, object] = {name.replace("_", " "): scores[OVERALL][name] for name in METRICS}
    summary |= counts[OVERALL]
    if skips:
        summary["left out"] = dict(sorted(skips.items()))
    wrong = [p for p in evaluation.predictions if not p.correct]
    sections: list[Section] = [
        _scores_table(scores, counts),
        Pictures(f"Wrong answers ({len(wrong)} in all; the first with pictures)", evaluation.shown[False]),
        _wrong_table(wrong),
        Pictures("Right answers (the first with pictures)", evaluation.shown[True]),
        Histogram("Length of the answers", [p.num_tokens for p in evaluation.predictions], "tokens"),
    ]
    write_report(directory, title="Evaluation", summary=summary, sections=sections)


def _scores_table(scores: Mapping[str, Mapping[str, float]], counts: Mapping[str, Mapping[str, int]]) -> Table:
    rows = [[name, *(scores[name][m] for m in METRICS), *counts[name].values()] for name in scores]
    return Table("Scores", ["subset", *METRICS, *counts[OVERALL]], rows)


def _wrong_table(wrong: Sequence[Prediction]) -> Table:
    columns = ["key", "turn", "question", "reference", "answer", "stopped"]
    rows = [[getattr(p, name) for name in columns] for p in wrong[:_WRONG_ROWS]]
    return Table(f"Wrong answers, the first {len(rows)} of {len(wrong)}", columns, rows)


def _caption(prediction: Prediction) -> str:
    said = prediction.answer if prediction.stopped else f"{prediction.answer} ... (cut)"
    return f"{prediction.question}\nanswer: {said}\nreference: {prediction.reference}\n{prediction.key}"
