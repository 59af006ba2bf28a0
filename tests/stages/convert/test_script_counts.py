"""Counts of letters by script."""

import pytest

from stages.convert.scan import count_scripts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("12 + 3 = ?! \n\t", {}),
        ("Which digit is this?", {"Latin": 16}),
        ("na\u00efve caf\u00e9", {"Latin": 9}),
        ("\u041f\u0440\u0438\u0432\u0435\u0442, world", {"Latin": 5, "Cyrillic": 6}),
        ("\u4f60\u597d\u3002\u4f60", {"Han": 3}),
        ("\u3072\u3089 \u30ab\u30bf \u6f22", {"Hiragana": 2, "Katakana": 2, "Han": 1}),
        ("\ud55c\uad6d", {"Hangul": 2}),
        ("\u0645\u0631\u062d\u0628\u0627", {"Arabic": 5}),
        ("\u0928\u092e\u0938\u094d\u0924\u0947", {"Devanagari": 4}),  # two of the six are marks
        ("\u05e9\u05dc\u05d5\u05dd \u03b1\u03b2", {"Hebrew": 4, "Greek": 2}),
        ("\U0001f600 \u20ac \u2192", {}),
        ("\ud800a", {"Latin": 1}),
    ],
)
def test_letters_are_counted_by_script(text, expected):
    assert count_scripts(text) == expected
