"""What the committed table 1 shows, network by network as far as it has been measured."""

from typing import Any

import numpy as np
import pytest

from experiments import record, table1
from experiments.options import RESULTS
from experiments.ratio_methods import CENTRED, EXACT, PUBLISHED, SERIES
from experiments.ratios import noise, ratio

ENOUGH = {"FC-4": 200, "FC-8": 200, "CNN-4": 50, "CNN-8": 50}
every_network = pytest.mark.parametrize("network", table1.NETWORKS)


def instances(network: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{table1.NAME}.json"
    found = table1.grouped(record.read(path))[network, "published"]
    assert len(found) >= ENOUGH[network], "go on with `python -m experiments table1`"
    return found


def printed(network: str, method: str) -> tuple[float, float]:
    average, spread = table1.PRINTED[network][method][1].split(" ± ")
    return float(average), float(spread)


@every_network
def test_the_exact_method_is_closer_to_one_than_the_paper_and_spreads_no_more(network):
    found = ratio(instances(network), EXACT, "variance")
    average, spread = printed(network, PUBLISHED)
    assert abs(found.average[0] - 1) < abs(average - 1)
    assert round(found.spread[0], 3) <= spread  # three decimals are printed


@every_network
def test_the_published_method_gives_the_published_numbers(network):
    rows = instances(network)
    found = ratio(rows, PUBLISHED, "variance")
    average, spread = printed(network, PUBLISHED)
    error = np.hypot(spread / np.sqrt(200), found.spread[0] / np.sqrt(len(rows)))
    assert abs(found.average[0] - average) < 4 * error
    assert found.spread[0] == pytest.approx(spread, rel=0.4)


@every_network
def test_pl_dnn_s_numbers_are_of_the_size_of_the_paper_s(network):
    found = ratio(instances(network), CENTRED, "variance")
    average, spread = printed(network, CENTRED)
    assert found.average[0] == pytest.approx(average, abs=0.5 * spread)
    assert found.spread[0] == pytest.approx(spread, rel=0.5)


@every_network
def test_the_order_of_the_series_does_not_matter_but_its_variances_do(network):
    rows = instances(network)
    exact, series = (ratio(rows, method, "variance").average[0] for method in (EXACT, SERIES))
    assert series == pytest.approx(exact, abs=5e-4)
    assert ratio(rows, PUBLISHED, "variance").average[0] > series + 2e-3


@every_network
def test_the_noise_of_sampling_is_that_of_a_gaussian_s_variance(network):
    expected = np.sqrt(2 / table1.settings(table1.Options())["samples"])
    assert noise(instances(network), "variance")[0] == pytest.approx(expected, rel=0.1)
