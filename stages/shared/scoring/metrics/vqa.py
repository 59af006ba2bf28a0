"""VQA accuracy over the answers of several annotators, and equality with one of them, for texts in EvalAI's form.

The normal form: lower case; no commas or question marks; other punctuation is removed if the text has it next to a
space, otherwise replaced by a space; no full stops except before a digit; number words up to ten as digits; no
articles; apostrophes restored in contractions.
"""

import re

from dataset_builders.errors import InputError
from stages.shared.scoring.metrics.contract import Judged, MeanMetric
from stages.shared.scoring.metrics.exact_match import normalize

_PUNCTUATION = ';/[]"{}()=+\\_->@<`!'
_FULL_STOP = re.compile(r"\.(?!\d)")
_ARTICLES = frozenset({"a", "an", "the"})
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {"none": "0", **{word: str(number) for number, word in enumerate(_NUMBER_WORDS)}}
# Each contraction is recognised with any one of its apostrophes missing.
_CONTRACTED = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't not've
o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""
_MATCHED = 3  # number of other annotators who must agree for a full score


def _contractions() -> dict[str, str]:
    """Return contraction without one of its apostrophes -> full form."""
    full_forms = {"somebody'd": "somebodyd"}  # the official table has this pair reversed
    for full in _CONTRACTED.split():
        full_forms.update({full[:i] + full[i + 1 :]: full for i, character in enumerate(full) if character == "'"})
    return full_forms


_CONTRACTIONS = _contractions()


def evalai_normalize(text: str) -> str:
    """Return the normal form of the VQA evaluation server; empty for a text of only articles and punctuation."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    beside_space = {mark for mark in _PUNCTUATION if mark + " " in text or " " + mark in text}
    text = text.translate({ord(mark): "" if mark in beside_space else " " for mark in _PUNCTUATION})
    words = [_DIGITS.get(word, word) for word in _FULL_STOP.sub("", text).split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def comparable(text: str) -> str:
    """Return the normal form; if nothing is left of the text (the choice "A"), the text that exact match compares."""
    return evalai_normalize(text) or normalize(text)


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
