"""Norms and lengths: exact within a group at any noise, linear between groups, by every method."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.carriers.variances import LARGEST_EXACT_GROUP
from covprop.covariance import Diagonal, Zero
from tests.gaussians import gaussian, weight
from tests.layers import propagate
from tests.oracles import assert_close
from tests.rules.test_delta import BY_DELTA, CASES, SMOOTH

ROUGH = pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
PRODUCTS = {"cosine_similarity of rows", "cosine_similarity of all pairs"}
WITHIN = [name for name in CASES if name not in {*BY_DELTA, *PRODUCTS}]


def sampled(function: Callable[[Any], Any], x: cp.Gaussian, count: int = 100_000) -> Tensor:
    points = x.sample(count, torch.Generator().manual_seed(0))
    outputs: Tensor = torch.func.vmap(function)(points)
    return outputs.reshape(count, -1)


def assert_sampled(y: cp.Gaussian, sample: Tensor) -> None:
    """Means and deviations within five standard errors of the samples' own."""
    mean, stddev, count = sample.mean(0), sample.std(0), len(sample)
    kurtosis = ((sample - mean) / stddev).pow(4).mean(0)
    error = stddev * ((kurtosis - 1) / (4 * count)).sqrt()
    assert bool(((y.mean.flatten() - mean).abs() <= 5 * stddev / count**0.5).all())
    assert bool(((y.stddev.flatten() - stddev).abs() <= 5 * error).all())


@ROUGH
@pytest.mark.parametrize("name", WITHIN)
def test_moments_are_exact_where_the_noise_is_as_large_as_the_mean(name: str) -> None:
    function, shape = CASES[name]
    x = gaussian(*shape)
    assert_sampled(propagate(function, x), sampled(function, x))


@ROUGH
@pytest.mark.parametrize("name", WITHIN)
def test_dependence_on_the_argument_is_the_expected_slope(name: str) -> None:
    """Stein: Cov(f(x), x) = E[J] Cov(x), which is exact."""
    function, shape = CASES[name]
    x = gaussian(*shape)

    def both(x: Any) -> Any:
        return torch.cat([x.flatten(), function(x).flatten()])

    size = x.mean.numel()
    y, sample = propagate(both, x), sampled(both, x)
    inputs, outputs = (t - t.mean(0) for t in (sample[:, :size], sample[:, size:]))
    products = inputs[:, :, None] * outputs[:, None, :]
    error = products.std(0) / len(sample) ** 0.5
    found = y.covariance_matrix[:size, size:]
    assert bool(((found - products.mean(0)).abs() <= 5 * error).all())


def stacked(x: Any, norm: Callable[[Any], Any], count: int = 5) -> Any:
    for _ in range(count):
        x = norm(x)
    return x


@pytest.mark.parametrize(("n", "noise", "bound"), [(8, 0.2, 0.04), (8, 0.4, 0.1), (64, 0.4, 0.02)])
@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
@ROUGH
def test_five_norms_in_a_row_are_nearly_one(norm: Any, n: int, noise: float, bound: float) -> None:
    """The delta method was off by 12 % at a noise of 0.2, by 60 to 90 % at 0.4."""
    x = cp.Gaussian.isotropic(F.layer_norm(weight(n, seed=n), (n,)), stddev=noise)
    one = propagate(lambda x: norm(x, (n,)), x)
    five = propagate(lambda x: stacked(x, lambda t: norm(t, (n,))), x)
    error = (five.stddev / one.stddev - 1).square().mean().sqrt()
    assert float(error) < bound
    shift = (five.mean - one.mean).abs() / one.stddev
    assert float(shift.max()) < bound
    for y in (one, five):  # the length is known, but for eps
        total = float(y.mean.square().sum() + y.variance.sum())
        assert total == pytest.approx(n, rel=1e-4)


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.3])
def test_a_norm_is_no_worse_than_the_products_that_it_is_made_of(noise: float) -> None:
    n = 24
    x = cp.Gaussian.isotropic(weight(n, seed=5), stddev=noise)

    def products(x: Any) -> Any:
        return x * torch.rsqrt((x * x).mean() + 1e-6)

    def norm(x: Any) -> Any:
        return F.rms_norm(x, (n,), eps=1e-6)

    truth = sampled(norm, x)
    errors = [
        float((propagate(f, x).stddev / truth.std(0) - 1).square().mean().sqrt())
        for f in (norm, products)
    ]
    assert errors[0] <= errors[1] + 5 / (2 * len(truth)) ** 0.5


