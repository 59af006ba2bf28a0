"""Makes Prefect refuse stored results, because a stored result is a pickle at an address that anybody may choose.

Whoever may call Prefect's API may set the state of a run, and the state may name a stored result. The process of the
run would unpickle that result at its end, and so run any code in it. Athanor itself stores no results
(tests/test_security.py).
"""

from typing import Any, NoReturn

from dataset_builders.errors import InputError
from flows.libraries.prefect_private import replace_result_readers


def _refuse(*_args: Any, **_values: Any) -> NoReturn:
    raise InputError(
        "a state of this run names a stored result; athanor stores none and reads none, so it was set by hand"
    )


def refuse_stored_results() -> None:
    """Make Prefect refuse stored results in this process."""
    replace_result_readers(_refuse)
