"""The metrics by name, and those of each subset, with reasons: the fifty subsets of the_cauldron, and CORD-V2.

A subset is known by its own name and by the builder that read it, so that `docvqa` of the_cauldron has its metric under
the name `web_docvqa` too, as a source `web` among several calls it, and a file of yours called docvqa.csv has not.

A subset most of whose answers have boxes is scored by boxes, whatever it is called.

A new metric needs its class, one line in `_METRICS` and its name in names.py. A subset with other metrics than its
group has a `_table` of its own.

the_cauldron ends nearly every short answer with a full stop ("Yes.", "14."), even if the source has none, and keeps one
answer of ten annotators. If a task's own metric is plain equality, the headline here is therefore vqa_em, which ignores
the full stop. exact_match is reported too: it is low for a model that was never trained on this style.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataset_builders.contracts.manifest import SubsetOrigin
from dataset_builders.sources.registry import KNOWN_SUBSETS, known_name
from stages.shared.scoring.metrics.boxes import (
    BoxAccuracies,
    BoxAccuracy,
    BoxF1,
    BoxIoU,
    BoxPrecision,
    BoxRecall,
    CocoMap,
    CocoMap50,
)
from stages.shared.scoring.metrics.captions import Bleu, Cider, RougeL
from stages.shared.scoring.metrics.choices import MultipleChoice
from stages.shared.scoring.metrics.contract import Metric
from stages.shared.scoring.metrics.cord import CordFieldF1, CordTreeEdit
from stages.shared.scoring.metrics.denotation import TableExactMatch
from stages.shared.scoring.metrics.texts import (
    ANLS,
    CER,
    WER,
    ExactMatch,
    RelaxedAccuracy,
    VQAAccuracy,
    VQAExactMatch,
)
from stages.shared.scoring.metrics.times import TemporalIoU
from stages.shared.scoring.names import METRIC_NAMES, check_name, check_overrides

_METRICS: tuple[type[Metric], ...] = (
    *(ExactMatch, VQAExactMatch, VQAAccuracy, MultipleChoice, ANLS, RelaxedAccuracy, TableExactMatch),
    *(CER, WER, Cider, Bleu, RougeL, CordTreeEdit, CordFieldF1),
    *(BoxIoU, BoxAccuracy, BoxAccuracies, BoxPrecision, BoxRecall, BoxF1, CocoMap, CocoMap50),
    TemporalIoU,
)
METRICS: dict[str, Metric] = {metric.name: metric() for metric in _METRICS}
assert tuple(METRICS) == METRIC_NAMES


@dataclass(frozen=True, kw_only=True, slots=True)
class SubsetMetrics:
    """The metrics of a subset, by name."""

    headline: str  # the metric that represents the subset in summaries and gates
    others: tuple[str, ...]  # the other metrics that are reported
    reason: str  # why this metric is the headline

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all metrics, the headline first."""
        return (self.headline, *self.others)


def _table(headline: str, others: tuple[str, ...], reasons: Mapping[str, str]) -> dict[str, SubsetMetrics]:
    return {
        subset: SubsetMetrics(headline=headline, others=others, reason=reason) for subset, reason in reasons.items()
    }


