"""METRICS: name -> metric. A new one is one module, one line here and its name in names.py."""

from stages.scoring.anls import ANLS
from stages.scoring.captions import Bleu, Cider, RougeL
from stages.scoring.choices import MultipleChoice
from stages.scoring.contract import Metric
from stages.scoring.cord import CordFieldF1, CordTreeEdit
from stages.scoring.denotation import TableExactMatch
from stages.scoring.error_rates import CER, WER
from stages.scoring.exact_match import ExactMatch
from stages.scoring.names import METRIC_NAMES, check_name
from stages.scoring.relaxed import RelaxedAccuracy
from stages.scoring.vqa import VQAAccuracy, VQAExactMatch

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
    """The metric of that name.

    Raises:
        InputError: there is none.
    """
    check_name(name)
    return METRICS[name]
