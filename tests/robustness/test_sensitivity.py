"""Sensitivities against finite differences; the worst noise against closed forms."""

import math

import pytest
import torch
from scipy.special import ndtr
from torch import Tensor, nn

import covprop as cp
from covprop import robustness
from covprop.robustness.sensitivity import project_on_simplex
from tests.layers import propagate
from tests.oracles import assert_close
from tests.robustness.integrals import generator, network, normal_cdf, random_gaussian

STDDEV = 0.5
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
        x = cp.Gaussian.diagonal(x.mean, variance=x.variance, batch_dims=1)
    labels = torch.tensor([0, 2])
    found = robustness.sensitivity(model, x, labels, MEASURES[name]())
    assert found.shape == x.mean.shape

    def value(change: Tensor) -> Tensor:
        moved = cp.Gaussian(x.mean, x.covariance_matrix + torch.diag_embed(change))
        return MEASURES[name]()(propagate(model, moved), labels)

    for i in range(5):
        step = torch.zeros(2, 5, dtype=torch.float64)
        step[:, i] = 1e-5
        assert_close(found[:, i], (value(step) - value(-step)) / 2e-5, atol=1e-6)


def test_a_linear_network_has_the_squares_of_its_weights() -> None:
    model = nn.Linear(4, 3).double()
    x = cp.Gaussian.isotropic(torch.zeros(4).double(), stddev=0.5)
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
    narrow = cp.Gaussian.diagonal(mean, variance=variance)
    of = robustness.Misclassification(points=2**14, generator=generator())
    heat = robustness.sensitivity(model, narrow, 1, of)

    def wrong(more: Tensor) -> float:
        y = propagate(model, cp.Gaussian.diagonal(mean, variance=variance + more))
        found = robustness.misclassification_probability(y, 1, points=2**16, generator=generator(5))
        return float(found.probability)

    for i in range(5):
        step = torch.zeros(5, dtype=torch.float64)
        step[i] = 1e-3
        slope = (4 * wrong(step) - wrong(2 * step) - 3 * wrong(0 * step)) / 2e-3
        assert float(heat[i]) == pytest.approx(slope, abs=2e-3)


def test_the_label_is_the_decision_of_the_network_by_default() -> None:
    model = network(5, 20, 3)
    x = cp.Gaussian.isotropic(random_gaussian(4, size=5).mean, stddev=0.4, batch_dims=1)
    decided = model(x.mean).argmax(-1)
    of = robustness.ExpectedMargin()
    assert torch.equal(
        robustness.sensitivity(model, x, of=of), robustness.sensitivity(model, x, decided, of)
    )


def test_images_give_heat_maps_and_nothing_is_touched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(model, nn.Linear(48, 4)).eval()  # parameters that want gradients
    x = cp.Gaussian.isotropic(torch.rand(2, 1, 6, 6), stddev=0.2, batch_dims=1)
    with torch.no_grad():
        found = robustness.sensitivity(model, x)
    assert found.shape == (2, 1, 6, 6)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not x.mean.requires_grad


def test_any_function_of_output_and_label_is_a_measure() -> None:
    model = nn.Linear(3, 2).double()
    x = cp.Gaussian.isotropic(torch.zeros(3).double(), stddev=1.0)
    found = robustness.sensitivity(model, x, 0, lambda y, _: y.covariance_matrix[0, 1])
    weight = model.weight.detach()
    assert_close(found, weight[0] * weight[1], rtol=1e-12)


def test_methods_without_gradients_and_other_models_are_refused() -> None:
    model = network(3, 2)
    x = cp.Gaussian.isotropic(torch.zeros(3).double(), stddev=1.0)
    with pytest.raises(cp.UnsupportedOperation, match="gives no gradients"):
        robustness.sensitivity(model, x, 0, method=cp.MonteCarlo(100))
    with pytest.raises(TypeError, match="returns one tensor"):
        robustness.sensitivity(lambda t: (t, t), x, 0)
    with pytest.raises(cp.UnsupportedOperation, match="draws random numbers"):
        robustness.sensitivity(nn.Sequential(nn.Dropout(), nn.Linear(3, 2)).double(), x)
    with pytest.raises(cp.UnsupportedOperation, match="batch norm"):
        robustness.sensitivity(nn.BatchNorm1d(3).double(), x)


