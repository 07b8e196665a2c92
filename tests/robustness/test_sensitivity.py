"""Derivatives with respect to the noise of each input element, against finite differences."""

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import robustness
from tests.oracles import assert_close
from tests.robustness.integrals import generator, network, random_gaussian

MEASURES = {
    "misclassification": lambda: robustness.Misclassification(generator=generator()),
    "margin": robustness.ExpectedMargin,
    "standardised": robustness.StandardisedMargin,
    "variance": robustness.OutputVariance,
    "one variance": lambda: robustness.OutputVariance(1),
}


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("dense", [False, True])
def test_sensitivities_are_finite_differences(name: str, dense: bool) -> None:
    model = network(5, 20, 3)
    x = random_gaussian(2, size=5)
    x = cp.Gaussian(x.mean, 0.1 * x.covariance_matrix)
    if not dense:
        x = cp.Gaussian.diagonal(x.mean, x.variance, batch_dims=1)
    labels = torch.tensor([0, 2])
    found = robustness.sensitivity(model, x, labels, MEASURES[name]())
    assert found.shape == x.mean.shape

    def value(change: Tensor) -> Tensor:
        moved = cp.Gaussian(x.mean, x.covariance_matrix + torch.diag_embed(change))
        return MEASURES[name]()(cp.propagate(model, moved), labels)

    for i in range(5):
        step = torch.zeros(2, 5, dtype=torch.float64)
        step[:, i] = 1e-5
        assert_close(found[:, i], (value(step) - value(-step)) / 2e-5, atol=1e-6)


def test_a_linear_network_has_the_squares_of_its_weights() -> None:
    model = nn.Linear(4, 3).double()
    x = cp.Gaussian.isotropic(torch.zeros(4).double(), 0.5)
    found = robustness.sensitivity(model, x, of=robustness.OutputVariance())
    assert_close(found, model.weight.detach().square().sum(0), rtol=1e-12)
    one = robustness.sensitivity(model, x, of=robustness.OutputVariance(2))
    assert_close(one, model.weight.detach()[2].square(), rtol=1e-12)


def test_it_is_defined_at_zero_noise_and_with_noise_in_few_elements() -> None:
    """What is new noise adds to the variance of the margin, however many elements vary already."""
    model = network(5, 4)
    mean = random_gaussian(size=5).mean
    still = cp.Gaussian.constant(mean)
    found = robustness.sensitivity(model, still, of=robustness.OutputVariance())
    assert_close(found, model[0].weight.square().sum(0), rtol=1e-12)
    certain = robustness.sensitivity(model, still)
    assert_close(certain, torch.zeros(5, dtype=torch.float64), atol=0)
    variance = torch.tensor([4.0, 0, 0, 0, 0]).double()  # logits on a line
    narrow = cp.Gaussian.diagonal(mean, variance)
    of = robustness.Misclassification(points=2**14, generator=generator())
    heat = robustness.sensitivity(model, narrow, 1, of)

    def wrong(more: Tensor) -> float:
        y = cp.propagate(model, cp.Gaussian.diagonal(mean, variance + more))
        found = robustness.misclassification_probability(y, 1, points=2**16, generator=generator(5))
        return float(found.probability)

    for i in range(5):
        step = torch.zeros(5, dtype=torch.float64)
        step[i] = 1e-3
        slope = (4 * wrong(step) - wrong(2 * step) - 3 * wrong(0 * step)) / 2e-3
        assert float(heat[i]) == pytest.approx(slope, abs=2e-3)


def test_the_label_is_the_decision_of_the_network_by_default() -> None:
    model = network(5, 20, 3)
    x = cp.Gaussian.isotropic(random_gaussian(4, size=5).mean, 0.4, batch_dims=1)
    decided = model(x.mean).argmax(-1)
    of = robustness.ExpectedMargin()
    assert torch.equal(
        robustness.sensitivity(model, x, of=of), robustness.sensitivity(model, x, decided, of)
    )


def test_images_give_heat_maps_and_nothing_is_touched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(model, nn.Linear(48, 4)).eval()  # parameters that want gradients
    x = cp.Gaussian.isotropic(torch.rand(2, 1, 6, 6), 0.2, batch_dims=1)
    with torch.no_grad():
        found = robustness.sensitivity(model, x)
    assert found.shape == (2, 1, 6, 6)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not x.mean.requires_grad


def test_any_function_of_output_and_label_is_a_measure() -> None:
    model = nn.Linear(3, 2).double()
    x = cp.Gaussian.isotropic(torch.zeros(3).double(), 1.0)
    found = robustness.sensitivity(model, x, 0, lambda y, _: y.covariance_matrix[0, 1])
    weight = model.weight.detach()
    assert_close(found, weight[0] * weight[1], rtol=1e-12)


def test_methods_without_gradients_and_other_models_are_refused() -> None:
    model = network(3, 2)
    x = cp.Gaussian.isotropic(torch.zeros(3).double(), 1.0)
    with pytest.raises(cp.UnsupportedOperation, match="gives no gradients"):
        robustness.sensitivity(model, x, 0, method=cp.MonteCarlo(100))
    with pytest.raises(TypeError, match="returns one tensor"):
        robustness.sensitivity(lambda t: (t, t), x, 0)
    with pytest.raises(cp.UnsupportedOperation, match="draws random numbers"):
        robustness.sensitivity(nn.Sequential(nn.Dropout(), nn.Linear(3, 2)).double(), x)
    with pytest.raises(cp.UnsupportedOperation, match="batch norm"):
        robustness.sensitivity(nn.BatchNorm1d(3).double(), x)
