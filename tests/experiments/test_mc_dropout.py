"""What the committed results of Monte Carlo dropout show, and what their errors are."""

import pytest
import torch

import covprop as cp
from experiments import mc_dropout, record
from experiments.options import RESULTS

FOUND = record.read(RESULTS / f"{mc_dropout.NAME}.json")["results"]


@pytest.mark.parametrize("key", FOUND)
def test_moments_without_draws_are_nearer_than_fifty_passes(key: str) -> None:
    few, *others = FOUND[key].values()
    measures = (
        ("mean", "stddev", "probability") if key.startswith("classes") else ("mean", "stddev")
    )
    assert all(other[name] < few[name] for other in others for name in measures)


def test_errors_are_in_deviations_and_relative() -> None:
    truth = torch.tensor([[[0.0]], [[2.0]]])  # mean 1, deviation sqrt 2
    exact = 2**0.5
    found = mc_dropout.errors(
        torch.full((1, 1), 1 + 0.1 * exact),
        torch.full((1, 1), 1.2 * exact),
        torch.ones(1, 1),
        truth,
    )
    assert found == pytest.approx({"mean": 0.1, "stddev": 0.2, "probability": 0.0}, abs=1e-6)


def test_passes_have_masks_of_their_own_for_each_row() -> None:
    """Those of one dropout of a constant: its moments are known."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.2))
    torch.manual_seed(0)
    drawn = mc_dropout.passes(model.eval(), torch.ones(2, 3), 1200)
    assert drawn.shape == (1200, 2, 3)
    y = cp.mc_dropout(model, torch.ones(2, 3))
    error = 5 * y.stddev / 1200**0.5
    assert bool(((drawn.mean(0) - y.mean).abs() < error).all())
    assert not torch.equal(drawn[:, 0], drawn[:, 1])
