"""The museum's page is made from its tests, and each exhibit has its form."""

import unittest

import pytest

from tests.museum.fault import fault_seen
from tests.museum.table import TABLE, read_exhibits, render


def test_the_page_is_that_of_the_tests():
    exhibits = read_exhibits()
    assert TABLE.read_text() == render(exhibits), "run `python -m tests.museum.table`"


def test_every_exhibit_tells_its_fault_where_it_was_reported_and_shows_it():
    exhibits = read_exhibits()
    assert len(exhibits) >= 25 and len({exhibit.told for exhibit in exhibits}) == len(exhibits)
    wrong = [e.name for e in exhibits if not (e.told.endswith(".") and e.reports and e.shows_fault)]
    assert not wrong, f"no sentence, no address or no `with fault_seen():` in {wrong}"


def test_a_check_that_sees_nothing_fails_its_exhibit():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), fault_seen():
        pass
    with pytest.raises(pytest.fail.Exception, match="not the check"), fault_seen():
        unittest.TestCase().assertTrue(False)
