"""Scores of short texts: equality, VQA accuracy, ANLS, relaxed accuracy of numbers, and error rates of transcripts.

They differ in the form that texts are compared in: `normalize`, or that of the VQA evaluation server. The latter is
lower case; no commas or question marks; other punctuation is removed if the text has it next to a space, otherwise
replaced by a space; no full stops except before a digit; number words up to ten as digits; no articles; apostrophes
restored in contractions.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Sequence

import jiwer
import numpy as np
from rapidfuzz.distance import Levenshtein

from dataset_builders.errors import InputError
from stages.shared.scoring.metrics.contract import Judged, MeanMetric, SumMetric

_PUNCTUATION = ';/[]"{}()=+\\_->@<`!'
_FULL_STOP = re.compile(r"\.(?!\d)")
_ARTICLES = frozenset({"a", "an", "the"})
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {"none": "0", **{word: str(number) for number, word in enumerate(_NUMBER_WORDS)}}
_CONTRACTED = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't not've
o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""
# Each contraction is recognised with any one of its apostrophes missing. The official table reverses the first pair.
_CONTRACTIONS = {"somebody'd": "somebodyd"} | {
    full[:i] + full[i + 1 :]: full for full in _CONTRACTED.split() for i, letter in enumerate(full) if letter == "'"
}
_MATCHED = 3  # number of other annotators who must agree for a full score
_ANLS_THRESHOLD = 0.5
_MAX_RELATIVE_CHANGE = 0.05


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


def normalize(text: str) -> str:
    """Return the text in lower case, stripped, with each run of white space replaced by one space.

    Nothing else changes: punctuation, accents, articles, number words and the spelling of numbers all count.
    """
    return " ".join(text.lower().split())


class VQAAccuracy(MeanMetric):
    """The agreement with several annotators; three who agree are enough."""

    name = "vqa_accuracy"
    definition = (
        "the mean over annotators i of min(1, n_i / 3), n_i the other annotators whose answer is the model's, texts in "
        "EvalAI's normal form; the mean over answers. Fewer than ten annotators are not scaled up: three who all "
        "agree with the answer give 2/3"
    )
    source = (
        "Antol et al., VQA, arXiv 1505.00468, evaluated leave one out as in lmms-eval 0.7.3 tasks/textvqa/utils.py "
        "textvqa_process_results, texts as in tasks/_task_utils/vqa_eval_metric.py EvalAIAnswerProcessor; ours removes "
        "every full stop where the original passes a flag as a count and removes 32, and compares texts of articles "
        "alone as they are, where the original takes them all for equal to no answer"
    )

    def score_one(self, answer: Judged) -> float:
        """Return the score of one answer; InputError for a single reference, with which every answer would score 0."""
        annotators = len(answer.references)
        if annotators < 2:
            raise InputError(
                f"vqa_accuracy needs the answers of at least two annotators, and question {answer.question[:60]!r} has "
                f"{annotators}; give vqa_em in evaluate.metrics"
            )
        text = comparable(answer.answer)
        agreeing = sum(text == comparable(reference) for reference in answer.references)
        of_agreeing = agreeing * min(1.0, (agreeing - 1) / _MATCHED)  # an agreeing annotator is not counted for himself
        return (of_agreeing + (annotators - agreeing) * min(1.0, agreeing / _MATCHED)) / annotators


class VQAExactMatch(MeanMetric):
    """The share of answers that equal a reference, apart from spelling details."""

    name = "vqa_em"
    definition = "1 where the answer equals any reference, both in EvalAI's normal form; else 0; the mean over answers"
    source = (
        "lmms-eval 0.7.3 tasks/_task_utils/vqa_eval_metric.py EvalAIAnswerProcessor for the normal form; for data with "
        "one answer a question, where vqa_accuracy has no other annotator; differs as vqa_accuracy does"
    )

    def score_one(self, answer: Judged) -> float:
        text = comparable(answer.answer)
        return float(any(text == comparable(reference) for reference in answer.references))


def comparable(text: str) -> str:
    """Return the normal form; if nothing is left of the text (the choice "A"), the text that exact match compares."""
    return evalai_normalize(text) or normalize(text)


def evalai_normalize(text: str) -> str:
    """Return the normal form of the VQA evaluation server; empty for a text of only articles and punctuation."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    beside_space = {mark for mark in _PUNCTUATION if mark + " " in text or " " + mark in text}
    text = text.translate({ord(mark): "" if mark in beside_space else " " for mark in _PUNCTUATION})
    words = [_DIGITS.get(word, word) for word in _FULL_STOP.sub("", text).split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


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
        text = normalize(answer.answer)
        best = max(Levenshtein.normalized_similarity(text, normalize(reference)) for reference in answer.references)
        return best if best >= _ANLS_THRESHOLD else 0.0


class RelaxedAccuracy(MeanMetric):
    """The share of answers that are right within 5 percent, for questions about charts."""

    name = "relaxed_accuracy"
    definition = (
        "1 where answer and a reference are numbers (5% is 0.05; 1,000 is no number) with |answer - reference| / "
        "|reference| <= 0.05, or the same text but for case; else 0; the mean over answers"
    )
    source = (
        "Masry et al., ChartQA, arXiv 2203.10244, section 5.1, as in pix2struct metrics.py and lmms-eval 0.7.3 "
        "tasks/chartqa/utils.py relaxed_correctness. As there, 5% is not 5, and 1,000 is not 1000. Ours leaves out "
        "white space at the ends and one full stop, which the_cauldron puts behind every answer; takes 0.0 for 0, "
        "where the original compares texts; and takes nan and inf for words"
    )

    def score_one(self, answer: Judged) -> float:
        return float(any(is_relaxed_match(answer.answer, reference) for reference in answer.references))


def is_relaxed_match(answer: str, reference: str) -> bool:
    """Whether both are numbers that differ by at most 5 percent of the reference, or equal texts apart from case."""
    answer, reference = (text.strip().removesuffix(".").rstrip() for text in (answer, reference))
    number, right = _number(answer), _number(reference)
    if number is None or right is None:
        return answer.lower() == reference.lower()
    if right == 0:
        return number == 0
    return abs(number - right) / abs(right) <= _MAX_RELATIVE_CHANGE


def _number(text: str) -> float | None:
    """Return the number that the text represents, "5%" as 0.05; None for anything except a finite number."""
    try:
        number = float(text.rstrip("%")) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class ErrorRate(SumMetric):
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
            rows.append(min(counts, key=lambda count: (_rate(*count), count[1])))
        return np.array(rows, dtype=np.float64).reshape(-1, len(self.columns))


def _rate(edits: float, length: float) -> float:
    """Return an error rate. For an empty reference it is 0 if the answer is empty, else infinite."""
    return edits / length if length else (0.0 if not edits else float("inf"))


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
