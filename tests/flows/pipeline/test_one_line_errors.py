"""An error of the user's input is one line in a flow run's log; every other error keeps its traceback."""

import logging

import pytest
from prefect.exceptions import FailedRun

from dataset_builders.errors import InputError
from flows.pipeline.prefect_changes import OneLine


@pytest.mark.parametrize(
    ("error", "text", "has_traceback"),
    [
        (InputError("data: no such directory\nmore"), "data: no such directory", False),
        (FailedRun("train.optim.lr is too high"), "train.optim.lr is too high", False),
        (KeyError("x"), "Engine execution exited", True),
    ],
)
def test_a_record(error, text, has_traceback):
    record = logging.LogRecord(
        "n", logging.ERROR, "", 1, "Engine execution %s", ("exited",), (type(error), error, None)
    )
    assert OneLine().filter(record)
    assert record.getMessage() == text and (record.exc_info is not None) == has_traceback
