"""Multiple choice: the options that a question lists, and the option that an answer chooses.

Options are read from the question, in the forms that occur in data:

    A. Oxygen                one per line, or all on one line; also "A: ...", "A) ...", "(A) ...", "Choice A. ..."
    B. Carbon dioxide
    A, or a comma of full width                          full-width forms, with or without spaces
    Options: Skateboarder, train, delivery, cab.         without letters: answered by an option's text

An answer names options by letter ("B", "(b)", "B. Carbon dioxide") or by text. Options joined by "or", "and" or a comma
are one group: none of them alone is meant. A group behind "not" or before "is wrong" is denied and does not count. A
letter behind another noun ("vitamin C") names no option. `_read` has the order in which the other groups are looked at.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.shared.scoring.metrics.contract import Judged, MeanMetric
from stages.shared.scoring.metrics.texts import normalize

_WIDE = r"[^\x00-\x7f]"  # a character of full width stands without spaces
_MARK = rf"(?:[.):\]](?:[ \t]+|(?={_WIDE})|$)|,(?={_WIDE}))"
_LINE = re.compile(
    r"^[ \t>*-]*(?:(?:choice|option)[ \t]+)?[(\[]?([A-Z])(?:\*\*)?"
    rf"(?:[.):\]](?![A-Z]\.)|,(?={_WIDE}))(?:\*\*)?[ \t]*(.*)$",
    re.M | re.I,
)
_INLINE = re.compile(
    rf"(?:^|(?<=[\s:;?])|(?<={_WIDE})(?=[(\[]))[(\[]?([A-Z]){_MARK}\s*(.*?)"
    rf"(?=[\s;]+[(\[]?[A-Z]{_MARK}|(?<={_WIDE})[(\[][A-Z]{_MARK}|$)",
    re.M,
)
_UNLETTERED = re.compile(r"^[ \t]*(?:options|choices|\u9009\u9879):[ \t]*(\S.*)$", re.M | re.I)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_EDGES = " \t\n\r.,;:!?*`'\"()[]{}$"
_SENTENCE = 100  # characters
_BEGINS = _EDGES + "#>-"  # of a heading, a quotation or a list
_MARKUP = re.compile(r"\*\*|__|(?<!\w)\*|\*(?!\w)|\\boxed|\\text|[{}$`]|</?(?:answer|b|i|em|strong|p)>")
_STRUCK = re.compile(r"~~.*?~~", re.S)
_EMPHASIS = re.compile(r"\*\*.+?\*\*|__.+?__|\\boxed\{(?:\\text\{)?[^{}]*\}+|<(answer|b|strong)>.+?</\1>", re.S)
_NARROW = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width forms of ASCII
_NARROW |= {0x24B6 + i: letter for i, letter in enumerate(_LETTERS)}  # in circles
_NARROW |= str.maketrans(
    "\u3002\u3001\u3010\u3011\u300c\u300d\u300e\u300f\u300a\u300b\u201c\u201d\u2018\u2019\u2013\u2014\u3000",
    ".,[][][][]\"\"''-- ",
)

# Each pattern also has the words of Chinese for it, and those of Japanese and Korean for "the answer is".
_FINAL = re.compile(r"(?:\banswer(?: is)?|\u7b54\u6848|\u7b54\u3048|\uc815\ub2f5):\s*", re.I)
_THE = r"(?:(?:the|an?) )?(?:(?:correct |right )?(?:answer|option|choice|letter) )?[(\[\"']*$"
_DECLARES = re.compile(
    r"(?<!wrong )(?<!incorrect )(?<!false )\b(?:(?:answer|option|choice) (?:is|must be|should be|would be)|answer):?\s*"
    rf"(?:(?:both|either) )?{_THE}"
    r"|(?:\u7b54\u6848|[\u9009\u9078][\u62e9\u64c7]?|\u9009\u9879|\u7b54\u3048|\uc815\ub2f5)(?:\u5e94\u8be5)?"
    r"[\u662f\u4e3a\u5c31\u306f\u304c\uc740\ub294]?:?\s*[(\[\"']*$",
    re.I,
)
_CONCLUDES = re.compile(
    r"\b(?:(?:it|this|that|one)(?:'s| is| was)|(?:the|this|that) (?:\w+ ){1,3}(?:is|was)|(?:must|should|would) be"
    rf"|has to be|so|thus|hence|therefore|guess|choos(?:e|ing)|pick|select|say|think|believe|with)[:,]?\s*{_THE}"
    r"|(?:\u6240\u4ee5|\u56e0\u6b64|\u6545|\u5e94\u8be5)(?:[\u662f\u9009\u4e3a]|\u5e94\u8be5)?,?\s*$",
    re.I,
)
_DENIES = re.compile(
    r"(?:\b(?:not|never|neither|nor|rather than|instead of|unlike|over|exclud(?:e|es|ing)|(?:rules?|ruled|ruling) out"
    r"|eliminat(?:e|es|ed|ing)|cannot|(?:wrong|incorrect|false) (?:answer|option|choice|one)s? (?:is|are):?)|n't)\s*"
    rf"(?:be )?(?:either )?{_THE}|[\u4e0d\u975e](?:\u4f1a)?[\u662f\u9009]?\s*$",
    re.I,
)
_DENIED = re.compile(
    r"[)\]\"']*\s*(?:(?:is|are|was|were|seems?|looks?)(?: both| all| clearly)? (?:not|wrong|incorrect|false|out)\b"
    r"|(?:is|are|was|were|does|do|did|ca|could|would)n't\b|(?:cannot|(?:can|does|do|did|could|would) not)\b"
    r"|\u90fd?[\u4e0d\u9519\u6ca1])",
    re.I,
)
_JOINS = re.compile(
    r"[)\]\"']*(?:[ ,/&|+]*|[\s.,;]*(?:(?:and|or|nor|also|maybe|perhaps|possibly"
    r"|\u548c|\u6216\u8005?|\u4e0e|\u53ca|\u8fd8\u662f)[\s,]*)+"
    r"(?:(?:an?|the|option|choice|both|either) )*)[(\[\"']*",
    re.I,
)
_SINGULAR = re.compile(r"[)\]\"']*\s*(?:(?:is|was|has|does|gives|isn't|doesn't|can|cannot|would)\b|[\u4e0d\u6ca1])")
_REASON = re.compile(r"[)\]\"']*(?:\s*$|\s*[.,;:\n]|\s+-|\s+(?:because|since|as|for)\b)", re.I)
_LISTED = re.compile(r"^[(\[]?[A-Z][.):\]]+[ \t]*\S", re.M)
_FITS = re.compile(r"[)\]\"']*\s+(?:is|fits|matches|seems|looks|would|must|should|has|was)\b")

_WORD = r"A-Za-z0-9_\u00c0-\u024f"  # not \w, which holds the characters of Chinese
_LETTER = (
    rf"(?<![{_WORD}'\u00b0-])(?<![A-Z]\.)([A-Z])(?![{_WORD}'+#]|-\w)|(?<![{_WORD}])\(([a-z])\)|\A([a-z])(?=[.):])"
    r"|(?:(?<=(?i:option|choice) )|(?<=(?i:answer is) ))([a-z])(?=\s*(?:$|[.,;!\n]))"
)
_PRONOUN = re.compile(r"I\s+[a-z]")
_ARTICLE = re.compile(
    r"A\s+(?!(?:is|are|because|since|as|seems|looks|or|nor|and|but|not|fits|matches|would|must|should|has|was|does|rather"
    r"|instead)\b)[A-Za-z][\w-]"
)
_LEAD = re.compile(
    r"(?:\b(?:is|are|be|was|it's|that's|this|options?|choices?|answers?|letters?|label|number|so|thus|hence|therefore|then"
    r"|choos(?:e|ing)|chose|but|over|vs|pick(?:ed)?|select(?:ed)?|say|think|guess|believe|with|and|or|both|either|only"
    r"|just|\w+ly|es|est|ist|\u00e9|\u00e8|respuesta|r\u00e9ponse|antwort|resposta)"
    r"|[\u9009\u9078\u62e9\u64c7\u9879\u9805\u662f\u70ba\u4e3a\u6848\u5373\u6545\u5c31\u548c"
    r"\u6216\u4e0e\u5c0d\u5bf9\u7b54\uc740\ub294\uc774\uac00\u306f\u304c\u3082\u4ee5\u8be5\u5e94]|[^\w\u00b0\s]|\n)\s*\Z",
    re.I,
)

Options = Mapping[str, str]  # letter -> text; an option without text is shown in an image


def parse_options(question: str) -> dict[str, str]:
    """Return letter -> text of the options that a question lists, in order; empty if it lists none.

    If there are several lists, the last one counts. A list without letters gets letters in order.
    """
    question = question.translate(_NARROW)
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


@dataclass(frozen=True, slots=True)
class _Group:
    """Options that an answer names together."""

    letters: frozenset[str]
    start: int  # where the group is in the text
    end: int
    by_text: bool  # whether an option's text is in it, and not letters alone


def choose(answer: str, options: Options) -> str | None:
    """Return the letter of the option that an answer chooses; None if it chooses none, or more than one.

    The text after the last "Answer:", up to the end of its line, is read first, then the whole answer.
    """
    options = {letter: _bare(text) for letter, text in options.items()}
    found = _read(final_part(answer), options) or _read(answer.translate(_NARROW), options)
    return min(found) if len(found) == 1 else None


def final_part(answer: str) -> str:
    """Return the text after the last "Answer:", up to the end of its line; the whole text if there is no "Answer:".
    Full-width forms become ASCII."""
    answer = answer.translate(_NARROW)
    behind = _FINAL.split(_MARKUP.sub("", answer))[1:]
    return behind[-1].strip().split("\n")[0] if behind and behind[-1].strip() else answer


def _bare(text: str) -> str:
    return normalize(_MARKUP.sub("", text.translate(_NARROW))).strip(_EDGES)


def _read(answer: str, options: Options) -> frozenset[str]:
    """Return the options that a text means; none, or several, if it does not decide."""
    bare = _bare(answer)
    letter = bare.strip(_BEGINS).upper()
    if len(letter) == 1 and letter in options:
        return frozenset(letter)
    if whole := frozenset(letter for letter, text in options.items() if text and text == bare):
        return whole
    text, emphasised = _plain(answer)
    groups = list(_meant(text, options))
    first = groups[0] if groups and not text[: groups[0].start].strip(_BEGINS) else None
    if declared := [group.letters for group in groups if _DECLARES.search(_before(text, group))]:
        return declared[-1]
    bold = [group for group in groups if any(start <= group.start and group.end <= end for start, end in emphasised)]
    if first and (first in bold or (_REASON.match(text, first.end) and len(_LISTED.findall(text)) < 2)):
        return first.letters
    is_short = len(bare) <= max(_SENTENCE, 2 * sum(map(len, options.values())))  # longer: named for any reason
    readings: Sequence[Callable[[_Group], object]] = (
        lambda group: group in bold,
        lambda group: _CONCLUDES.search(_before(text, group)),
        lambda group: group is first and not group.by_text and _FITS.match(text, group.end),
        lambda group: group.by_text and is_short,
        lambda group: not group.by_text,
    )
    for counts in readings:
        found = frozenset[str]().union(*(group.letters for group in groups if counts(group)))
        if len(found) == 1:
            return found
    return frozenset()


def _plain(answer: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without markup and without what is struck out, and the ranges in it that are emphasised."""
    answer, text, ranges, end = _STRUCK.sub("", answer), "", [], 0
    for match in _EMPHASIS.finditer(answer):
        text += _MARKUP.sub("", answer[end : match.start()])
        start, end = len(text), match.end()
        text += _MARKUP.sub("", match[0])
        ranges.append((start, len(text)))
    return text + _MARKUP.sub("", answer[end:]), ranges


