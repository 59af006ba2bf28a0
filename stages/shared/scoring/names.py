"""Names of metrics and scores, so that code that only names a metric does not load the libraries that compute it."""

from collections.abc import Mapping, Sequence

from dataset_builders.errors import InputError
from dataset_builders.readers.source_files import nearest

METRIC_NAMES = (
    *("exact_match", "vqa_em", "vqa_accuracy", "multiple_choice", "anls", "relaxed_accuracy", "denotation_accuracy"),
    *("cer", "wer", "cider", "bleu4", "rouge_l", "cord_nted", "cord_f1"),
    *("iou", "acc_iou50", "acc_iou50_95", "box_precision", "box_recall", "box_f1", "coco_map", "coco_map50"),
    "temporal_iou",
)

OVERALL = "overall"  # name of the row for all subsets together
SCORE, PARSE_FAILURES = "score", "parse_failure_rate"
HEALTH_NAMES = ("stop_rate", "empty_rate", "mean_answer_tokens")
LOSS, PERPLEXITY = "reference_loss", "reference_perplexity"
SAME_ANSWERS = "same_answers"  # share of the drawn answers that other programs give alike, see `stages.verify`

SCORE_NAMES = (SCORE, *METRIC_NAMES, PARSE_FAILURES, *HEALTH_NAMES, LOSS, PERPLEXITY, SAME_ANSWERS)


def flat_scores(scores: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Flatten {"overall": {"exact_match": 1.0}, "pairs": ...} to {"exact_match": 1.0, "exact_match/pairs": ...}."""
    flat = {}
    for subset, metrics in scores.items():
        for metric, value in metrics.items():
            if value is not None:
                flat[metric if subset == OVERALL else f"{metric}/{subset}"] = float(value)
    return flat


def check_name(name: str) -> None:
    """Check that a metric has this name."""
    if name not in METRIC_NAMES:
        raise InputError(f"no metric {name!r}{nearest(name, METRIC_NAMES)}; known: {', '.join(METRIC_NAMES)}")


def check_score(name: str) -> None:
    """Check that a run can have a score of this name: the name of a score, or name/subset."""
    score, slash, subset = name.partition("/")
    if score not in SCORE_NAMES:
        raise InputError(f"no score {score!r}{nearest(score, SCORE_NAMES)}; known: {', '.join(SCORE_NAMES)}")
    if slash and not subset:
        raise InputError(f"{name!r} names no subset; give {score}, or {score}/SUBSET")
    if slash and score == SAME_ANSWERS:
        raise InputError(f"{name!r}: {score} is measured over all subsets together; give {score}")


def check_overrides(overrides: Mapping[str, Sequence[str]]) -> None:
    """Check the metrics that a recipe names, before a run starts."""
    for subset, names in overrides.items():
        field = f"evaluate.metrics.{subset}"
        if not names:
            raise InputError(f"{field} is empty; name at least one metric, the headline first")
        if len(set(names)) < len(names):
            raise InputError(f"{field}={list(names)} names a metric twice")
        for name in names:
            try:
                check_name(name)
            except InputError as error:
                raise InputError(f"{field}: {error}") from None
