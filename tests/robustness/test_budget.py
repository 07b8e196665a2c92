"""Noise budgets against closed forms, samples and networks made to be awkward."""

import dataclasses
import json
import math

import pytest
import torch
from scipy.special import ndtri
from torch import Tensor, nn

import covprop as cp
from covprop import robustness
from covprop.robustness import budget as reasons
from covprop.robustness.budget import Endpoint, find_roots
from tests.layers import propagate
from tests.oracles import assert_close
from tests.robustness.integrals import generator, network, random_gaussian


def linear(classes: int = 2, inputs: int = 4) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, classes).double().requires_grad_(requires_grad=False)


@pytest.mark.parametrize("target", [0.6, 0.99, 0.999999])
def test_two_classes_of_a_linear_network_have_a_closed_form(target: float) -> None:
    model = linear()
    mean = random_gaussian(3, size=4).mean
    found = robustness.noise_budget(model, mean, probability=target, batch_dims=1)
    direction = model.weight[0] - model.weight[1]
    margin = (model(mean) @ torch.tensor([1.0, -1.0]).double()).abs()
    expected = margin / (direction.norm() * ndtri(target))
    assert_close(found.level, expected, rtol=2e-4)
    assert bool((found.level <= expected * (1 + 1e-9)).all())  # from the side that keeps
    assert found.reason == (reasons.FOUND,) * 3
    assert found.found.tolist() == [True] * 3
    assert_close(found.stddev, found.level, rtol=1e-12)
    assert bool((found.probability >= target).all())
    assert len(found.levels) < 25


