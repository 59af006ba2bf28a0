"""METRICS: name -> metric. A new metric needs one module, one line here and its name in names.py."""

from stages.scoring.metrics.anls import ANLS
from stages.scoring.metrics.captions import Bleu, Cider, RougeL
from stages.scoring.metrics.choices import MultipleChoice
from stages.scoring.metrics.contract import Metric
from stages.scoring.metrics.cord import CordFieldF1, CordTreeEdit
from stages.scoring.metrics.denotation import TableExactMatch
from stages.scoring.metrics.error_rates import CER, WER
from stages.scoring.metrics.exact_match import ExactMatch
from stages.scoring.metrics.relaxed import RelaxedAccuracy
from stages.scoring.metrics.vqa import VQAAccuracy, VQAExactMatch
from stages.scoring.names import METRIC_NAMES, check_name

_METRICS: tuple[type[Metric], ...] = (
    ExactMatch,
    VQAExactMatch,
    VQAAccuracy,
    MultipleChoice,
    ANLS,
    RelaxedAccuracy,
    TableExactMatch,
    CER,
    WER,
    Cider,
    Bleu,
    RougeL,
    CordTreeEdit,
    CordFieldF1,
)
METRICS: dict[str, Metric] = {metric.name: metric() for metric in _METRICS}
assert tuple(METRICS) == METRIC_NAMES


def get_metric(name: str) -> Metric:
    check_name(name)
    return METRICS[name]
