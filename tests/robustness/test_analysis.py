"""Everything about a classifier under noise, in one result."""

import json

import torch
from torch import nn

import covprop as cp
from covprop import robustness


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(inputs: int, *sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers[:-1]).double().eval()


def test_a_record_is_json_and_has_the_shapes_of_the_result() -> None:
    model = network(6, 20, 4)
    x = cp.Gaussian.isotropic(torch.randn(2, 6, dtype=torch.float64), 0.3, batch_dims=1)
    found = robustness.analyse(model, x, generator=generator(), samples=500)
    told = json.loads(json.dumps(found.record()))
    assert len(told["probabilities"]["probability"]) == 2
    assert len(told["sensitivity"][0]) == 6
    assert told["budget"]["reason"] == list(found.budget.reason)
    assert "noise budget" in str(found)
