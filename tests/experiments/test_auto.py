"""What the experiment of the default reports, from results made by hand."""

from typing import Any

import pytest

from experiments import auto, corpus
from experiments.options import Options


def case(error: float, estimate: float, warned: bool = False, **more: Any) -> dict[str, Any]:
    of = {"error": error, "estimate": estimate, "seconds": 0.02, "warned": warned}
    return {
        "family": corpus.TRAINED, "noise": 0.1, "truth": 1e-4,
        **{name: dict(of) for name in auto.LAYERWISE},
        **{name: {**of, "method": "Cumulants"} for name in auto.AUTOS}, **more,
    }  # fmt: skip


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"results": {f"case/{i}": row for i, row in enumerate(rows)}}


def test_estimates_are_judged_by_the_errors() -> None:
    rows = [case(0.001, 0.002), case(0.01, 0.03), case(0.05, 0.1), case(0.2, 0.01)]
    found = auto.quality(rows, "Cumulants()")
    assert found["within"] == 0.75
    assert (found["found"], found["large"]) == (0.5, 2)
    assert found["false"] == 0.5
    assert auto.quality(rows[:3], "Cumulants()")["correlation"] > 0.95


def test_large_errors_without_a_warning_are_named() -> None:
    rows = [case(0.3, 0.001), case(0.3, 0.4, warned=True), case(0.05, 0.01)]
    assert auto.unwarned(record(*rows)) == ["case/0"]


def test_the_cheapest_single_method_is_one_that_is_right() -> None:
    single = {"error": 0.004, "seconds": 0.01, "warned": False}
    row = case(0.1, 0.1, **{"MonteCarlo(256)": {**single, "seconds": 0.001, "error": 0.5},
                            "MonteCarlo(65536)": single})  # fmt: skip
    assert auto.cheapest(row, 0.01) == ("MonteCarlo(65536)", 0.01)
    assert auto.cheapest(row, 0.002) is None
    assert auto.ratios(record(row), 0.01) == [("case/0", 2.0)]


def test_refusals_have_no_part_in_tables() -> None:
    refused = case(0.1, 0.1, **{name: {"refused": "no rule"} for name in auto.LAYERWISE})
    made = auto.tables(record(case(0.01, 0.02), case(0.03, 0.02), case(0.3, 0.4), refused))
    assert [table.title for table in made] == [
        "Errors of the default and of single methods", "Estimated and true errors", "Tolerances",
    ]  # fmt: skip
    assert set(auto.figures(record(case(0.01, 0.02), refused))) == {auto.NAME}


def test_a_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SAMPLES", (256,))
    options = Options(smoke=True)
    row = auto.measure(auto.units(options)[0], options)
    for name in (*auto.AUTOS, *auto.LAYERWISE):
        assert row[name]["error"] < 1
        assert row[name]["estimate"] >= 0
    assert row["truth"] < 0.1
