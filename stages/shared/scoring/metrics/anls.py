"""ANLS: the similarity of an answer's and a reference's spelling; a similarity below 0.5 counts as 0."""

from rapidfuzz.distance import Levenshtein

from stages.shared.scoring.metrics.contract import Judged, MeanMetric
from stages.shared.scoring.metrics.exact_match import normalize

THRESHOLD = 0.5


def similarity(answer: str, reference: str) -> float:
    """Return 1 - Levenshtein distance / length of the longer text, for normalised texts; 1 for two empty texts."""
    return Levenshtein.normalized_similarity(normalize(answer), normalize(reference))


class ANLS(MeanMetric):
    """Average normalised Levenshtein similarity."""

    name = "anls"
    definition = (
        "the highest 1 - lev(answer, reference) / max(len) over references, texts in lower case with runs of white "
        "space made one space; 0 where that is below 0.5; the mean over answers"
    )
    source = (
        "Biten et al., arXiv 1905.13648, equation 1. At a similarity of just 0.5 the formula there gives 0; ours keeps "
        "0.5, as pix2struct, lmms-eval, VLMEvalKit and anls-star do. lmms-eval 0.7.3 (api/metrics.py anls) and "
        "VLMEvalKit divide by lengths before white space is evened out, so that blanks raise their score; ours by "
        "those after, as the formula does"
    )

    def score_one(self, answer: Judged) -> float:
        best = max(similarity(answer.answer, reference) for reference in answer.references)
        return best if best >= THRESHOLD else 0.0
