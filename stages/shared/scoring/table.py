"""METRICS: name -> metric. A new metric needs one module, one line here and its name in names.py."""

from stages.shared.scoring.metrics.anls import ANLS
from stages.shared.scoring.metrics.captions import Bleu, Cider, RougeL
from stages.shared.scoring.metrics.choices import MultipleChoice
from stages.shared.scoring.metrics.contract import Metric
from stages.shared.scoring.metrics.cord import CordFieldF1, CordTreeEdit
from stages.shared.scoring.metrics.denotation import TableExactMatch
from stages.shared.scoring.metrics.error_rates import CER, WER
from stages.shared.scoring.metrics.exact_match import ExactMatch
from stages.shared.scoring.metrics.relaxed import RelaxedAccuracy
from stages.shared.scoring.metrics.vqa import VQAAccuracy, VQAExactMatch
from stages.shared.scoring.names import METRIC_NAMES, check_name

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
