"""The field: errors by hand, the frontier, and what is written of methods that refuse."""

import math
from typing import Any

import pytest
import torch

from experiments import field, field_networks, field_pages
from experiments.corpus_truth import Truth
from experiments.options import Options
from experiments.rivals import RIVALS, WITHOUT_ROW
from tests.oracles import assert_close

ALL = torch.tensor([True, True])


def moments(mean: list[float], stddevs: list[float], rho: float = 0.0) -> Any:
    stddev = torch.tensor(stddevs, dtype=torch.float64)
    correlation = torch.tensor([[1, rho], [rho, 1]], dtype=torch.float64)
    return torch.tensor(mean, dtype=torch.float64), correlation * torch.outer(stddev, stddev)


def test_errors_are_those_of_independent_outputs_by_hand():
    found, true = moments([1.0, 2.0], [1.1, 1.8]), moments([1.3, 1.0], [1.0, 2.0])
    row = field.errors(found, true, ALL)
    assert row["mean"] == pytest.approx(math.sqrt((0.3**2 + 0.5**2) / 2))
    assert row["worst mean"] == pytest.approx(0.5)
    assert row["stddev"] == pytest.approx(0.1)
    assert row["worst stddev"] == pytest.approx(0.1)
    assert row["covariance"] == pytest.approx(math.hypot(0.21, 0.76) / math.hypot(1, 4))
    assert row["W2"] == pytest.approx(math.sqrt((0.3**2 + 1 + 0.1**2 + 0.2**2) / 5))
    parts = [
        math.log(q / p) + (p**2 + shift**2) / (2 * q**2) - 0.5
        for p, q, shift in ((1.0, 1.1, 0.3), (2.0, 1.8, 1.0))
    ]  # the divergence of the found Gaussian from the true one
    assert row["KL"] == pytest.approx(sum(parts))


def test_variances_alone_have_no_covariance_and_constant_outputs_no_error():
    found, true = moments([1.0, 2.0], [1.0, 1.0]), moments([1.0, 2.0], [1.0, 1.0], 0.5)
    row = field.errors(found, true, ALL, joint=False)
    assert row["covariance"] is None
    assert row["KL"] == pytest.approx(-math.log(0.75) / 2)  # the mutual information
    row = field.errors(moments([9.0, 2.0], [3.0, 1.0]), true, torch.tensor([False, True]))
    assert row["mean"] == row["stddev"] == 0


def test_a_singular_covariance_is_infinitely_far_and_written_as_nothing():
    row = field.errors(moments([0.0, 0.0], [1.0, 1.0], 1.0), moments([0.0, 0.0], [1.0, 1.0]), ALL)
    assert row["KL"] is None
    assert row["W2"] is not None


def test_the_error_of_the_truth_is_as_large_as_halves_say():
    """Averages of 2 n draws are off by half of what two averages of n draws differ by."""
    generator = torch.Generator().manual_seed(0)
    found, true = [], []
    for _ in range(400):
        draws = torch.randn(2, 50, 2, dtype=torch.float64, generator=generator)
        halves = [part for half in draws for part in (half.mean(0), half.T.cov())]
        both = draws.flatten(0, 1)
        truth = Truth(both.mean(0), both.T.cov(), both, both, 100, tuple(halves))
        found.append(field.truth_errors(truth))
        exact = (torch.zeros(2).double(), torch.eye(2).double())
        true.append(field.errors((truth.mean, truth.covariance), exact, ALL))
    for measure in ("mean", "stddev", "covariance", "W2"):
        squares = [sum(row[measure] ** 2 for row in rows) for rows in (found, true)]
        assert squares[0] == pytest.approx(squares[1], rel=0.2), measure
    divergences = [sum(row["KL"] for row in rows) for rows in (found, true)]
    assert divergences[0] == pytest.approx(divergences[1], rel=0.2)