def linear() -> tuple[nn.Linear, Tensor]:
    """Two classes, and the weights of the first one's margin."""
    torch.manual_seed(2)
    model = nn.Linear(4, 2).double().requires_grad_(requires_grad=False)
    return model, model.weight[0] - model.weight[1]


def margin(model: nn.Module, mean: Tensor) -> Tensor:
    logits = model(mean)
    return logits[..., 0] - logits[..., 1]


@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_a_linear_network_is_shifted_along_its_weights(norm: float) -> None:
    model, weights = linear()
    x = cp.Gaussian.isotropic(random_gaussian(3, size=4).mean, stddev=STDDEV, batch_dims=1)
    radius = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    found = robustness.worst_noise(model, x, 0, robustness.Ball(radius, norm))
    direction = weights / weights.norm() if norm == 2 else weights.sign()
    length = weights.norm() if norm == 2 else weights.abs().sum()
    assert_close(found.shift, -radius[:, None] * direction, atol=1e-6)
    worst = normal_cdf(-(margin(model, x.mean) - radius * length) / (STDDEV * weights.norm()))
    assert_close(found.after.probability, worst, atol=1e-9)
    start = normal_cdf(-margin(model, x.mean) / (STDDEV * weights.norm()))
    assert_close(found.before.probability, start, rtol=1e-9)
    assert torch.equal(found.gaussian.variance, x.variance)


def test_a_linear_network_is_hit_where_its_weight_is_largest() -> None:
    model, weights = linear()
    mean = random_gaussian(size=4).mean
    label = int(model(mean).argmax())
    total = 0.3
    x = cp.Gaussian.isotropic(mean, stddev=1.0)
    found = robustness.worst_noise(model, x, None, robustness.VarianceBudget(total), steps=40)
    expected = torch.zeros(4, dtype=torch.float64)
    expected[weights.abs().argmax()] = total
    assert_close(found.gaussian.variance, expected, atol=1e-9)
    worst = ndtr(-float(margin(model, mean).abs()) / float(weights.abs().max()) / math.sqrt(total))
    assert float(found.after.probability) == pytest.approx(worst, rel=1e-9)
    assert_close(found.start.variance, torch.full((4,), total / 4, dtype=torch.float64), rtol=1e-12)
    assert int(model(found.gaussian.mean).argmax()) == label


@pytest.mark.parametrize(
    "within",
    [
        robustness.Ball(0.7),
        robustness.Ball(0.2, math.inf, bounds=(-2.0, 2.0)),
        robustness.VarianceBudget(),
        None,
    ],
    ids=["2-norm", "largest element", "variance", "default"],
)
def test_a_network_is_never_fooled_less_and_the_noise_stays_in_its_set(within: object) -> None:
    model = network(6, 20, 5)
    factor = 0.1 * random_gaussian(3, size=6).covariance_matrix
    x = cp.Gaussian(random_gaussian(3, size=6).mean.clamp(-2, 2), factor)
    found = robustness.worst_noise(model, x, within=within, steps=10, generator=generator())
    assert found.history.shape == (11, 3)
    assert bool((found.history.diff(dim=0) >= 0).all())
    assert bool((found.after.probability > found.before.probability).all())
    assert torch.equal(found.history[-1], found.after.probability)
    if isinstance(within, robustness.Ball):
        length = found.shift.abs().amax(-1) if within.norm == math.inf else found.shift.norm(dim=-1)
        assert bool((length <= within.radius * (1 + 1e-12)).all())
        assert torch.equal(found.gaussian.covariance_matrix, x.covariance_matrix)
        assert within.bounds is None or bool((found.gaussian.mean.abs() <= 2).all())
    else:
        variance = found.gaussian.variance
        assert bool((variance >= 0).all())
        assert_close(variance.sum(-1), x.variance.sum(-1), rtol=1e-12)
        assert_close(found.start.variance, x.variance, rtol=1e-12)
        assert torch.equal(found.gaussian.mean, x.mean)
    labels = model(x.mean).argmax(-1)
    again = robustness.misclassification_probability(
        propagate(model, found.gaussian), labels, generator=generator()
    )
    assert_close(again.probability, found.after.probability, rtol=1e-9)
    start, end = (
        1 - robustness.sampled_probabilities(model, y, 20_000, generator(1)).probability.gather(
            -1, labels[:, None]
        )[:, 0]
        for y in (found.start, found.gaussian)
    )  # fmt: skip
    assert bool((end > start).all())
    assert_close(end, found.after.probability, atol=0.1)  # noise in few elements is not mixed


