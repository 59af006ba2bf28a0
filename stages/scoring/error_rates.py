"""Character and word error rate of a whole set of answers."""

from abc import abstractmethod
from collections.abc import Sequence

import jiwer
import numpy as np

from stages.scoring.contract import Judged, Metric


def _ratio(edits: float, length: float) -> float:
    """An error rate; that of an empty reference is 0 for an empty answer, and worse than all others for another."""
    return edits / length if length else (0.0 if not edits else float("inf"))


class ErrorRate(Metric):
    """Edits over the length of the references, summed over answers. Of several references that of the lowest rate."""

    columns = ("edits", "length")
    higher_is_better = False

    @abstractmethod
    def edits(self, answer: str, reference: str) -> tuple[int, int]:
        """Insertions, deletions and substitutions that make the reference the answer, and the reference's length."""

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        rows = [self._best(answer) for answer in answers]
        return np.array(rows, dtype=np.float64).reshape(-1, len(self.columns))

    def value(self, sums: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums[..., 0] / sums[..., 1]

    def _best(self, answer: Judged) -> tuple[int, int]:
        counts = [self.edits(answer.answer, reference) for reference in answer.references]
        return min(counts, key=lambda count: (_ratio(*count), count[1]))


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
        found = jiwer.process_characters(reference, answer)
        return _counts(found)


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
        found = jiwer.process_words(" ".join(reference.split()), " ".join(answer.split()))
        return _counts(found)


def _counts(found: jiwer.WordOutput | jiwer.CharacterOutput) -> tuple[int, int]:
    changed = found.substitutions + found.deletions
    return changed + found.insertions, changed + found.hits