def _before(text: str, group: _Group) -> str:
    return text[max(0, group.start - 80) : group.start]


def _meant(text: str, options: Options) -> Iterator[_Group]:
    """Yield the groups of options that a text names and does not deny, without letters that name something else."""
    groups: list[_Group] = []
    for mention in _mentions(text, options):
        if groups and _is_joined(text, groups[-1], mention):
            last = groups.pop()
            mention = _Group(last.letters | mention.letters, last.start, mention.end, last.by_text or mention.by_text)
        groups.append(mention)
    for group in groups:
        before = _before(text, group)
        is_name = not group.by_text and any(options.values()) and before.strip() and not _LEAD.search(before)
        is_denied = _DENIES.search(before) or _DENIED.match(text, group.end)
        if not (is_name or is_denied or re.search(r"\bnor\b", text[group.start : group.end])):
            yield group


def _is_joined(text: str, last: _Group, mention: _Group) -> bool:
    between = text[last.end : mention.start]
    if between.strip(" ") == "\n":  # a list of options, one per line
        return last.by_text and mention.by_text
    is_clause = _SINGULAR.match(text, mention.end) and not re.search(r"\bn?or\b|\u6216|\u8fd8\u662f", between)
    return _JOINS.fullmatch(between) is not None and not is_clause