def test_a_covariance_is_the_shape_of_the_noise() -> None:
    model = linear()
    x = random_gaussian(size=4, seed=3)
    found = robustness.noise_budget(model, x, probability=0.9)
    direction = model.weight[0] - model.weight[1]
    spread = (direction @ x.covariance_matrix @ direction).sqrt()
    margin = (model(x.mean) @ torch.tensor([1.0, -1.0]).double()).abs()
    assert_close(found.level, margin / (spread * ndtri(0.9)), rtol=2e-4)
    assert_close(found.stddev, found.level * x.variance.mean().sqrt(), rtol=1e-12)
    diagonal = cp.Gaussian.diagonal(x.mean, variance=x.variance)
    spread = (direction.square() @ x.variance).sqrt()
    found = robustness.noise_budget(model, diagonal, probability=0.9)
    assert_close(found.level, margin / (spread * ndtri(0.9)), rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_probability_at_the_budget_is_the_target(dtype: torch.dtype) -> None:
    model = network(6, 30, 5).to(dtype)
    mean = random_gaussian(4, size=6).mean.to(dtype)
    found = robustness.noise_budget(
        model, mean, batch_dims=1, method=cp.GaussianLayers(), generator=generator()
    )
    labels = model(mean).argmax(-1)
    noisy = cp.Gaussian.isotropic(mean, stddev=found.level, batch_dims=1)
    wrong = robustness.misclassification_probability(
        propagate(model, noisy, cp.GaussianLayers()),
        labels,
        points=2**14,
        generator=generator(1),
    )
    assert found.level.dtype == dtype
    assert_close(1 - wrong.probability, torch.full((4,), 0.99, dtype=dtype), atol=1e-4)
    assert_close(found.probability, torch.full((4,), 0.99, dtype=dtype), atol=1e-4)
    samples = robustness.sampled_probabilities(model, noisy, 20_000, generator(2))
    kept = samples.probability.gather(-1, labels[:, None])[:, 0]
    assert bool(((kept - 0.99).abs() < 0.02).all())  # the Gaussian assumption


def test_it_is_deterministic_and_a_batch_is_its_elements() -> None:
    model = network(6, 30, 5)
    mean = random_gaussian(3, size=6).mean
    found = robustness.noise_budget(model, mean, batch_dims=1, generator=generator())
    again = robustness.noise_budget(model, mean, batch_dims=1, generator=generator())
    assert torch.equal(found.level, again.level)
    one = robustness.noise_budget(model, mean[1], generator=generator())
    assert_close(one.level, found.level[1], rtol=1e-3)
    assert one.level.shape == ()


def test_what_is_wrong_without_noise_has_no_budget() -> None:
    model = linear(3)
    mean = random_gaussian(2, size=4).mean
    decided = model(mean).argmax(-1)
    labels = torch.stack([decided[0], (decided[1] + 1) % 3])
    found = robustness.noise_budget(model, mean, labels, batch_dims=1, generator=generator())
    assert found.reason == (reasons.FOUND, reasons.MISCLASSIFIED)
    assert found.level[0] > 0
    assert found.level[1] == 0
    assert found.probability[1] == 0
    assert found.found.tolist() == [True, False]


def test_what_no_noise_changes_is_kept_to_the_largest_level() -> None:
    def shifted(x: Tensor) -> Tensor:
        """Noise moves both logits alike."""
        return torch.cat([x + 1, x], dim=-1)

    found = robustness.noise_budget(shifted, torch.zeros(1).double(), largest=8.0)
    assert found.reason == (reasons.KEPT,)
    assert float(found.level) == 8
    assert float(found.probability) == 1
    assert not bool(found.found)


def without_noise(kind: str, mean: Tensor) -> cp.Gaussian:
    """Gaussians whose first element of the batch does not vary, of any structure."""
    size = mean.shape[-1]
    variance = torch.ones_like(mean)
    variance[0] = 0
    if kind == "diagonal":
        return cp.Gaussian.diagonal(mean, variance=variance, batch_dims=1)
    if kind == "low rank":
        return cp.Gaussian.low_rank(mean, variance[..., None], variance=variance, batch_dims=1)
    return cp.Gaussian(mean, variance[:, :, None] * torch.eye(size).to(mean))


@pytest.mark.parametrize("kind", ["diagonal", "dense", "low rank"])
def test_where_there_is_no_noise_there_is_no_level(kind: str) -> None:
    model, mean = linear(), random_gaussian(3, size=4).mean
    found = robustness.noise_budget(model, without_noise(kind, mean))
    assert found.reason == (reasons.NO_NOISE, reasons.FOUND, reasons.FOUND)
    assert found.level.isnan().tolist() == [True, False, False]
    assert found.found.tolist() == [False, True, True]
    assert float(found.stddev[0]) == 0
    assert float(found.probability[0]) == 1
    assert found.pick((0,)).levels.tolist() == [0.0]
    alone = robustness.noise_budget(model, without_noise(kind, mean)[1])
    assert_close(found.level[1], alone.level, rtol=1e-4)  # the tolerance of the search
    both, one = (
        robustness.noise_budget(model, x, method=cp.GaussianLayers()).level
        for x in (without_noise(kind, mean), without_noise(kind, mean)[1])
    )
    assert_close(both[1], one, rtol=1e-12)
    decided = model(mean).argmax(-1)
    wrong = robustness.noise_budget(model, without_noise(kind, mean), 1 - decided)
    assert set(wrong.reason) == {reasons.MISCLASSIFIED}
    told = json.loads(json.dumps(found.record(), allow_nan=False))
    assert told["level"][0] == "nan"


def test_levels_are_written_as_they_are_known() -> None:
    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x + 1, x], dim=-1)

    found = robustness.noise_budget(shifted, torch.zeros(1).double())
    assert found.written() == "at least 1,024"
    assert found.bounded.tolist() is True
    still = robustness.noise_budget(shifted, cp.Gaussian.isotropic(torch.zeros(1), stddev=0.0))
    assert still.written() == "-"
    for level, text in [(0.53512, "0.535"), (12.34, "12.3"), (123.4, "123"), (1023.6, "1,024")]:
        moved = dataclasses.replace(
            found, level=torch.tensor(level).double(), reason=(reasons.FOUND,)
        )
        assert moved.written() == text


