"""Tables as words, ratios as the paper defines them."""

import numpy as np
import pytest

from experiments.ratio_methods import EXACT, SAMPLED
from experiments.ratios import noise, ratio, seconds
from experiments.table import Table


def test_a_table_is_markdown_and_latex():
    table = Table("Errors", ["", "ρ = 0.5"], [["order_1", "2.03e-02"], ["b", "1.0 ± 0.1"]], "All.")
    assert table.markdown() == (
        "## Errors\n\nAll.\n\n|  | ρ = 0.5 |\n| --- | ---: |\n"
        "| order_1 | 2.03e-02 |\n| b | 1.0 ± 0.1 |\n"
    )
    latex = table.latex()
    assert r"order\_1 & $2.03 \times 10^{-2}$ \\" in latex
    assert r"b & $1.0 \pm 0.1$ \\" in latex
    assert r"\caption{Errors. All.}" in latex


def instances() -> list[dict[str, dict[str, object]]]:
    return [
        {
            SAMPLED: {"variance": [variance], "variance stderr": [0.02 * variance], "seconds": 1.0},
            EXACT: {"variance": [2.0], "seconds": time},
        }
        for variance, time in ((2.0, 3.0), (2.2, 1.0), (2.4, 2.0))
    ]


def test_a_ratio_is_monte_carlo_over_the_method():
    found = ratio(instances(), EXACT, "variance")
    assert found.average[0] == pytest.approx(1.1)
    assert found.spread[0] == pytest.approx(0.1)
    assert found.words() == "1.100 ± 0.100"


def test_the_noise_is_the_relative_standard_error():
    assert noise(instances(), "variance") == pytest.approx(np.array([0.02]))
    assert seconds(instances(), EXACT) == 2.0


def test_a_method_without_variance_is_infinitely_far_off():
    rows = instances()
    rows[0][EXACT]["variance"] = [0.0]
    assert np.isinf(ratio(rows, EXACT, "variance").average[0])
