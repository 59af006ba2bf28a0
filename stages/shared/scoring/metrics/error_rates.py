"""Character and word error rate of a whole set of answers."""

from abc import abstractmethod
from collections.abc import Sequence

import jiwer
import numpy as np

from stages.shared.scoring.metrics.contract import Judged, MeanMetric, Metric


def _ratio(edits: float, length: float) -> float:
    """Return an error rate. For an empty reference it is 0 if the answer is empty, else infinite."""
    return edits / length if length else (0.0 if not edits else float("inf"))


class ErrorRate(Metric):
    """Edits over the length of the references, both summed over answers. Of several references, the best counts."""

    columns = ("edits", "length")
    higher_is_better = False
    value = MeanMetric.value

    @abstractmethod
    def edits(self, answer: str, reference: str) -> tuple[int, int]:
        """Return the number of edits that convert the reference into the answer, and the reference's length."""

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        rows = []
        for answer in answers:
            counts = [self.edits(answer.answer, reference) for reference in answer.references]
            rows.append(min(counts, key=lambda count: (_ratio(*count), count[1])))
        return np.array(rows, dtype=np.float64).reshape(-1, len(self.columns))


class CER(ErrorRate):
    """Character error rate."""

    name = "cer"
    definition = (
        "character edits between answers and references over characters of the references, both summed over answers; "
        "texts stripped, case and punctuation count; above 1 where answers run on"
    )
    source = (
        "jiwer 4.0.0 process_characters with its default transform; of several references that of the lowest rate, "
        "and an empty one has length 0"
    )

    def edits(self, answer: str, reference: str) -> tuple[int, int]:
        return _counts(jiwer.process_characters(reference, answer))


class WER(ErrorRate):
    """Word error rate."""

    name = "wer"
    definition = (
        "word edits between answers and references over words of the references, both summed over answers; words are "
        "what white space parts, case and punctuation count; above 1 where answers run on"
    )
    source = (
        "jiwer 4.0.0 process_words; ours parts words at any white space, its default transform at blanks, so that "
        "there a line end joins two words; of several references that of the lowest rate"
    )

    def edits(self, answer: str, reference: str) -> tuple[int, int]:
        return _counts(jiwer.process_words(" ".join(reference.split()), " ".join(answer.split())))


def _counts(alignment: jiwer.WordOutput | jiwer.CharacterOutput) -> tuple[int, int]:
    changed = alignment.substitutions + alignment.deletions
    return changed + alignment.insertions, changed + alignment.hits