@ROUGH
def test_a_post_norm_encoder_is_right_where_every_step_is_nearly_gaussian() -> None:
    """The delta method was off by 9 % at a noise of 0.2 and by half at 0.4."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    encoder.requires_grad_(requires_grad=False)
    x = cp.Gaussian.isotropic(weight(4, 32), stddev=0.4)
    y = propagate(lambda x: encoder(x[None])[0], x)
    with torch.no_grad():
        points = x.sample(4_000, torch.Generator().manual_seed(0))
        truth = encoder(points).flatten(1)
    error = (y.stddev.flatten() / truth.std(0) - 1).square().mean().sqrt()
    assert float(error) < 0.03  # of which sampling has 0.011


@ROUGH
@pytest.mark.parametrize("name", WITHIN)
def test_a_series_has_the_same_numbers(name: str) -> None:
    function, shape = CASES[name]
    x = gaussian(*shape)
    y, other = (propagate(function, x, method) for method in (cp.Exact(), cp.Series(order=4)))
    assert_close(other.mean, y.mean, rtol=0.0)
    assert_close(other.covariance_matrix, y.covariance_matrix, rtol=0.0)


@ROUGH
@pytest.mark.parametrize("n", [3, LARGEST_EXACT_GROUP, LARGEST_EXACT_GROUP + 1, 100])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "normalize", "std", "norm"])
def test_variances_alone_are_those_of_independent_elements(name: str, n: int) -> None:
    functions: dict[str, Callable[[Any], Any]] = {
        "layer_norm": lambda x: F.layer_norm(x, (n,), weight(n), weight(n, seed=2)),
        "rms_norm": lambda x: F.rms_norm(x, (n,)),
        "normalize": lambda x: F.normalize(x, dim=-1),
        "std": lambda x: x.std(-1),
        "norm": lambda x: x.norm(dim=-1),
    }
    mean = weight(2, n, seed=4)
    x = cp.Gaussian.diagonal(mean, variance=0.3 * weight(2, n, seed=6).square(), batch_dims=1)
    y = propagate(functions[name], x)
    alone = propagate(functions[name], x, cp.AssumedDensity())
    assert isinstance(alone.covariance, Diagonal)
    centred = name in ("layer_norm", "std") and n > LARGEST_EXACT_GROUP
    rtol = 0.015 if centred else 1e-9
    assert_close(alone.mean, y.mean, rtol=rtol, atol=rtol * float(y.mean.abs().max()) / 10)
    assert_close(alone.variance, y.variance, rtol=rtol)


@ROUGH
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "norm", "group_norm"])
def test_a_sketch_is_near(name: str) -> None:
    function, shape = CASES[name]
    x = gaussian(*shape)

    def network(x: Any) -> Any:
        return torch.cat([x.flatten(), function(x).flatten()]) * 2

    y = propagate(network, x)
    method = cp.Sketched(256, generator=torch.Generator().manual_seed(0))
    sketched = propagate(network, x, method)
    scale = y.stddev[:, None] * y.stddev[None, :]
    error = (sketched.covariance_matrix - y.covariance_matrix).abs() / scale
    assert float(error.max()) < 0.12
    assert float(((sketched.mean - y.mean) / y.stddev).abs().max()) < 0.05


@ROUGH
@pytest.mark.parametrize("name", WITHIN)
def test_single_precision_is_near_double(name: str) -> None:
    function, shape = CASES[name]
    if "affine" in name or name in ("rms_norm", "cosine_similarity", "cosine_similarity left"):
        pytest.skip("its weights are double")
    if name == "group_norm":
        pytest.skip("its weights are double")
    x = gaussian(*shape)
    y = propagate(function, x)
    single = propagate(function, cp.Gaussian(x.mean.float(), x.covariance_matrix.float()))
    assert single.mean.dtype == torch.float32
    assert_close(single.mean.double(), y.mean, atol=2e-6)
    scale = float(y.variance.max())
    assert_close(single.covariance_matrix.double(), y.covariance_matrix, atol=1e-5 * scale)


@pytest.mark.parametrize("noise", [1e-3, 1e-6, 1e-10])
def test_tiny_noise_is_the_jacobians(noise: float) -> None:
    """Relative to the noise, nothing is lost to rounding."""
    for name in WITHIN:
        function, shape = CASES[name]
        wide = gaussian(*shape)
        x = cp.Gaussian(wide.mean, wide.covariance_matrix * noise**2)
        y = propagate(function, x)
        slope = torch.autograd.functional.jacobian(function, x.mean).reshape(y.mean.numel(), -1)
        expected = slope @ wide.covariance_matrix @ slope.mT
        scale = float(expected.abs().max())
        assert_close(y.covariance_matrix / noise**2, expected, atol=scale * (1e-9 + 30 * noise**2))


def test_pure_noise_has_a_mean_of_zero_and_all_variance() -> None:
    n = 40
    x = cp.Gaussian.isotropic(torch.zeros(n, dtype=torch.float64), stddev=0.3)
    y = propagate(lambda x: F.layer_norm(x, (n,), eps=0.0), x)
    assert not bool(y.mean.any())
    centred = torch.eye(n, dtype=torch.float64) - 1 / n  # uniform on a sphere
    assert_close(y.covariance_matrix, centred * n / (n - 1), atol=1e-12)


def test_lengths_of_pure_noise_are_chi() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(3, dtype=torch.float64), stddev=0.5)
    with pytest.warns(cp.ApproximationWarning, match="not linear"):
        y = propagate(torch.norm, x)
    assert float(y.mean) == pytest.approx(0.5 * math.sqrt(8 / math.pi), rel=1e-12)
    assert float(y.variance) == pytest.approx(0.25 * (3 - 8 / math.pi), rel=1e-11)


def test_two_features_are_a_sign() -> None:
    """A layer norm of two elements gives 1 and -1, by which of them is larger."""
    x = cp.Gaussian.isotropic(torch.tensor([0.4, 0.1], dtype=torch.float64), stddev=0.5)
    with pytest.warns(cp.ApproximationWarning, match="not linear"):
        y = propagate(lambda x: F.layer_norm(x, (2,), eps=0.0), x)
    mean = math.erf(0.3 / (0.5 * math.sqrt(2)) / math.sqrt(2))
    assert_close(y.mean, torch.tensor([mean, -mean], dtype=torch.float64), rtol=1e-12)
    variance = 1 - mean**2
    expected = variance * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert_close(y.covariance_matrix, expected, atol=1e-12)


def test_a_constant_stays_one() -> None:
    constant = cp.Gaussian(weight(4), Zero.like(weight(4), 0))
    for name in ("layer_norm", "normalize", "norm"):
        y = propagate(SMOOTH[name], cp.Gaussian.isotropic(weight(2, 4), stddev=0.0))
        assert not bool(y.variance.any())
    y = propagate(lambda x: F.layer_norm(x, (4,)), constant)
    assert isinstance(y.covariance, Zero)
    assert_close(y.mean, F.layer_norm(weight(4), (4,)), atol=1e-14)


def test_a_group_in_which_nothing_varies_is_certain() -> None:
    """Beside one that does."""
    mean = weight(2, 4)
    variance = torch.tensor([[0.0] * 4, [0.3] * 4], dtype=torch.float64)
    y = propagate(lambda x: F.layer_norm(x, (4,)), cp.Gaussian.diagonal(mean, variance=variance))
    assert_close(y.mean[0], F.layer_norm(mean[0], (4,)), atol=1e-14)
    assert not bool(y.variance[0].any())
    assert bool((y.variance[1] > 0).all())


def test_vectors_that_torch_would_clamp_are_refused() -> None:
    x = cp.Gaussian.isotropic(torch.full((3,), 1e-12, dtype=torch.float64), stddev=1e-13)
    with pytest.raises(cp.UnsupportedOperation, match="smaller eps"):
        propagate(lambda x: F.normalize(x, dim=-1), x)
    zero = cp.Gaussian.isotropic(torch.zeros(3, dtype=torch.float64), stddev=0.0)
    assert not bool(propagate(lambda x: F.normalize(x, dim=-1), zero).mean.any())


def test_a_shape_that_is_not_the_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="over a shape of"):
        propagate(lambda x: F.layer_norm(x, (3,)), gaussian(4))
    with pytest.raises(ValueError, match="groups of one size"):
        propagate(lambda x: F.group_norm(x, 3), gaussian(1, 4, 2))


def test_norms_of_a_batch_that_was_moved() -> None:
    """(channels, batch) with the batch second: each element has its own norm."""
    x = gaussian(4, batch=(3,))
    scale, shift = weight(4), weight(4, seed=2)
    first = propagate(lambda x: F.layer_norm(x, (4,), scale, shift), x)
    moved = propagate(
        lambda x: F.layer_norm(x[:, None].transpose(0, 1), (4,), scale, shift).transpose(0, 1)[
            :, 0
        ],
        x,
    )
    assert_close(moved.mean, first.mean, atol=1e-13)
    assert_close(moved.covariance_matrix, first.covariance_matrix, atol=1e-13)


def test_an_empty_batch_has_an_empty_result() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(0, 4), stddev=1.0, batch_dims=1)
    y = propagate(nn.LayerNorm(4).requires_grad_(requires_grad=False), x)
    assert y.mean.shape == (0, 4)


@pytest.mark.parametrize("name", ["normalize", "norm", "std", "layer_norm"])
def test_gradients_are_finite_where_nothing_is_there(name: str) -> None:
    mean = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    factor = torch.zeros(8, 8, dtype=torch.float64, requires_grad=True)
    y = propagate(SMOOTH[name], cp.Gaussian(mean, factor @ factor.mT, validate_args=False))
    (y.mean.sum() + y.covariance_matrix.sum()).backward()
    for tensor in (mean, factor):
        assert tensor.grad is not None
        assert bool(tensor.grad.isfinite().all())


@torch.no_grad()
def test_groups_of_two_keep_their_digits_in_float32() -> None:
    """(a, -a) / sqrt(a^2 + eps) hardly varies: its slope is eps / (a^2 + eps)^(3/2)."""
    mean, eps = torch.tensor([1.0, 3.0]), 1e-5
    matrix = torch.tensor([[2.0, 0.3], [0.3, 1.0]]) * 1e-6
    y = propagate(lambda x: F.layer_norm(x, (2,), eps=eps), cp.Gaussian(mean, matrix))
    half = torch.tensor([0.5, -0.5]).double()
    variance = half @ matrix.double() @ half
    slope = eps / ((half @ mean.double()) ** 2 + eps) ** 1.5
    expected = slope**2 * variance * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double()
    assert_close(y.covariance_matrix.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("groups", "between"), [(1, False), (2, True)])
def test_covariances_between_groups_are_said_to_be_linear(groups: int, between: bool) -> None:
    """Two groups of the same elements have the covariance of one, which is not linear."""
    x = cp.Gaussian.isotropic(torch.zeros(3, dtype=torch.float64), stddev=1.0)
    with pytest.warns(cp.ApproximationWarning, match="not linear") as seen:
        y = propagate(lambda z: F.group_norm(torch.cat(groups * [z])[None], groups, eps=0.0)[0], x)
    assert ("only linear between" in str(seen[0].message)) is between
    within = y.covariance_matrix[:3, :3]
    assert_close(within.diagonal().sum(), torch.tensor(3.0, dtype=torch.float64), rtol=1e-10)
    if between:  # E[J] S E[J]^T, less than the truth, which is that within
        across = y.covariance_matrix[:3, 3:].diagonal()
        assert bool((across < 0.9 * within.diagonal()).all())
