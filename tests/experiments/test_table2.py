"""What the committed table 2 shows, once it has instances enough."""

from typing import Any

import numpy as np
import pytest

from experiments import record, table2
from experiments.options import RESULTS
from experiments.ratio_methods import CENTRED, EXACT, PIECEWISE, PUBLISHED, SERIES
from experiments.ratios import ratio

ENOUGH = 40


@pytest.fixture(scope="module")
def instances() -> list[dict[str, Any]]:
    path = RESULTS / f"{table2.NAME}.json"
    found = list(record.read(path)["results"].values())
    assert len(found) >= ENOUGH, "go on with `python -m experiments table2`"
    return found


def printed(method: str) -> np.ndarray:
    return np.array([float(cell.split()[0]) for cell in table2.PRINTED[method]])


def test_the_exact_method_is_closer_to_one_than_the_paper(instances):
    found = ratio(instances, EXACT, "variance").average
    assert np.abs(found - 1).mean() < np.abs(printed(PUBLISHED) - 1).mean()


def test_truncated_variances_are_too_small_for_every_logit(instances):
    truncated, series = (ratio(instances, name, "variance") for name in (PUBLISHED, SERIES))
    assert bool((truncated.average > series.average + 5e-4).all())


def test_pl_dnn_is_ten_times_as_far_off_and_spreads_more(instances):
    exact, old, new = (ratio(instances, name, "variance") for name in (EXACT, CENTRED, PIECEWISE))
    assert np.abs(old.average - 1).mean() > 10 * np.abs(exact.average - 1).mean()
    assert bool((old.spread > exact.spread).all())
    assert bool((new.spread > exact.spread).all())


def test_pl_dnn_s_ratios_are_of_the_size_of_the_paper_s(instances):
    found = ratio(instances, CENTRED, "variance")
    spread = np.array([float(cell.split()[2]) for cell in table2.PRINTED[CENTRED]])
    assert found.average.mean() == pytest.approx(printed(CENTRED).mean(), abs=0.1)
    assert np.abs(found.average - printed(CENTRED)).max() < 0.25  # another network
    assert found.spread.mean() == pytest.approx(spread.mean(), rel=0.4)


def test_the_exact_method_spreads_no_more_than_the_paper(instances):
    spread = np.array([float(cell.split()[2]) for cell in table2.PRINTED[PUBLISHED]])
    assert ratio(instances, EXACT, "variance").spread.mean() <= spread.mean()


def test_the_weights_are_those_of_the_committed_training(instances):
    trained = record.read(RESULTS / "train-mnist.json")
    settings = record.read(RESULTS / f"{table2.NAME}.json")["settings"]
    assert settings["weights"] == trained["results"]["sha256"]
    assert len(instances) >= ENOUGH


def test_the_network_is_above_99_percent():
    trained = record.read(RESULTS / "train-mnist.json")
    assert trained["results"]["test accuracy"] > 0.99
    assert not trained["settings"]["smoke"]
