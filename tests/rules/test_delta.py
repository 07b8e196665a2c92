"""Functions of several elements by the delta method: Jacobian, Hessian, sampling."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

import covprop as cp
from tests.gaussians import gaussian, weight
from tests.layers import propagate
from tests.oracles import assert_close

SCALE, SHIFT = weight(4), weight(4, seed=2)
SMOOTH: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of columns": lambda x: F.softmax(x, dim=-2),
    "softmax method": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "logsumexp keepdim": lambda x: x.logsumexp((-2, -1), keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "layer_norm affine": lambda x: F.layer_norm(x, (4,), SCALE, SHIFT, 1e-3),
    "layer_norm of two": lambda x: F.layer_norm(x, (2, 4)),
    "rms_norm": lambda x: F.rms_norm(x, (4,), SCALE, 1e-5),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize other": lambda x: F.normalize(x, p=3.0, dim=-1),
    "std": lambda x: torch.std(x, dim=-1, correction=0, keepdim=True),
    "norm": lambda x: torch.norm(x, dim=-1),
    "norm method": lambda x: x.norm(p=2, dim=(-2, -1)),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=-1),
    "linalg.norm of order": lambda x: torch.linalg.norm(x, 3, -1, keepdim=True),
    "linalg.norm of matrices": lambda x: torch.linalg.norm(x, "fro", (-2, -1)),
    "linalg.vector_norm": lambda x: torch.linalg.vector_norm(x, ord=4, dim=(-2, -1)),
    "linalg.matrix_norm": torch.linalg.matrix_norm,
    "cosine_similarity": lambda x: F.cosine_similarity(x, SCALE, dim=-1),
    "cosine_similarity left": lambda x: torch.cosine_similarity(SCALE, x, -1, 1e-6),
    "cosine_similarity of rows": lambda x: F.cosine_similarity(
        x[..., 0, :], x[..., 1, :] * SCALE, dim=-1
    ),
    "cosine_similarity of all pairs": lambda x: F.cosine_similarity(
        x[..., :, None, :], x[..., None, :, :].flip(-1), dim=-1
    ),
    "std_mean": lambda x: torch.std_mean(x, (-2, -1), correction=0, keepdim=True)[0],
}
"""Functions of (2, 4), with or without leading dimensions."""
WITH_BATCH: dict[str, Callable[[Any], Any]] = {
    "group_norm": lambda x: F.group_norm(x, 2, SCALE, SHIFT),
    "group_norm of one": lambda x: F.group_norm(x, 1),
}
"""Functions of (1, 4, 2)."""
CASES = {name: (f, (2, 4)) for name, f in SMOOTH.items()}
CASES |= {name: (f, (1, 4, 2)) for name, f in WITH_BATCH.items()}
BY_DELTA = [
    "softmax", "softmax of columns", "softmax method", "log_softmax", "logsumexp",
    "logsumexp keepdim", "normalize other", "linalg.norm of order", "linalg.vector_norm",
]  # fmt: skip
"""The others have rules of their own: test_normalised.py."""


@pytest.mark.parametrize("name", BY_DELTA)
def test_mean_and_covariance_are_those_of_the_delta_method(name: str) -> None:
    function, shape = CASES[name]
    x = gaussian(*shape)
    y = propagate(function, x)
    plain = function(x.mean)
    assert y.mean.shape == plain.shape
    slope = jacobian(function, x.mean).reshape(plain.numel(), -1)
    assert_close(y.covariance_matrix, slope @ x.covariance_matrix @ slope.mT, atol=1e-10)
    size = x.mean.numel()
    bends = [
        hessian(lambda m, k=k: function(m).reshape(-1)[k], x.mean).reshape(size, size)
        for k in range(plain.numel())
    ]
    bend = torch.stack([(b * x.covariance_matrix).sum() for b in bends])
    assert_close(y.mean, plain + bend.reshape(plain.shape) / 2, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_small_noise_agrees_with_sampling(name: str) -> None:
    function, shape = CASES[name]
    wide = gaussian(*shape)
    x = cp.Gaussian(wide.mean, wide.covariance_matrix * 1e-4)
    y = propagate(function, x)
    noise = x.sample(100_000, torch.Generator().manual_seed(0))
    sample = torch.func.vmap(function)(noise)
    stddev = sample.std(0)
    error = stddev / (2 * len(sample)) ** 0.5
    bend = (y.mean - function(x.mean)).abs().max() / stddev.min()
    assert float(bend) < 1  # the second order is a correction
    assert bool(((y.mean - sample.mean(0)).abs() <= 5 * stddev / len(sample) ** 0.5).all())
    # First order: what it leaves is of second order in the noise, here below 0.2 %.
    assert bool(((y.stddev - stddev).abs() <= 5 * error + 2e-3 * stddev).all())


@pytest.mark.parametrize("name", SMOOTH)
def test_a_batch_is_each_of_its_elements(name: str) -> None:
    x = gaussian(2, 4, batch=(3,))
    y = propagate(SMOOTH[name], x)
    for i in range(3):
        one = propagate(SMOOTH[name], x[i])
        assert_close(y.mean[i], one.mean, atol=1e-12)
        assert_close(y.covariance_matrix[i], one.covariance_matrix, atol=1e-12)


def test_group_norm_of_a_batch_is_each_of_its_elements() -> None:
    layer = nn.GroupNorm(2, 4).double().requires_grad_(requires_grad=False)
    x = gaussian(4, 2, batch=(3,))
    y = propagate(layer, x)
    for i in range(3):
        single = cp.Gaussian(x.mean[i][None], x.covariance_matrix[i])
        one = propagate(layer, single)
        assert_close(y.mean[i], one.mean[0], atol=1e-12)
        assert_close(y.covariance_matrix[i], one.covariance_matrix, atol=1e-12)


LAYERS: dict[str, nn.Module] = {
    "softmax": nn.Softmax(-1),
    "log_softmax": nn.LogSoftmax(-1),
    "layer_norm": nn.LayerNorm(4).double(),
    "rms_norm": nn.RMSNorm(4).double(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_their_functions(name: str) -> None:
    x = gaussian(2, 4)
    function = SMOOTH[name] if name != "rms_norm" else lambda x: F.rms_norm(x, (4,))
    y, expected = propagate(LAYERS[name], x), propagate(function, x)
    assert_close(y.mean.detach(), expected.mean, atol=1e-13)
    assert_close(y.covariance_matrix.detach(), expected.covariance_matrix, atol=1e-13)


def test_a_function_of_one_tensor_joins_with_it() -> None:
    """Softmax beside its argument: the joint covariance is that of one Jacobian."""
    x = gaussian(4)

    def both(x: Any) -> Any:
        return torch.cat([x, torch.softmax(x, -1)]) + torch.logsumexp(x, -1)

    y = propagate(both, x)
    slope = jacobian(both, x.mean)
    assert_close(y.covariance_matrix, slope @ x.covariance_matrix @ slope.mT, atol=1e-12)


MIXES: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: torch.softmax(x, 0),
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: torch.logsumexp(x, 0, keepdim=True).expand(3, 2, 4),
    "layer_norm": lambda x: F.layer_norm(x, (3, 2, 4)),
    "normalize": lambda x: F.normalize(x, dim=0),
    "var": lambda x: x.var(0),
    "std": lambda x: torch.std(x),
    "norm": lambda x: torch.norm(x, dim=(0, 1)),
}


@pytest.mark.parametrize("name", MIXES)
def test_a_function_across_the_batch_is_refused(name: str) -> None:
    with pytest.raises(cp.BatchDimensionError):
        propagate(MIXES[name], gaussian(2, 4, batch=(3,)))


@pytest.mark.parametrize("function", [torch.var_mean, torch.std_mean])
@pytest.mark.parametrize("options", [{}, {"dim": -1}, {"dim": 1, "keepdim": True}])
def test_a_mean_beside_a_spread_is_the_mean(function: Any, options: Any) -> None:
    x = gaussian(2, 4)
    spread, mean = propagate(lambda x: function(x, **options), x)
    alone = torch.var if function is torch.var_mean else torch.std
    expected = propagate(lambda x: alone(x, **options), x)
    assert_close(spread.mean, expected.mean, rtol=0.0)
    assert_close(spread.covariance_matrix, expected.covariance_matrix, rtol=0.0)
    slope = jacobian(lambda m: m.mean(**options or {"dim": (0, 1)}), x.mean)
    slope = slope.reshape(mean.mean.numel(), 8)
    assert_close(mean.mean.reshape(-1), slope @ x.mean.reshape(-1), atol=1e-14)
    assert_close(mean.covariance_matrix, slope @ x.covariance_matrix @ slope.mT, atol=1e-14)


ROUGH: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: torch.norm(x, 1, -1),
    "largest": lambda x: x.norm(p=float("inf")),
    "smallest": lambda x: torch.linalg.vector_norm(x, -float("inf")),
    "count": lambda x: torch.linalg.vector_norm(x, ord=0),
    "nuclear": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "spectral": lambda x: torch.linalg.matrix_norm(x, ord=2),
    "spectral by dimensions": lambda x: torch.linalg.norm(x, 2, (-2, -1)),
    "spectral of a matrix": lambda x: torch.linalg.norm(x, 2),
}


@pytest.mark.parametrize("name", ROUGH)
def test_norms_that_are_not_smooth_are_refused(name: str) -> None:
    with pytest.raises(cp.UnsupportedOperation, match="not smooth"):
        propagate(ROUGH[name], gaussian(2, 4))


@pytest.mark.parametrize("function", [torch.norm, torch.linalg.norm, torch.linalg.vector_norm])
def test_a_root_is_refused_where_it_is_zero(function: Callable[[Any, int], Any]) -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(cp.UnsupportedOperation, match="zero at the mean"):
        propagate(lambda x: function(x, 3), cp.Gaussian.isotropic(zero, stddev=0.1))
    propagate(lambda x: function(x, 3), cp.Gaussian.isotropic(zero, stddev=0.0))


def test_certain_input_gives_the_function_itself() -> None:
    mean = weight(2, 4)
    for function in SMOOTH.values():
        y = propagate(function, cp.Gaussian.isotropic(mean, stddev=0.0))
        assert_close(y.mean, function(mean), atol=1e-14)
        assert not y.covariance_matrix.any()


def test_probabilities_still_sum_to_one() -> None:
    y = propagate(lambda x: torch.softmax(x, -1).sum(-1), gaussian(5, batch=(2,)))
    assert_close(y.mean, torch.ones(2, dtype=torch.float64), atol=1e-14)
    assert_close(y.variance, torch.zeros(2, dtype=torch.float64), atol=1e-15)


def test_gradients_flow_through_layer_norm() -> None:
    x = gaussian(3)
    factor = torch.linalg.cholesky(x.covariance_matrix)

    def moments_of(mean: Tensor, factor: Tensor, scale: Tensor) -> Any:
        given = cp.Gaussian(mean, factor @ factor.mT, validate_args=False)
        y = propagate(lambda x: x + F.layer_norm(x, (3,), scale), given)
        return y.mean, y.covariance_matrix

    inputs = [t.clone().requires_grad_() for t in (x.mean, factor, weight(3))]
    assert torch.autograd.gradcheck(moments_of, inputs, fast_mode=True)


def test_a_variance_is_a_quadratic_form_and_exact() -> None:
    x = cp.Gaussian.isotropic(torch.ones(4, dtype=torch.float64), stddev=0.1)
    y = propagate(lambda x: x.var(), x)
    assert float(y.mean) == pytest.approx(0.01, rel=1e-12)
    assert float(y.variance) == pytest.approx(2 * 0.01**2 / 3, rel=1e-12)  # of chi-squared with 3


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.layer_norm(x, x.shape),
        lambda x: F.cosine_similarity(x, torch.ones(3).double(), dim=-1),
        lambda x: torch.softmax(20 * x, -1),
        lambda x: torch.logsumexp(20 * x, -1),
    ],
)
def test_what_bends_within_a_standard_deviation_warns(function: Callable[[Any], Any]) -> None:
    smooth = cp.Gaussian.isotropic(torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64), stddev=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        propagate(function, smooth)
    rough = cp.Gaussian.isotropic(torch.full((3,), 1e-3, dtype=torch.float64), stddev=0.1)
    with pytest.warns(cp.ApproximationWarning, match="compare with sampling"):
        propagate(function, rough)
    propagate(function, cp.Gaussian.isotropic(torch.tensor([1.0, 2.0, -1.0]).double(), stddev=0.05))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.std(),
        lambda x: x.norm(),
        lambda x: torch.linalg.vector_norm(x, 3),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.cosine_similarity(x, torch.ones(3).double(), dim=-1),
    ],
)
def test_means_of_roots_have_gradients(function: Callable[[Any], Any]) -> None:
    mean = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    covariance = 0.01 * torch.eye(3, dtype=torch.float64)

    def propagated(mean: Tensor) -> Tensor:
        y = propagate(function, cp.Gaussian(mean, covariance))
        return torch.cat([y.mean.flatten(), y.covariance_matrix.flatten()])

    assert torch.autograd.gradcheck(propagated, (mean,), atol=1e-6)


@pytest.mark.parametrize(
    ("function", "pieces"),
    [
        (lambda x: torch.var(x, -1), lambda x: x.var(-1)),
        (lambda x: x.var((-2, -1), unbiased=False), lambda x: x.var((-2, -1), correction=0)),
        (lambda x: torch.var(x, dim=-1, correction=2, keepdim=True), None),
        (lambda x: torch.var_mean(x, -1)[0], None),
        (lambda x: torch.var(x, False), None),
    ],
)
def test_a_variance_has_the_moments_of_its_quadratic_form(
    function: Callable[[Any], Any], pieces: Callable[[Any], Any] | None
) -> None:
    x = gaussian(2, 4)
    y = propagate(function, x)
    rows = jacobian(lambda v: jacobian(function, v, create_graph=True), x.mean)
    forms = rows.reshape(-1, 8, 8) / 2
    mean, matrix = x.mean.flatten(), x.covariance_matrix
    expected = 2 * torch.einsum("ijk,kl,mln,nj->im", forms, matrix, forms, matrix)
    expected = expected + 4 * torch.einsum("j,ijk,kl,mln,n->im", mean, forms, matrix, forms, mean)
    assert_close(y.covariance_matrix, expected, atol=1e-11)
    shift = torch.einsum("ijk,jk->i", forms, matrix).reshape(y.mean.shape)
    assert_close(y.mean, function(x.mean) + shift, atol=1e-12)
    if pieces is not None:
        assert_close(function(x.mean), pieces(x.mean), rtol=1e-12)


@torch.no_grad()
def test_a_probability_near_one_keeps_its_digits_in_float32() -> None:
    """d p / d x = p (diag - p^T), of which p (1 - p) would cancel."""
    mean = torch.tensor([0.0, 17.0, 0.5])
    matrix = torch.tensor([[0.3, 0.1, 0.0], [0.1, 0.2, 0.05], [0.0, 0.05, 0.4]]) * 1e-4
    y = propagate(lambda x: torch.softmax(x, -1), cp.Gaussian(mean, matrix))
    p = torch.softmax(mean.double(), -1)
    jacobian = torch.diag(p) - torch.outer(p, p)
    rest = p[0] + p[2]
    jacobian[1] = torch.stack([-p[1] * p[0], p[1] * rest, -p[1] * p[2]])  # without 1 - p
    expected = jacobian @ matrix.double() @ jacobian.mT
    assert float(p[1]) > 1 - torch.finfo(torch.float32).eps
    assert_close(y.covariance_matrix.double(), expected, rtol=1e-5, atol=0)


def test_angles_agree_with_samples_and_stay_away_from_the_cut() -> None:
    wide = gaussian(4)
    x = cp.Gaussian(wide.mean.abs() + 1, wide.covariance_matrix / 400)

    def angles(x: Any) -> Any:
        both = torch.atan2(x[..., :2], x[..., 2:])
        constant = torch.tensor(2.0, dtype=torch.float64)
        return torch.cat([both, torch.atan2(x, constant), torch.arctan2(constant, x)], -1)

    y = propagate(angles, x)
    sample = angles(x.sample(100_000, torch.Generator().manual_seed(0)))
    # Second order in the noise, a twentieth of the distance from zero or less.
    assert bool(((y.mean - sample.mean(0)).abs() <= 2e-2 * sample.std(0)).all())
    assert bool(((y.stddev / sample.std(0) - 1).abs() <= 2e-2).all())
    for point in ([0.1, 0.1], [0.1, -3.0]):
        near = cp.Gaussian.isotropic(torch.tensor(point).double(), stddev=0.1)
        with pytest.raises(cp.UnsupportedOperation, match="negative axis"):
            propagate(lambda x: torch.atan2(x[:1], x[1:]), near)
    spread = torch.diag(torch.tensor([0.0, 0.1]).double())
    still = cp.Gaussian(torch.tensor([0.0, -3.0]).double(), spread)
    assert_close(propagate(lambda x: torch.atan2(x[:1], x[1:]), still).mean,
                 torch.tensor([torch.pi], dtype=torch.float64), rtol=1e-15)  # fmt: skip
