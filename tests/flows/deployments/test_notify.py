"""Addresses and kinds of notifications are checked when the service starts, and no message shows an address."""

import pytest

from dataset_builders.errors import InputError
from flows.deployments.channels import KINDS, addresses, wanted_kinds

MAIL = "mailtos://me:secret@example.org?to=me@example.org"


def test_what_is_set_is_used():
    values = {"ATHANOR_NOTIFY_SLACK": "https://hooks.slack.com/services/A/B/C", "ATHANOR_NOTIFY_EMAIL": MAIL}
    assert addresses(values) == {"slack": values["ATHANOR_NOTIFY_SLACK"], "email": MAIL} and addresses({}) == {}
    assert wanted_kinds({}) == list(KINDS) and wanted_kinds({"ATHANOR_NOTIFY": "late, failed"}) == ["late", "failed"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WEBHOOK", "example.org/secret"),
        ("SLACK", MAIL),
        ("EMAIL", "https://example.org/secret"),
        ("WEBHOOK", "http://"),
    ],
)
def test_a_wrong_address_is_named_and_not_shown(name, value):
    with pytest.raises(InputError, match=f"ATHANOR_NOTIFY_{name} is not of the form") as error:
        addresses({f"ATHANOR_NOTIFY_{name}": value})
    assert value not in str(error.value)


def test_an_unknown_kind():
    with pytest.raises(InputError, match="ATHANOR_NOTIFY: 'lost' is not known; one of failed, late, refused, champion"):
        wanted_kinds({"ATHANOR_NOTIFY": "failed lost"})