def test_the_margin_leads_where_the_probability_is_flat() -> None:
    """Without any noise, and with so little that the probability is zero in float32."""
    model, weights = linear()
    mean = random_gaussian(size=4).mean
    label = int(model(mean).argmax())
    distance = float(margin(model, mean).abs() / weights.norm())
    ball = robustness.Ball(1.5 * distance)
    found = robustness.worst_noise(model, cp.Gaussian.constant(mean), label, ball)
    assert float(found.before.probability) == 0
    assert float(found.after.probability) == 1
    narrow = cp.Gaussian.isotropic(mean.float(), stddev=1e-3 * distance)
    found = robustness.worst_noise(model.float(), narrow, label, ball)
    assert float(found.before.probability) == 0
    assert float(found.after.probability) == 1
    model.double()


def test_a_model_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = cp.Gaussian.isotropic(torch.randn(2, 3), stddev=0.3, batch_dims=1)
    with torch.no_grad():
        robustness.worst_noise(model, x, 0, robustness.Ball(0.5), steps=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_nearest_point_of_a_simplex_is_nearest() -> None:
    values = torch.randn(50, 6, dtype=torch.float64, generator=generator())
    total = torch.rand(50, 1, dtype=torch.float64, generator=generator(1)) + 0.1
    found = project_on_simplex(values, total)
    assert bool((found >= 0).all())
    assert_close(found.sum(-1, keepdim=True), total, rtol=1e-12)
    # No other point of it is on the near side: (values - found) . (other - found) <= 0.
    for corner in range(6):
        other = torch.zeros(50, 6, dtype=torch.float64)
        other[:, corner] = total[:, 0]
        assert bool((((values - found) * (other - found)).sum(-1) <= 1e-12).all())
    assert_close(project_on_simplex(found, total), found, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: robustness.Ball(-1.0), "finite and not negative"),
        (lambda: robustness.Ball(1.0, norm=1.0), "2 or math.inf"),
        (lambda: robustness.Ball(1.0, bounds=(1.0, 0.0)), "low < high"),
        (lambda: robustness.VarianceBudget(0.0), "finite and positive"),
    ],
)
def test_sets_that_are_none_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_searches_that_cannot_be_are_refused() -> None:
    model, _ = linear()
    x = cp.Gaussian.isotropic(torch.ones(2, 4).double(), stddev=1.0, batch_dims=1)
    with pytest.raises(ValueError, match="steps is a whole number"):
        robustness.worst_noise(model, x, steps=0)
    with pytest.raises(ValueError, match="no variance to spread"):
        robustness.worst_noise(model, cp.Gaussian.constant(x.mean, 1))
    with pytest.raises(ValueError, match="beyond the bounds"):
        robustness.worst_noise(model, x, within=robustness.Ball(1.0, bounds=(-0.5, 0.5)))
    with pytest.raises(ValueError, match="one number, or one for each"):
        robustness.worst_noise(model, x, within=robustness.Ball(torch.ones(3)))
    with pytest.raises(cp.UnsupportedOperation, match="gives no gradients"):
        robustness.worst_noise(model, x, method=cp.MonteCarlo(100))
