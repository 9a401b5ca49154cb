"""Text from files is printed without its control characters, and never at length."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftproof.state import printable

_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Lu", "Ll", "Mn", "So")
_HOSTILE = st.text(st.characters(categories=_CATEGORIES), max_size=3000)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("policy", "policy"),
        ("Größe 4 µs", "Größe 4 µs"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("abc\u202edcba", r"abc\u202edcba"),
        ("\ud800x", r"\ud800x"),
        ("\U000e0041", r"\U000e0041"),
        (17, "17"),
    ],
)
def test_characters_that_terminals_obey_are_escaped(text, shown):
    assert printable(text) == shown


@given(_HOSTILE, st.integers(20, 600))
def test_text_is_bounded_and_can_be_encoded(text, limit):
    shown = printable(text, limit)
    assert len(shown) <= limit
    shown.encode("utf-8")
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") for c in shown)


def test_long_text_keeps_its_beginning_and_its_end():
    shown = printable("agent.zip: " + "x" * 10**7 + "; take another copy", 60)
    assert shown.startswith("agent.zip: xxx")
    assert " … " in shown
    assert shown.endswith("; take another copy")
