"""What the committed results of third cumulants show."""

import numpy as np
import pytest

from experiments import accuracy, cumulants, record, table1
from experiments.cumulants import CUMULANTS, EXACT
from experiments.options import RESULTS
from experiments.ratio_methods import CUMULANTS as COLUMN
from experiments.ratio_methods import EXACT as EXACT_COLUMN
from experiments.ratios import noise, ratio

RECORD = record.read(RESULTS / f"{cumulants.NAME}.json")
RANDOM = cumulants.part_of(RECORD, cumulants.RANDOM)


def test_random_networks_have_a_third_of_the_error_and_half_of_the_large_ones():
    rows = list(cumulants.resolved(RANDOM).values())
    assert len(rows) >= cumulants.NETWORKS
    exact, ours = (cumulants.percentiles(rows, name, "stddev") for name in (EXACT, CUMULANTS))
    assert ours[0] < exact[0] / 3
    assert ours[1] < exact[1] / 2


def test_no_random_network_fails_without_a_note():
    assert cumulants.failures(RANDOM) == []


@pytest.mark.parametrize("level", cumulants.NOISES)
def test_the_digit_classifier_is_four_times_as_accurate(level):
    images = list(cumulants.part_of(RECORD, cumulants.DIGITS, str(level)).values())
    assert len(images) >= cumulants.IMAGES
    exact, ours, both = (
        np.mean(np.abs([row[name]["stddev"] for row in images]))
        for name in (EXACT, CUMULANTS, "Split(9, Cumulants())")
    )
    assert both < 0.5 * ours < 0.5 * exact / 4
    assert cumulants.worse(images, CUMULANTS) <= 0.05


def test_means_of_wide_networks_are_a_tenth_as_far_off():
    rows = list(cumulants.part_of(RECORD, cumulants.WIDE, "8").values())
    exact, ours = (
        np.mean([row[name]["mean square error"] for row in rows]) for name in (EXACT, CUMULANTS)
    )
    assert ours < 4e-6
    assert ours < exact / 10


@pytest.mark.parametrize("network", ["FC-4", "FC-8"])
def test_the_spread_of_table_1_falls_to_a_quarter_or_to_that_of_sampling(network):
    groups = table1.grouped(record.read(RESULTS / f"{table1.NAME}.json"))
    for setup in ("published", "text"):
        rows = groups[network, setup]
        exact, ours = (ratio(rows, name, "variance").spread[0] for name in (EXACT_COLUMN, COLUMN))
        assert ours < max(exact / 4, 1.2 * noise(rows, "variance")[0])


def test_errors_of_eight_of_ten_architectures_are_halved():
    results = record.read(RESULTS / f"{accuracy.NAME}.json")["results"]
    halved = []
    for name in accuracy.ARCHITECTURES:
        rows = results[f"{name}/{accuracy.CUMULANTS}/0.3"]
        exact, ours = (max(row[key] for row in rows) for key in ("exact", accuracy.CUMULANTS))
        halved.append(ours <= exact / 2)
    assert sum(halved) >= 8
