"""Mean, variance and coefficients of every activation against quadrature of the function itself."""

import pytest
import torch
from torch import Tensor

from tests.cases import CASES, CONTINUOUS, SMOOTH
from tests.oracles import assert_close, assert_gradients, moments

ORDER = 8
POINTS = [(-1.3, 0.5), (0.2, 1.0), (0.9, 2.0), (2.5, 0.1), (0.0, 1.0), (0.35, 1e-3), (-0.4, 6.0)]
"""(mean, standard deviation): near and far from the kinks, at zero, narrow and wide."""
TOLERANCE = 1e-9
"""Of the natural scale; torch's softplus alone costs 3e-10 of it where it becomes linear."""
OFF_KINK = [-2.3, -0.9, 0.27, 1.7]
"""Places where every case is smooth."""

DIFFERENCES = 1e-9
"""What five-point differences are good for."""

every_case = pytest.mark.parametrize("name", CASES)


def points(name: str) -> list[tuple[float, float]]:
    # The sixth power of exp has a mean of e^18 sigma^2: quadrature of it needs a smaller sigma.
    return [(m, s) for m, s in POINTS if name != "exp" or s < 3]


def columns(pairs: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    mean, stddev = torch.tensor(pairs, dtype=torch.float64).T
    return mean, stddev.square()


def derivative(name: str, y: Tensor, times: int = 1) -> Tensor:
    """g' or g'' by five points; torch has no second derivative of some functions."""
    step = 3e-3
    weights = {1: (1 / 12, -2 / 3, 0, 2 / 3, -1 / 12), 2: (-1 / 12, 4 / 3, -5 / 2, 4 / 3, -1 / 12)}
    values = [CASES[name].function(y + k * step) for k in (-2, -1, 0, 1, 2)]
    terms = [w * v for w, v in zip(weights[times], values, strict=True)]
    return torch.stack(terms).sum(0) / step**times


@every_case
def test_moments_and_coefficients_agree_with_quadrature(name):
    case, pairs = CASES[name], points(name)
    mean, variance = columns(pairs)
    activation = case.activation()
    expected = [moments(case.function, m, s, ORDER, case.kinks) for m, s in pairs]
    means = torch.tensor([row[0] for row in expected], dtype=torch.float64)
    variances = torch.tensor([row[1] for row in expected], dtype=torch.float64)
    rows = torch.stack([torch.from_numpy(row[2]) for row in expected], dim=-1)
    # A function value is rounded by eps |g|, whatever its variance.
    scale = variances.sqrt() + 1e-6 * means.abs() + 1e-30
    assert_close(activation.mean(mean, variance) / scale, means / scale, atol=TOLERANCE)
    found = activation.variance(mean, variance) / scale.square()
    assert_close(found, variances / scale.square(), atol=TOLERANCE)
    found = activation.coefficients(mean, variance, ORDER) * variance.sqrt()
    assert found.shape == (ORDER, len(pairs))
    assert_close(found / scale, rows / scale, atol=TOLERANCE)


@every_case
def test_without_variance_the_mean_is_the_value_and_the_slope_its_derivative(name):
    case = CASES[name]
    mean = torch.tensor(OFF_KINK, dtype=torch.float64)
    none = torch.zeros_like(mean)
    activation = case.activation()
    assert_close(activation.mean(mean, none), case.function(mean), rtol=1e-14, atol=1e-15)
    assert_close(activation.variance(mean, none), none, rtol=0.0)
    expected = torch.stack([derivative(name, mean), none, none, none])
    assert_close(activation.coefficients(mean, none, 4), expected, atol=DIFFERENCES)


@every_case
def test_without_variance_the_value_on_a_kink_is_the_functions_own(name):
    case = CASES[name]
    mean = torch.tensor([*case.kinks, 0.0], dtype=torch.float64)
    none = torch.zeros_like(mean)
    activation = case.activation()
    assert_close(activation.mean(mean, none), case.function(mean), atol=1e-15)
    assert_close(activation.variance(mean, none), none, rtol=0.0)
    assert bool(torch.isfinite(activation.coefficients(mean, none, 3)).all())


@every_case
def test_squared_coefficients_add_up_to_the_variance(name):
    mean, variance = columns([(-1.3, 0.5), (0.2, 1.0), (0.0, 1.0)])
    activation = CASES[name].activation()
    total = activation.variance(mean, variance)
    squares = variance * activation.coefficients(mean, variance, 400).square()
    shares = squares.cumsum(0) / torch.where(total > 0, total, 1)
    full = torch.where(total > 0, 1.0, 0.0).double()
    assert float((shares - full).max()) < 1e-12
    # a_k^2 falls like k^(-3/2) with a jump, like k^(-5/2) with a kink.
    left = 0.1 if CASES[name].jumps else 1e-3 if CASES[name].kinks else 1e-5
    assert_close(shares[-1], full, atol=left)
    assert float((full - shares[49]).abs().max()) >= float((full - shares[-1]).abs().max())


@every_case
def test_gradients_of_moments_agree_with_finite_differences(name):
    mean, variance = columns([(-1.3, 0.5), (0.2, 1.0), (0.9, 1.6)])
    activation = CASES[name].activation()

    def all_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        given = mean, variance
        return (
            activation.mean(*given),
            activation.variance(*given),
            activation.coefficients(*given, 4),
        )

    assert_gradients(all_moments, (mean, variance), atol=1e-6)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_gradients_at_zero_variance_are_the_derivatives_of_the_function(name):
    activation = CASES[name].activation()
    mean = torch.tensor(OFF_KINK, dtype=torch.float64, requires_grad=True)
    variance = torch.zeros_like(mean, requires_grad=True)
    slope = derivative(name, mean.detach())
    bend = derivative(name, mean.detach(), times=2)

    def gradients(output: Tensor) -> tuple[Tensor, ...]:
        anchor = 0 * (mean.sum() + variance.sum())  # a constant has no graph of its own
        return torch.autograd.grad(output.sum() + anchor, (mean, variance))

    by_mean, by_variance = gradients(activation.mean(mean, variance))
    assert_close(by_mean, slope, atol=DIFFERENCES)
    assert_close(by_variance, bend / 2, atol=10 * DIFFERENCES)
    by_mean, by_variance = gradients(activation.variance(mean, variance))
    assert_close(by_mean, torch.zeros_like(slope), atol=1e-15)
    assert_close(by_variance, slope.square(), atol=DIFFERENCES, rtol=DIFFERENCES)
    by_mean, _ = gradients(activation.coefficients(mean, variance, 3)[0])
    assert_close(by_mean, bend, atol=10 * DIFFERENCES)


@pytest.mark.parametrize("name", SMOOTH)
def test_moments_are_continuous_at_zero_variance(name):
    activation = CASES[name].activation()
    mean = torch.tensor(OFF_KINK, dtype=torch.float64)
    tiny = torch.full_like(mean, 1e-14)
    scale = derivative(name, mean).square() * tiny
    assert_close(activation.mean(mean, tiny), activation.mean(mean, 0 * tiny), atol=1e-12)
    assert_close(activation.variance(mean, tiny), scale, rtol=1e-5, atol=1e-25)


@pytest.mark.parametrize("name", sorted(set(CASES) - set(CONTINUOUS)))
def test_gradients_of_functions_with_jumps_are_finite_at_zero_variance(name):
    activation = CASES[name].activation()
    mean = torch.tensor([*OFF_KINK, *CASES[name].jumps], dtype=torch.float64, requires_grad=True)
    variance = torch.zeros_like(mean, requires_grad=True)
    rows = activation.coefficients(mean, variance, 3)
    total = (activation.mean(mean, variance) + activation.variance(mean, variance)).sum()
    for gradient in torch.autograd.grad(total + rows.sum(), (mean, variance)):
        assert bool(torch.isfinite(gradient).all())


@every_case
def test_moments_of_a_batch_are_those_of_its_elements(name):
    activation = CASES[name].activation()
    mean, variance = columns(
        [(-1.3, 0.5), (0.2, 1.0), (0.9, 1.6), (0.0, 0.0), (2.0, 0.1), (0.4, 1)]
    )
    batch = mean.reshape(2, 3), variance.reshape(2, 3)
    rows = activation.coefficients(*batch, 3)
    assert_close(rows.reshape(3, 6), activation.coefficients(mean, variance, 3), atol=1e-13)
    for moment in (activation.mean, activation.variance):
        assert_close(moment(*batch).reshape(6), moment(mean, variance), atol=1e-14)


@pytest.mark.parametrize("name", ["relu", "hardshrink(0.5)", "gelu", "exp", "tanh", "elu(1.0)"])
def test_an_empty_batch_has_empty_moments(name):
    activation = CASES[name].activation()
    nothing = torch.zeros(2, 0, dtype=torch.float64)
    assert activation.mean(nothing, nothing).shape == (2, 0)
    assert activation.variance(nothing, nothing).shape == (2, 0)
    assert activation.coefficients(nothing, nothing, 3).shape == (3, 2, 0)
