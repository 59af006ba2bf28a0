"""An error that a user can mend is one line in the log of a flow run. Prefect would add a traceback of its own code."""

import logging

from prefect.exceptions import FailedRun

from dataset_builders.errors import InputError, first_line, printable

LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


class OneLine(logging.Filter):
    """A filter that replaces a record of an InputError, or of a failed state's message, by its one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, InputError | FailedRun):
            record.msg, record.args, record.exc_info, record.exc_text = printable(first_line(error)), (), None, None
        return True


def shorten_errors() -> None:
    """Filter the records of this process's flow and task runs."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, OneLine) for each in logger.filters):
            logger.addFilter(OneLine())
