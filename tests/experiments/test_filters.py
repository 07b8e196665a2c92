"""What the committed results of filters show, and that the simulation is that of the model."""

import pytest
import torch

from experiments import filters, record
from experiments.options import RESULTS

GROUPS = filters.grouped(record.read(RESULTS / f"{filters.NAME}.json"))


@pytest.mark.parametrize("measure", filters.MEASURES)
@pytest.mark.parametrize("method", [name for name in filters.METHODS if name != filters.EXTENDED])
@pytest.mark.parametrize("name", filters.SYSTEMS)
def test_moment_matching_is_at_least_as_good_as_the_extended_filter(
    name: str, method: str, measure: str
) -> None:
    seeds = GROUPS[name]
    assert len(seeds) == filters.SEEDS
    mean, error = filters.advantage(seeds, method, measure)
    assert mean >= -error


def test_an_advantage_is_a_smaller_error_or_a_larger_likelihood() -> None:
    better = {"filter": 1.0, "readings": -1.0}
    worse = {"filter": 1.5, "readings": -3.0}
    seeds = [{"EKF": worse, "UKF": better}, {"EKF": worse, "UKF": worse}]
    assert filters.advantage(seeds, "UKF", "filter") == (0.25, 0.25)
    assert filters.advantage(seeds, "UKF", "readings") == (1.0, 1.0)


@pytest.mark.parametrize("name", filters.SYSTEMS)
def test_the_first_simulated_states_and_readings_have_the_moments_of_the_model(name: str) -> None:
    """Within five standard errors of 20,000 sequences and of 200,000 samples."""
    system, count = filters.SYSTEMS[name](), 20_000
    true, readings = filters.simulated(system, count, 1, seed=3)
    state = system.model.predict(system.start, "montecarlo:200000")
    slack = 5 * state.stddev * (1 / count + 1 / 200_000) ** 0.5
    assert bool(((true[0].mean(0) - state.mean).abs() <= slack).all())
    ratio = true[0].std(0) / state.stddev
    assert bool(((ratio - 1).abs() < 0.05).all())
    noise = (readings - system.model.measurement(true))[0].std(0)
    expected = torch.full_like(noise, float(system.model.measurement_stddev))
    assert bool(((noise / expected - 1).abs() < 5 / (2 * count) ** 0.5).all())
