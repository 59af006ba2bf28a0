"""Exact match: equality of texts, without regard to case and white space."""

from stages.shared.scoring.metrics.contract import Judged, MeanMetric


def normalize(text: str) -> str:
    """Return the text in lower case, stripped, with each run of white space replaced by one space.

    Nothing else changes: punctuation, accents, articles, number words and the spelling of numbers all count.
    """
    return " ".join(text.lower().split())


class ExactMatch(MeanMetric):
    """The share of answers that equal a reference."""

    name = "exact_match"
    definition = (
        "1 where the answer equals any reference, both in lower case, stripped and with runs of white space made one "
        "space; else 0; the mean over answers"
    )
    source = (
        "lmms-eval 0.7.3 api/metrics.py exact_match_hf_evaluate(ignore_case=True); ours also evens out white space, "
        "which a generated answer holds by chance, and takes several references"
    )

    def score_one(self, answer: Judged) -> float:
        text = normalize(answer.answer)
        return float(any(text == normalize(reference) for reference in answer.references))
