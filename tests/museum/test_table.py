"""The museum's table has each of its tests, and each exhibit has its form."""

import re
import unittest

import pytest

from tests.museum.fault import fault_seen
from tests.museum.table import read_exhibits, render


def test_the_table_has_each_exhibit_below_its_theme():
    exhibits = read_exhibits()
    rows = [line for line in render(exhibits).splitlines() if line.endswith("` |")]
    assert [row.rpartition("`")[0].rpartition("`")[2] for row in rows] == [exhibit.name for exhibit in exhibits]
    assert len(re.findall("^## .+$", render(exhibits), re.MULTILINE)) == len({exhibit.theme for exhibit in exhibits})


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
