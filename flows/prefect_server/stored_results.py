"""No result is read that a state of Prefect names: it would be a pickle, at a place that the state names too.

Whoever may call Prefect's API may set the state of a run, and with it such a result: the process of the run would read
it at its end, and run what is in it. Nothing of ours stores results (tests/test_security.py).
"""

from typing import Any, NoReturn

from prefect.results import ResultRecord

from dataset_builders.errors import InputError


def _refuse(*_args: Any, **_values: Any) -> NoReturn:
    raise InputError(
        "a state of this run names a stored result; athanor stores none and reads none, so it was set by hand"
    )


def refuse_stored_results() -> None:
    """Make Prefect refuse them in this process, at the two places where bytes become objects."""
    ResultRecord.deserialize = _refuse
    ResultRecord.deserialize_from_result_and_metadata = _refuse