def _mentions(text: str, options: Options) -> Iterator[_Group]:
    """Yield what names an option: its text, the longest one first, its letter, or the two together."""
    letters, forms = {letter: letter for letter in options}, []
    for letter, words in sorted(options.items(), key=lambda option: -len(option[1])):
        if len(words) == 1 and words.upper() in _LETTERS:
            letters.setdefault(words.upper(), letter)  # the label of a drawing as an option's text
        elif words:
            text_of = _pattern(words)
            forms += [(rf"{letter}[.):\],]*\s*[-(]?\s*{text_of}|{text_of}\s*[(\[]{letter}(?=[)\]])", letter)]
            forms += [(text_of, "".join(other for other in options if options[other] == words))]
    parts = [f"(?P<form{i}>(?i:{form}))" for i, (form, _) in enumerate(forms)]
    for match in re.finditer("|".join([*parts, f"(?P<letter>{_LETTER})"]), text):
        if match.lastgroup != "letter":
            named = forms[int(match.lastgroup.removeprefix("form"))][1]
            yield _Group(frozenset(named), *match.span(), True)
            continue
        letter = match["letter"].strip("()").upper()
        if letter in letters and not _is_word(text, match.start()):
            yield _Group(frozenset(letters[letter]), *match.span(), False)


def _pattern(words: str) -> str:
    """Return the pattern of an option's text as whole words; a number is not part of another number."""
    before = rf"(?<![{_WORD}])" if re.match(rf"[{_WORD}]", words) else ""
    behind = rf"(?![{_WORD}])" if re.search(rf"[{_WORD}]\Z", words) else ""
    before += r"(?<!\d[.,])(?<!-)" if words[0].isdigit() else ""
    behind += r"(?![.,]\d)" if words[-1].isdigit() else ""
    return before + r"\s+".join(map(re.escape, words.split())) + behind


def _is_word(answer: str, place: int) -> bool:
    """Whether the capital at this index is "I" before a verb, or an article at the start of a sentence."""
    begins = not answer[:place].strip() or answer[:place].rstrip(" ")[-1] in ".!?:\n"
    return bool(_PRONOUN.match(answer, place) or (begins and _ARTICLE.match(answer, place)))


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
        "1 where the one option that the answer means, by letter or text, is that of a reference; 0 for another and "
        "where it means none or several (unparsed); the mean over answers. A question that lists no options and "
        "whose references are no letters is scored by text, as exact_match but for punctuation at the ends"
    )
    source = (
        "the task of ai2d, scienceqa, aokvqa, tqa; letters as in lmms-eval 0.7.3 tasks/_task_utils/mcq_extract.py and "
        "VLMEvalKit utils/matching_util.py can_infer. Ours knows the options from the question, takes no letter out of "
        "a word, an article or a name (vitamin C), none that is denied, none where several are named; it takes "
        "full-width forms, and a letter in lower case where nothing else can be meant"
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