def test_what_the_least_noise_changes_is_lost() -> None:
    model = nn.Linear(1, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model.bias.copy_(torch.tensor([1e-9, 0.0]))
    found = robustness.noise_budget(model, torch.zeros(1).double())
    assert found.reason == (reasons.LOST,)
    assert float(found.level) == 0
    assert float(found.levels[1]) < 2**-19


def test_a_probability_that_rises_with_the_noise_is_told() -> None:
    """A margin 0.3 - 3 x + x^2, whose mean grows with the noise: Phi(0.36) at 0.5, 0.39 at 1."""

    def model(x: Tensor) -> Tensor:
        return torch.cat([0.3 - 3 * x + x.square(), 0 * x], dim=-1)

    x, method = torch.zeros(1).double(), cp.GaussianLayers()
    found = robustness.noise_budget(model, x, 0, probability=0.675, method=method)
    assert found.reason == (reasons.NOT_MONOTONE,)
    assert bool(found.found)
    assert 0.25 < float(found.level) < 0.5
    assert bool((found.probabilities.diff() > 0.01).any())


def test_dropout_that_is_on_counts_as_noise() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[1].bias.copy_(torch.tensor([4.0, -4.0]))
    mean = torch.zeros(4).double()
    found = robustness.noise_budget(model, mean, 0)
    still = robustness.noise_budget(model.eval(), mean, 0)
    assert 0 < float(found.level) < float(still.level)


def test_arguments_that_cannot_be_are_refused() -> None:
    model, mean = linear(), torch.zeros(4).double()
    for options, message in [
        ({"probability": 1.0}, "probability is between"),
        ({"largest": math.inf}, "largest is a finite level"),
        ({"tolerance": 0.0}, "tolerance is between"),
    ]:
        with pytest.raises(ValueError, match=message):
            robustness.noise_budget(model, mean, **options)
    with pytest.raises(ValueError, match="does not vary"):
        robustness.noise_budget(model, cp.Gaussian.constant(mean))


# The roots.


@pytest.mark.parametrize("tolerance", [1e-3, 1e-10])
def test_roots_are_found_side_by_side_with_few_evaluations(tolerance: float) -> None:
    roots = torch.tensor([0.3, 1.0, 2.0, 2.99], dtype=torch.float64)
    functions = [
        lambda x: x - 0.3, lambda x: x**3 - 1, lambda x: torch.exp(x) - math.exp(2),
        lambda x: torch.atan(100 * (x - 2.99)),
    ]  # fmt: skip
    count = 0

    def function(place: Tensor, active: Tensor) -> Tensor:
        nonlocal count
        count += 1
        assert bool(active.any())
        return torch.stack([f(x) for f, x in zip(functions, place, strict=True)])

    everywhere = torch.ones(4, dtype=torch.bool)
    left, right = torch.full((4,), 0.1).double(), torch.full((4,), 3.0).double()
    first, second = (
        Endpoint(left, function(left, everywhere)),
        Endpoint(right, function(right, everywhere)),
    )
    found = find_roots(function, first, second, everywhere, tolerance)
    assert_close(found.place, roots, rtol=2 * tolerance)
    assert bool((found.value >= 0).all())
    assert count < (16 if tolerance > 1e-6 else 30)


def test_what_has_no_bracket_is_left_alone() -> None:
    ends = [Endpoint(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])),
            Endpoint(torch.tensor([2.0, 2.0]), torch.tensor([-1.0, 2.0]))]  # fmt: skip
    active = torch.tensor([True, False])
    found = find_roots(lambda x, _: 1.5 - x, *ends, active, 1e-6)
    assert float(found.place[0]) == pytest.approx(1.5, rel=1e-5)
    assert float(found.place[1]) == 1


def test_a_record_of_it_is_plain() -> None:
    """One input has one reason; a batch has one for each, nested as its levels are."""
    found = robustness.noise_budget(linear(), torch.ones(4).double())
    told = json.loads(json.dumps(found.record()))
    assert told["reason"] == reasons.FOUND
    assert told["level"] == float(found.level)
    many = robustness.noise_budget(linear(), torch.ones(2, 1, 4).double(), batch_dims=2)
    told = json.loads(json.dumps(many.record()))
    assert told["reason"] == [[reasons.FOUND], [reasons.FOUND]]
    assert told["level"] == many.level.tolist()