_SHORT = _table(
    "vqa_em",
    ("exact_match",),
    {
        "vqav2": "one of ten annotators' answers is kept; with all ten give vqa_accuracy",
        "okvqa": "one of ten annotators' answers is kept; with all ten give vqa_accuracy",
        "textvqa": "one of ten annotators' answers is kept; with all ten give vqa_accuracy",
        "clevr": "one right word or number",
        "clevr_math": "one right number",
        "cocoqa": "one right word",
        "dvqa": "bar labels and numbers, right or wrong in the paper",
        "figureqa": "yes or no",
        "hateful_memes": "yes or no; no probabilities, so no AUROC",
        "nlvr2": "yes or no",
        "tallyqa": "one right number",
        "vqarad": "one right term, yes or no",
        "vsr": "yes or no",
    },
)
_CHOICES = _table(
    "multiple_choice",
    ("exact_match",),
    {
        "ai2d": "lettered options in the question",
        "aokvqa": "options named in the question, half of the answers with a rationale",
        "iconqa": "lettered options in the question; questions to fill in are scored by text",
        "intergps": "lettered options in the question",
        "raven": "a letter in the picture, or yes or no; vqa_em would drop the letter A as an article",
        "scienceqa": "lettered options in the question",
        "tqa": "lettered options in the question",
        "visual7w": "lettered options in the question",
    },
)
_DOCUMENTS = _table(
    "anls",
    ("vqa_em", "exact_match"),
    {
        "docvqa": "the task's own metric: text read off a page",
        "infographic_vqa": "the task's own metric: text read off a page",
        "st_vqa": "the task's own metric: text read off a photo",
    },
) | _table("vqa_em", ("anls", "exact_match"), {"ocrvqa": "right or wrong in the paper: titles, authors, years"})
_CHARTS = _table(
    "relaxed_accuracy",
    ("exact_match",),
    {
        "chartqa": "the task's own metric: numbers read off a chart",
        "plotqa": "the task's own metric: numbers read off a chart",
    },
)
_TABLES = _table(
    "denotation_accuracy",
    ("exact_match",),
    {
        "finqa": "a number behind its computation, with or without a percent sign",
        "geomverse": "a number at the end of a solution",
        "hitab": "numbers and lists of cells",
        "mapqa": "lists of places in any order, and ranges of numbers",
        "multihiertt": "a number behind its computation",
        "robut_sqa": "numbers and lists of cells",
        "robut_wikisql": "numbers and lists of cells",
        "robut_wtq": "the task's own metric: numbers and lists of cells in any order",
        "tabmwp": "a number at the end of a solution",
        "tat_qa": "a number behind its derivation, whose scale the question gives",
    },
)
_CAPTIONS = _table(
    "cider",
    ("bleu4", "rouge_l"),
    {
        "chart2text": "captions of charts",
        "diagram_image_to_text": "captions of diagrams",
        "localized_narratives": "captions of photos",
        "screen2words": "the task's own metric: captions of screens",
        "spot_the_diff": "captions of what changed",
        "textcaps": "the task's own metric: captions of photos with text",
        "vistext": "captions of charts",
    },
) | _table(
    "rouge_l",
    ("cider", "bleu4"),
    {
        "mimic_cgd": "free sentences about two pictures, one reference each",
        "visualmrc": "sentences that answer a question; one of the paper's metrics that needs no corpus",
    },
)
_TRANSCRIPTS = _table(
    "cer",
    ("wer",),
    {
        "iam": "the task's own metric: handwriting, letter by letter",
        "rendered_text": "text to be read letter by letter",
    },
)
_CODE = _table(
    "bleu4",
    ("cer",),
    {
        "datikz": "code; likeness of texts, since nothing is compiled",
        "websight": "code; likeness of texts, since nothing is rendered",
    },
)
_RECEIPTS = _table(
    "cord_nted",
    ("cord_f1",),
    dict.fromkeys(("cord_v2", *KNOWN_SUBSETS["cord_v2"]), "the task's own metric: the tree of a receipt"),
)
_ONE_BOX = SubsetMetrics(
    headline="acc_iou50",
    others=("iou", "acc_iou50_95", "box_f1", "coco_map"),
    reason="every answer has one box, as in RefCOCO",
)
_BOXES = SubsetMetrics(
    headline="box_f1",
    others=("box_precision", "box_recall", "coco_map", "coco_map50"),
    reason="answers of any number of boxes without confidences",
)
SUBSETS: dict[str, SubsetMetrics] = {
    name: metrics
    for group in (_SHORT, _CHOICES, _DOCUMENTS, _CHARTS, _TABLES, _CAPTIONS, _TRANSCRIPTS, _CODE, _RECEIPTS)
    for name, metrics in group.items()
}


def get_metric(name: str) -> Metric:
    check_name(name)
    return METRICS[name]


def metrics_of(
    subset: str,
    origin: SubsetOrigin,
    overrides: Mapping[str, Sequence[str]],
    num_boxes: Sequence[int | None] = (),
) -> SubsetMetrics:
    """Return the metrics of a subset: from `evaluate.metrics` of a recipe (subset -> names, the headline first), else
    those of boxes if most of its answers have boxes, else from the table, by the name under which the subset is known,
    else exact match.

    Args:
        num_boxes: the number of true boxes of each answer; None for an answer that is no boxes.

    Raises:
        InputError: `overrides` names a metric that does not exist, or none.
    """
    check_overrides(overrides)
    if subset in overrides:
        headline, *others = overrides[subset]
        return SubsetMetrics(headline=headline, others=tuple(others), reason=f"evaluate.metrics.{subset}")
    known = known_name(origin)
    if known is None:
        by_text = SubsetMetrics(headline="exact_match", others=(), reason=_why_unknown(origin))
    elif known == subset:
        by_text = SUBSETS[known]
    else:
        by_text = replace(SUBSETS[known], reason=f"{known}: {SUBSETS[known].reason}")
    boxes = [number for number in num_boxes if number is not None]
    if not boxes:
        return by_text
    by_boxes = _ONE_BOX if set(boxes) == {1} else _BOXES
    if len(boxes) == len(num_boxes):
        return by_boxes
    are_most = 2 * len(boxes) > len(num_boxes)
    first, second = (by_boxes, by_text) if are_most else (by_text, by_boxes)
    rest = f"{len(num_boxes) - len(boxes)} of {len(num_boxes)} answers are no boxes and count in {by_text.headline}"
    few = f"{len(boxes)} of {len(num_boxes)} answers are boxes, and count in {by_boxes.headline} too"
    return replace(first, others=(*first.others, *second.names), reason=f"{first.reason}; {rest if are_most else few}")


def read_metrics(stats: Mapping[str, Any]) -> dict[str, SubsetMetrics]:
    """Return subset -> its metrics, from the stats of an evaluation's manifest."""
    return {
        subset: SubsetMetrics(headline=each["headline"], others=tuple(each["others"]), reason=each["reason"])
        for subset, each in stats["metrics"].items()
    }


def _why_unknown(origin: SubsetOrigin) -> str:
    if origin.name not in SUBSETS:
        return "an unknown subset: the strictest metric"
    return f"read by {origin.builder}, so not taken for the known {origin.name}: the strictest metric"
