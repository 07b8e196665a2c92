"""Random networks are as they are described, and what is said of them counts as it should."""

import numpy as np
import pytest
import torch
from torch import nn

from experiments import cumulants
from experiments import random_networks as networks
from experiments.randomness import seeded


def drawn(count: int) -> list[networks.Description]:
    with seeded("test", "random networks"):
        return [networks.draw() for _ in range(count)]


def test_descriptions_cover_what_they_may():
    found = drawn(500)
    widths = {width for each in found for width in each.widths}
    noises = np.log([each.noise for each in found])
    low, high = np.log(networks.NOISES)
    assert widths == set(range(2, 65))
    assert {len(each.widths) - 1 for each in found} == set(range(2, 7))
    assert {name for each in found for name in each.activations} == set(networks.ACTIVATIONS)
    assert np.mean([each.skips for each in found]) == pytest.approx(networks.SKIPS, abs=0.07)
    assert low <= noises.min() < noises.max() <= high
    assert noises.mean() == pytest.approx((low + high) / 2, abs=0.15)


def test_a_network_is_what_its_description_says():
    for each in drawn(20):
        model = networks.build(each)
        x = torch.zeros(3, each.widths[0], dtype=torch.float64)
        assert model(x).shape == (3, each.widths[-1])
        names = [type(module).__name__ for module in model.modules()]
        assert [name for name in names if name in networks.ACTIVATIONS] == each.activations
        residual = [module for module in model if isinstance(module, networks.Residual)]
        assert len(residual) == (len(each.activations) - 1 if each.skips else 0)
        for module in residual:
            projects = isinstance(module.skip, nn.Linear)
            assert projects == (module.layer[0].in_features != module.layer[0].out_features)


def test_a_wide_network_keeps_the_size_of_its_input():
    with seeded("test", "wide"):
        model = networks.wide(512, 3)
        x = torch.randn(256, 512)
    assert len(model) == 6
    assert all(module.bias is None for module in model if isinstance(module, nn.Linear))
    assert float(model(x).square().mean()) == pytest.approx(1.0, rel=0.3)


def row(exact: float, ours: float, notes: int = 0, known: int = 4) -> dict[str, object]:
    return {
        "known": [known, 4], "stderr": 0.001,
        cumulants.EXACT: {"stddev": exact}, cumulants.CUMULANTS: {"stddev": ours, "notes": notes},
    }  # fmt: skip


def test_a_failure_is_a_large_error_that_exact_has_not_and_no_note_tells():
    rows = {
        "small": row(0.01, 0.09), "both": row(0.3, 0.2), "noted": row(0.01, 0.3, notes=1),
        "unknown": row(0.01, 0.3, known=0), "failed": row(0.05, 0.11),
        "refused": {**row(0.01, 0.3), cumulants.EXACT: {"refused": "negative"}},
    }  # fmt: skip
    assert cumulants.failures(rows) == ["failed"]


def test_worse_is_by_more_than_the_error_of_the_truth():
    image = {
        "stderr": [0.01, 0.01, 0.01, 0.01],
        cumulants.EXACT: {"stddev": [0.02, -0.02, 0.02, 0.0]},
        cumulants.CUMULANTS: {"stddev": [0.04, 0.025, -0.05, 0.005]},
    }
    assert cumulants.worse([image], cumulants.CUMULANTS) == 0.5
