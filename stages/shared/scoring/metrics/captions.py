"""Scores of captions: CIDEr-D, corpus BLEU-4 and ROUGE-L over the words of `ptb_tokens`, equal to COCO's scores."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from rapidfuzz.distance import LCSseq
from sacrebleu.metrics import BLEU

from stages.shared.scoring.metrics.contract import Judged, MeanMetric, SumMetric
from stages.shared.scoring.metrics.ptb_tokens import words_of

_MAX_ORDER = 4
_SIGMA = 6.0
_BETA = 1.2

Ngram = tuple[str, ...]
# (tf-idf weights of a text's n-grams, its norm per order, its length)
Vector = tuple[dict[Ngram, float], np.ndarray, int]


class Cider(SumMetric):
    name = "cider"
    definition = (
        "CIDEr-D: 10 times the mean over 1- to 4-grams and over references of the clipped tf-idf cosine, times"
        " exp(-(length difference)^2 / (2 * 6^2)); mean over answers. idf is log(answers / answers with the n-gram in a"
        " reference), so a set of one answer scores 0, and a score holds for its set alone"
    )
    source = (
        "Vedantam et al. 2015, arXiv 1411.5726; pycocoevalcap 1.2, cider/cider_scorer.py, on words of"
        " tokenizer/ptbtokenizer.py. Words without Java differ where ptb_tokens.py says so"
    )
    columns = ("score", "answers")
    value = MeanMetric.value

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        """Return (n, 2) float64. Document frequencies come from all references, so a row depends on all answers."""
        if not answers:
            return np.zeros((0, 2))
        references = [[_count_ngrams(text) for text in answer.references] for answer in answers]
        frequency = Counter(ngram for texts in references for ngram in set().union(*texts))
        log_answers = np.log(float(len(answers)))
        idf = {ngram: log_answers - np.log(float(number)) for ngram, number in frequency.items()}
        rows = []
        for answer, texts in zip(answers, references):
            vector = _vector(_count_ngrams(answer.answer), idf, log_answers)
            scores = [_similarity(vector, _vector(text, idf, log_answers)) for text in texts]
            rows.append((10 * np.mean(scores), 1.0))
        return np.array(rows)


class Bleu(SumMetric):
    name = "bleu4"
    definition = (
        "corpus BLEU of 1- to 4-grams in [0, 1], without smoothing: brevity penalty, against the reference nearest in"
        " length (the shorter of two), times the geometric mean of clipped precisions; lower case"
    )
    source = (
        "Papineni et al. 2002; counts by sacrebleu 2.6 with tokenize='none' over words of ptb_tokens.py, so that it is"
        " Bleu_4 of pycocoevalcap 1.2, which adds 1e-15 to matches and is about 1e-4 where no 4-gram matches, 0 here."
        " sacrebleu's own words ('13a') and its smoothing give other numbers, times 100"
    )
    columns = (
        *(f"matches_{order}" for order in range(1, _MAX_ORDER + 1)),
        *(f"ngrams_{order}" for order in range(1, _MAX_ORDER + 1)),
        "answer_words",
        "reference_words",
    )

    def statistics(self, answers: Sequence[Judged]) -> np.ndarray:
        # effective_order changes only sentence scores, which are not used, and prevents warnings about them.
        bleu = BLEU(tokenize="none", force=True, effective_order=True)
        rows = []
        for answer in answers:
            score = bleu.sentence_score(_spaced(answer.answer), [_spaced(text) for text in answer.references])
            rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
        return np.array(rows, np.float64).reshape(-1, len(self.columns))

    def value(self, sums: np.ndarray) -> np.ndarray:
        sums = np.asarray(sums)
        matches, ngrams = sums[..., :_MAX_ORDER], sums[..., _MAX_ORDER : 2 * _MAX_ORDER]
        words, reference_words = sums[..., -2], sums[..., -1]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(matches / ngrams)
            penalty = np.minimum(0.0, 1 - reference_words / words)
            scores = np.where(matches[..., -1] > 0, np.exp(penalty + logs.mean(axis=-1)), 0.0)
        return np.where(words + reference_words > 0, scores, np.nan)


class RougeL(MeanMetric):
    name = "rouge_l"
    definition = (
        "F of the longest common subsequence of words with beta 1.2: (1 + b^2) P R / (R + b^2 P), P and R each the best"
        " over references; mean over answers; two texts without words are equal"
    )
    source = "Lin 2004; pycocoevalcap 1.2, rouge/rouge.py, on words of tokenizer/ptbtokenizer.py as ptb_tokens.py"

    def score_one(self, answer: Judged) -> float:
        # pycocoevalcap treats a text without words as one empty word.
        words = words_of(answer.answer) or ("",)
        precision = recall = 0.0
        for text in answer.references:
            reference = words_of(text) or ("",)
            common = LCSseq.similarity(words, reference)
            precision, recall = max(precision, common / len(words)), max(recall, common / len(reference))
        if precision == 0 or recall == 0:
            return 0.0
        return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


def _spaced(text: str) -> str:
    return " ".join(words_of(text))


def _count_ngrams(text: str) -> Counter[Ngram]:
    # Split again, as pycocoevalcap does: a telephone number is one token with no-break spaces, but several words.
    words = _spaced(text).split()
    return Counter(
        tuple(words[start : start + order])
        for order in range(1, _MAX_ORDER + 1)
        for start in range(len(words) - order + 1)
    )


def _vector(counts: Counter[Ngram], idf: dict[Ngram, float], unseen: float) -> Vector:
    """Return the vector of a text; an n-gram in no reference counts as if it were in one reference (`unseen`)."""
    weights = {ngram: number * idf.get(ngram, unseen) for ngram, number in counts.items()}
    squares = np.zeros(_MAX_ORDER)
    for ngram, weight in weights.items():
        squares[len(ngram) - 1] += weight * weight
    # The length counts bigrams, one less than words.
    return weights, np.sqrt(squares), sum(number for ngram, number in counts.items() if len(ngram) == 2)


def _similarity(one: Vector, other: Vector) -> float:
    """Return CIDEr-D of two texts without the factor 10: the mean over orders."""
    (weights, norms, length), (other_weights, other_norms, other_length) = one, other
    products = np.zeros(_MAX_ORDER)
    for ngram, weight in weights.items():
        if ngram in other_weights:
            products[len(ngram) - 1] += min(weight, other_weights[ngram]) * other_weights[ngram]
    scale = norms * other_norms
    cosines = np.divide(products, scale, out=np.zeros(_MAX_ORDER), where=scale > 0)
    return float(cosines.mean() * np.exp(-((length - other_length) ** 2) / (2 * _SIGMA**2)))