def test_the_frontier_has_no_method_that_another_beats():
    points = {
        "a": (1.0, 0.1),
        "b": (2.0, 0.2),
        "c": (3.0, 0.05),
        "d": (3.0, 0.04),
        "e": (9.0, 0.04),
    }
    assert field_pages.frontier(points) == ["a", "d"]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    options = Options(smoke=True)
    return {key: field.measure(key, options) for key in field.units(options)}


def test_every_row_has_the_error_of_the_truth_and_refusals_a_sentence(rows):
    assert len(rows) == len(field_networks.SMOKE) * len(field.SMOKE)
    for key, row in rows.items():
        assert 0 < row["truth"]["stddev"] < 0.05
        assert row["samples"] >= field_networks.SMOKE_POINTS
        if "polynomial chaos" in key:
            assert "polynomials" in row["refused"]
            continue
        assert row["seconds"] > 0
        assert row["bytes"] > 0
        assert (row["covariance"] is None) == ("Gast" in key)
    layers = rows["random MLP/0.3/0/GaussianLayers()"]
    tangent = rows["random MLP/0.3/0/Petersen 2024 (SDP)"]
    assert layers["stddev"] < tangent["stddev"]


def test_tables_print_what_is_lost_and_what_is_refused(rows):
    record = {"results": rows}
    made = {table.title: table for table in field_pages.tables(record)}
    assert list(made) == [
        "All methods", "Errors: small MLP", "Errors: CNN", "Frontiers", "What was refused",
        "Without a row",
    ]  # fmt: skip
    lines = made["Errors: small MLP"].rows
    assert [line[0] for line in lines][-1] == field_pages.TRUTH
    assert next(line for line in lines if "chaos" in line[0])[1] == "0 of 1"
    refused = made["What was refused"].rows
    assert {line[1] for line in refused} == {"small MLP", "CNN"}
    assert {line[0] for line in made["Without a row"].rows} == set(WITHOUT_ROW)
    figures = field_pages.figures(record)
    assert set(figures) == {"field-small-mlp", "field-cnn"}
    assert all(panel.has_data() for figure in figures.values() for panel in figure.axes)


def test_the_overview_is_written_into_a_page(rows):
    record = {"results": rows}
    page = "Before.\n\n<!-- numbers: field -->\n\n| old |\n| --- |\n| 1 |\n\nAfter.\n"
    text = field_pages.with_overview(page, record)
    assert "| old |" not in text
    assert text.startswith("Before.\n\n<!-- numbers: field -->\n\n| method | small MLP | CNN |\n")
    assert text.endswith("\n\nAfter.\n")
    assert "| polynomial chaos, degree 4 | refused | refused |" in text
    assert field_pages.with_overview(text, record) == text
    with pytest.raises(ValueError, match="0 tables"):
        field_pages.with_overview("Nothing.", record)


def test_medians_leave_out_refusals_and_count_what_is_infinite():
    rows = [{"KL": 1.0}, {"refused": "no"}, {"KL": None}, {"KL": 3.0}]
    assert field_pages.median(rows, "KL") == 3.0
    assert math.isnan(field_pages.median(rows[1:2], "KL"))


def test_all_noises_and_methods_have_the_same_point_of_a_network():
    models, inputs = zip(
        *(field_networks.case("strided CNN", noise, 0).build() for noise in (0.1, 1.0)), strict=True
    )
    assert_close(inputs[0].mean, inputs[1].mean)
    assert_close(models[0][0].weight, models[1][0].weight)
    assert_close(10 * inputs[0].stddev, inputs[1].stddev)
    other = field_networks.case("strided CNN", 0.1, 1).build()[1]
    assert not torch.equal(other.mean, inputs[0].mean)


def test_names_of_methods_and_networks_are_parts_of_keys():
    assert not any("/" in name for name in (*field.METHODS, *field_networks.NETWORKS))
    assert len(field_networks.CLASSES) == 7
    assert set(field.SMOKE) <= set(field.METHODS)
    assert len(RIVALS) > 15
