"""Tables and how numbers are written in them."""

import json
import math

import pytest

from covprop.text_table import (
    Table,
    in_bytes,
    in_digits,
    in_percent,
    in_percent_unlike,
    in_seconds,
    plain,
)


def test_words_are_flush_left_and_numbers_right() -> None:
    table = Table(("name", "size"), (("a", "1"), ("longer", "100,000")), notes=("that is all",))
    assert str(table) == (
        "name       size\na             1\nlonger  100,000\nthat is all"
    )  # fmt: skip


def test_a_table_of_limited_width_wraps_notes_and_first_cells_but_no_calls() -> None:
    call = "cp.propagate(model, x, method=cp.Split(5))"
    rows = (("a name of several words", "1"), ("b", "2"))
    lead = ("what matters most is said at the beginning, in one sentence",)
    table = Table(("name", "size"), rows, notes=(f"take this: {call}",), lead=lead, width=46)
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 46
    assert lines[:2] == ["what matters most is said at the beginning, in", "  one sentence"]
    assert lines[-1] == f"  {call}"
    narrow = str(Table(("name", "size"), rows, width=16)).splitlines()
    assert narrow[1:4] == ["a name of      1", " several", " words"]
    calls = Table(("name", "size"), (("Call(1,000)", "1"), ("b", "2")), width=14)
    assert str(calls).splitlines()[1:3] == ["Call         1", " (1,000)"]
    assert table.to_html().startswith(f"<p>{lead[0]}</p><table>")


def test_html_escapes_what_it_is_given() -> None:
    text = Table(("a<b",), (("x & y",),), notes=("1 < 2",)).to_html()
    assert "a&lt;b" in text
    assert "x &amp; y" in text
    assert "1 &lt; 2" in text
    assert text.count("<td") == text.count("</td>") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.2e-6, "3.2 µs"), (9.999e-4, "1 ms"), (0.25, "250 ms"), (0.9996, "1 s"), (12.34, "12.3 s"),
     (90, "1.5 min")],
)  # fmt: skip
def test_times(seconds: float, text: str) -> None:
    assert in_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (999_900, "1 MB"), (2.5e9, "2.5 GB")]
)
def test_sizes(count: float, text: str) -> None:
    assert in_bytes(count) == text


def test_numbers_have_no_exponent_where_none_is_needed() -> None:
    assert in_digits(1234.5, 2) == "1200"
    assert in_digits(0.012345) == "0.0123"
    assert in_digits(1.2e-9) == "1.2e-09"
    assert in_digits(math.nan) == "-"
    assert in_percent(1.304) == "130 %"
    assert in_percent(0.0321) == "3.2 %"
    assert in_percent(math.nan) == "-"


def test_what_json_lacks_becomes_a_word() -> None:
    value = {"a": math.inf, "b": (1.5, math.nan), "c": ["x", None]}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {
        "a": "inf", "b": [1.5, "nan"], "c": ["x", None],
    }  # fmt: skip


def test_a_share_is_told_from_another_with_as_many_digits_as_that_takes() -> None:
    assert in_percent_unlike(0.9731, 0.99) == "97 %"
    assert in_percent_unlike(0.9866, 0.99) == "98.7 %"
    assert in_percent_unlike(0.99981, 0.9999) == "99.98 %"
    assert in_percent_unlike(0.99, 0.99) == "99 %"
