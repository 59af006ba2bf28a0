"""Multiple choice: the options that a question lists, and the option that an answer chooses.

Options are read from the question, in the forms that occur in data:

    A. Oxygen                one per line, or all on one line; also "A: ...", "A) ...", "(A) ...", "Choice A. ..."
    B. Carbon dioxide
    Options: Skateboarder, train, delivery, cab.         without letters: answered by an option's text

An answer chooses an option by its letter ("B", "(b)", "Answer: B", "B. Carbon dioxide") or by its text.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from stages.scoring.metrics.contract import Judged, MeanMetric
from stages.scoring.metrics.exact_match import normalize

_LINE = re.compile(r"^[ \t]*(?:(?:choice|option)[ \t]+)?[(\[]?([A-Z])[.):\]](?:[ \t]+(.*))?$", re.M | re.I)
_INLINE = re.compile(r"(?:^|(?<=\s))[(\[]?([A-Z])[.):\]]\s+(.*?)(?=\s+[(\[]?[A-Z][.):\]]\s|$)", re.M)
_UNLETTERED = re.compile(r"^[ \t]*(?:options|choices):[ \t]*(\S.*)$", re.M | re.I)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_EDGES = " \t\n\r.,;:!?*`'\"()[]{}$"
_MARKUP = re.compile(r"\*\*|__|\\boxed|\\text|[{}$`]")

_FINAL = re.compile(r"\banswer(?: is)?:\s*", re.I)
_DECLARED = re.compile(r"\b(?i:(?:answer|option|choice) is|answer):?\s*(?:(?i:option|choice) )?[(\[]?([A-Z])(?![\w'])")
_FIRST = re.compile(r"^[(\[]?([A-Z])[.):\]](?:\s|$)")
_ALONE = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")
_PRONOUN = re.compile(r"I\s+[a-z]")
_ARTICLE = re.compile(r"A\s+(?!(?:is|because|since|as|seems|looks)\b)[a-z]")

Options = Mapping[str, str]  # letter -> text; an option without text is shown in an image


def parse_options(question: str) -> dict[str, str]:
    """Return letter -> text of the options that a question lists, in order; empty if it lists none.

    If there are several lists, the last one counts. A list without letters gets letters in order.
    """
    for form in (_LINE, _INLINE):
        options = _last_list([(match[1].upper(), (match[2] or "").strip()) for match in form.finditer(question)])
        if options:
            return options
    lists = _UNLETTERED.findall(question)
    texts = [text.strip() for text in lists[-1].rstrip(" .").split(",")] if lists else []
    return dict(zip(_LETTERS, texts)) if len(texts) > 1 else {}


def _last_list(marked: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the last run of A, B, C ... in order, with at least two options."""
    last: dict[str, str] = {}
    run: dict[str, str] = {}
    for letter, text in marked:
        if letter == "A":
            run = {}
        if len(run) < len(_LETTERS) and letter == _LETTERS[len(run)]:
            run[letter] = text
        if len(run) > 1:
            last = run
    return last


def choose(answer: str, options: Options) -> str | None:
    """Return the letter of the option that an answer chooses; None if it chooses none, or more than one.

    The text after the last "Answer:", up to the end of its line, is read first, then the whole answer.
    """
    answer = _MARKUP.sub("", answer)
    final = final_part(answer)
    return _exactly(final, options) or _exactly(answer, options) or _somewhere(answer, options)


def final_part(answer: str) -> str:
    """Return the text after the last "Answer:", up to the end of its line; the whole text if there is no "Answer:"."""
    behind = _FINAL.split(answer)[1:]
    return behind[-1].strip().split("\n")[0] if behind and behind[-1].strip() else answer


def _bare(text: str) -> str:
    return normalize(_MARKUP.sub("", text)).strip(_EDGES)


def _exactly(answer: str, options: Options) -> str | None:
    """Return the option that the whole text stands for: its letter, its text, or its letter followed by a text."""
    bare = answer.strip(_EDGES)
    if len(bare) == 1 and bare.upper() in options:
        return bare.upper()
    texts = [letter for letter, text in options.items() if text and _bare(text) == _bare(answer)]
    if len(texts) == 1:
        return texts[0]
    first = _FIRST.match(answer.strip())
    return first[1] if first and first[1] in options else None


def _somewhere(answer: str, options: Options) -> str | None:
    """Return the only option that a text names, by the last "the answer is B", a single letter, or an option's text."""
    declared = [letter for letter in _DECLARED.findall(answer) if letter in options]
    if declared:
        return declared[-1]
    alone = {match[1] for match in _ALONE.finditer(answer) if not _is_word(answer, match.start())} & options.keys()
    if len(alone) == 1:
        return alone.pop()
    named = _named(answer, options)
    return named[0] if len(named) == 1 else None


def _is_word(answer: str, place: int) -> bool:
    """Whether the capital at this index is "I" before a verb, or an article at the start of a sentence."""
    begins = not answer[:place].strip() or answer[:place].rstrip(" ")[-1] in ".!?:\n"
    return bool(_PRONOUN.match(answer, place) or (begins and _ARTICLE.match(answer, place)))


def _named(answer: str, options: Options) -> list[str]:
    """Return letters of options whose text occurs in an answer as whole words, but not inside another option's text.

    The result is empty for an answer of more than twice the length of all options, which may name an option for any
    reason.
    """
    words = _bare(answer)
    texts = {letter: _bare(text) for letter, text in options.items() if _bare(text)}
    if len(words) > 2 * sum(map(len, texts.values())):
        return []
    named = {letter: text for letter, text in texts.items() if _holds(words, text)}
    inside = {text for text in named.values() for other in named.values() if text != other and _holds(other, text)}
    return [letter for letter, text in named.items() if text not in inside]


def _holds(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def _options_of(answer: Judged) -> Options:
    """Return the question's options; all letters if it lists none and a reference is a letter (image options)."""
    options = parse_options(answer.question)
    if options:
        return options
    finals = [final_part(reference).strip(_EDGES) for reference in answer.references]
    return dict.fromkeys(_LETTERS, "") if any(len(final) == 1 and final in _LETTERS for final in finals) else {}


class MultipleChoice(MeanMetric):
    """The share of answers that choose the right option."""

    name = "multiple_choice"
    definition = (
        "1 where the option that the answer takes, by letter or text, is that of a reference; 0 for another and where "
        "none or several can be read from it (unparsed); the mean over answers. A question that lists no options and "
        "whose references are no letters is scored by text, as exact_match but for punctuation at the ends"
    )
    source = (
        "the task of ai2d, scienceqa, aokvqa, tqa; letters as in lmms-eval 0.7.3 tasks/_task_utils/mcq_extract.py and "
        "VLMEvalKit utils/matching_util.py can_infer. Ours knows the options from the question, takes no letter out of "
        "a word or an article, none where several are named, and a letter in lower case where it is the whole answer"
    )

    def score_one(self, answer: Judged) -> float:
        options = _options_of(answer)
        right = {choose(reference, options) for reference in answer.references} - {None} if options else set()
        if right:
            return float(choose(answer.answer, options) in right)
        text = _bare(final_part(answer.answer))
        return float(any(text == _bare(final_part(reference)) for reference in answer.references))

    def unparsed(self, answers: Sequence[Judged]) -> np.ndarray:
        pairs = [(answer.answer, _options_of(answer)) for answer in answers]
        return np.array([bool(options) and choose(text, options) is None for text, options in pairs], dtype=bool)
