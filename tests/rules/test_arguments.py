"""Arguments by name, infinite bounds and paddings, and what is said of what is not finite."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.errors import name_of
from covprop.flow.table import TABLE
from tests.gaussians import gaussian
from tests.layers import propagate

INF = math.inf
B, C = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def assert_same(found: cp.Gaussian, expected: cp.Gaussian) -> None:
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-13, atol=1e-13)
    matrices = found.covariance_matrix, expected.covariance_matrix
    torch.testing.assert_close(*matrices, rtol=1e-12, atol=1e-13)


BY_NAME: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "addmm": (lambda x: torch.addmm(B, mat1=x, mat2=C), lambda x: B + x @ C),
    "addmm, all": (lambda x: torch.addmm(input=B, mat1=C, mat2=x, beta=2, alpha=3),
                   lambda x: 2 * B + 3 * (C @ x)),
    "addmm, second": (lambda x: torch.addmm(B, x, mat2=C), lambda x: B + x @ C),
    "addmm, method": (lambda x: x.addmm(mat1=B, mat2=C), lambda x: x + B @ C),
    "addmv": (lambda x: torch.addmv(input=x[0], mat=B, vec=x[1]), lambda x: x[0] + B @ x[1]),
    "baddbmm": (lambda x: torch.baddbmm(B[None], batch1=x[None], batch2=C[None]),
                lambda x: (B + x @ C)[None]),
    "addcmul": (lambda x: torch.addcmul(input=B, tensor1=x, tensor2=C, value=2.0),
                lambda x: B + 2 * x * C),
    "lerp": (lambda x: torch.lerp(input=x, end=B, weight=0.3), lambda x: 0.7 * x + 0.3 * B),
    "where": (lambda x: torch.where(B > 0, input=x, other=C), lambda x: torch.where(B > 0, x, C)),
    "add": (lambda x: torch.add(input=x, other=B, alpha=2), lambda x: x + 2 * B),
    "mul": (lambda x: torch.mul(input=x, other=B), lambda x: x * B),
    "matmul": (lambda x: torch.matmul(input=x, other=B), lambda x: x @ B),
    "linear": (lambda x: F.linear(input=x, weight=B, bias=C[0]), lambda x: x @ B.mT + C[0]),
    "clamp": (lambda x: torch.clamp(input=x, min=-1.0, max=2.0), lambda x: x.clamp(-1, 2)),
    "pow": (lambda x: torch.pow(input=x, exponent=2), lambda x: x.square()),
    "softplus": (lambda x: F.softplus(input=x, beta=2.0, threshold=20.0),
                 lambda x: F.softplus(x, 2.0)),
    "transpose": (lambda x: torch.transpose(input=x, dim0=0, dim1=1), lambda x: x.mT),
    "maximum": (lambda x: torch.maximum(input=x, other=B), lambda x: torch.maximum(x, B)),
    "cat": (lambda x: torch.cat(tensors=[x, B], dim=1), lambda x: torch.cat([x, B], 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_may_be_named(name: str) -> None:
    x = gaussian(4, 4)
    by_name, by_place = (propagate(function, x) for function in BY_NAME[name])
    assert_same(by_name, by_place)


OTHER_NAMES = {
    "torch.where", "torch.Tensor.where", "torch.Tensor.__rdiv__", "torch.Tensor.__rpow__",
    "torch.index_reduce", "torch.Tensor.index_reduce", "torch.layer_norm", "torch.topk",
    "torch.Tensor.topk", "torch.Tensor.__setitem__",
}  # fmt: skip
"""Of these torch's table for tests has names that torch itself does not take."""
STATES = {"torch.lstm", "torch.gru", "torch.rnn_tanh", "torch.rnn_relu"}
"""These have signatures for packed sequences too, told apart by place."""


def test_every_rule_takes_the_names_of_torch() -> None:
    refused = []
    for function, stand_in in torch.overrides.get_testing_overrides().items():
        body = TABLE[function].body if function in TABLE else None
        if body is None or (name := name_of(function)) in OTHER_NAMES | STATES:
            continue
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [p.name for p in inspect.signature(stand_in).parameters.values() if p.kind in kinds]
        called = getattr(function, "__name__", "?")
        method = called == "__get__" or getattr(Tensor, called, None) is function
        given = dict.fromkeys(n for n in names[1 if method else 0 :] if n != "out")
        try:
            inspect.signature(body).bind(function, *(None,) * method, **given)
        except TypeError as error:
            refused.append(f"{name}: {error}")
    assert not refused


IDENTITIES: dict[str, Callable[[Any], Any]] = {
    "clamp": lambda x: x.clamp(-INF, INF),
    "clamp below": lambda x: x.clamp(min=-INF),
    "clamp above": lambda x: x.clamp(min=None, max=INF),
    "clamp_min": lambda x: torch.clamp_min(x, -INF),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(-INF), torch.tensor(INF)),
    "hardtanh": lambda x: F.hardtanh(x, -INF, INF),
    "threshold": lambda x: F.threshold(x, -INF, 7.0),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_infinite_bounds_bound_nothing(name: str) -> None:
    x = gaussian(3)
    assert_same(propagate(IDENTITIES[name], x), x)


def test_what_is_not_bounded_is_a_tensor_of_its_own() -> None:
    """And the same function as without: layers whose limits are yet to be learnt cost nothing."""

    def changed(x: Any) -> Any:
        F.tanh(x).clamp(-INF, INF).add_(1.0)
        return x.clamp(-INF, INF).clamp_(torch.tensor(-INF), torch.tensor(INF))

    x = gaussian(3)
    assert_same(propagate(changed, x), x)

    def inside(x: Any) -> Any:
        y = x.clamp(-INF, INF)
        y += 1
        return x

    assert_same(propagate(inside, x), x)


def test_one_infinite_bound_leaves_the_other() -> None:
    x = gaussian(3)
    one_sided = propagate(lambda x: x.clamp(min=0.3), x)
    for function in (lambda x: x.clamp(0.3, INF), lambda x: F.hardtanh(x, 0.3, INF)):
        assert_same(propagate(function, x), one_sided)
    below = propagate(lambda x: F.hardtanh(x, -INF, 0.3), x)
    assert_same(below, propagate(lambda x: x.clamp(max=0.3), x))


@pytest.mark.parametrize("bounds", [(INF, INF), (-INF, -INF), (math.nan, 1.0)])
def test_bounds_that_leave_nothing_finite_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"clamp between .* has no finite moments"):
        propagate(lambda x: x.clamp(*bounds), gaussian(3))


METHODS = [cp.Exact(), cp.Series(order=8), cp.AssumedDensity()]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_padding_with_minus_infinity_before_a_maximum_is_the_padding_of_max_pooling(
    method: Any, dtype: torch.dtype
) -> None:
    x = gaussian(1, 5, 4).to(dtype)
    padded = propagate(lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-INF), 3, 2), x, method)
    pooled = propagate(lambda x: F.max_pool2d(x, 3, 2, padding=1), x, method)
    torch.testing.assert_close(padded.mean, pooled.mean)
    torch.testing.assert_close(padded.covariance_matrix, pooled.covariance_matrix)


@pytest.mark.parametrize("method", [*METHODS, cp.Sketched(16)], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_maximum_with_minus_infinity_is_the_other(method: Any, batch: tuple[int, ...]) -> None:
    one = gaussian(3)
    x = cp.Gaussian(one.mean.expand(*batch, 3), one.covariance_matrix.expand(*batch, 3, 3))
    lowest = torch.full((3,), -INF, dtype=torch.float64)
    functions: list[Callable[[Any], Any]] = [
        lambda x: torch.maximum(x, lowest),
        lambda x: torch.maximum(lowest, x),
        lambda x: torch.minimum(x, -lowest),
        lambda x: torch.stack([x, lowest.expand(x.shape)], -1).amax(-1),
    ]
    expected = x.covariance_matrix if method.carries_pairs else torch.diag_embed(x.variance)
    for function in functions:
        y = propagate(function, x, method)
        torch.testing.assert_close(y.mean, x.mean, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(y.covariance_matrix, expected, rtol=1e-12, atol=1e-13)


def test_a_maximum_of_nothing_but_minus_infinity_is_not_a_number_of_ours() -> None:
    with pytest.raises(cp.MomentOverflow, match="not finite"):
        propagate(lambda x: F.max_pool1d(F.pad(x[None], (3, 0), value=-INF), 3), gaussian(3))


def test_small_units_beside_large_ones_keep_their_digits_in_padded_pooling() -> None:
    """The padding is low enough for each element by itself."""
    mean, stddev = torch.tensor([[1e-3, 1e4, 1e-3]]), torch.tensor([[1e-4, 1e3, 1e-4]])
    x = cp.Gaussian.diagonal(mean, variance=stddev.square())
    y = propagate(lambda x: F.max_pool1d(x, 2, 3, padding=1), x)
    assert abs(float(y.mean[0, 0]) - 1e-3) < 1e-3 * float(stddev[0, 0])
    assert float(y.stddev[0, 0]) == pytest.approx(1e-4, rel=1e-4)


def test_an_infinite_mean_is_refused_where_it_is_not_a_maximum() -> None:
    def model(x: Any) -> Any:
        return F.linear(F.pad(x, (1, 0), value=-INF), B)

    with pytest.raises(cp.MomentOverflow, match=r"not finite .* weights and constants"):
        propagate(model, gaussian(3))
    with pytest.raises(cp.MomentOverflow, match=r"input of torch.* has a mean .* infinite"):
        propagate(lambda x: torch.relu(F.pad(x, (1, 0), value=-INF)), gaussian(3))


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.GELU(), nn.Identity()])
@pytest.mark.parametrize("value", [math.nan, INF])
def test_broken_weights_are_named_and_not_the_activation_behind_them(
    activation: nn.Module, value: float
) -> None:
    layers = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), activation
    model = nn.Sequential(*layers).double().requires_grad_(False)
    model[2].weight[0, 1] = value
    with pytest.raises(cp.MomentOverflow, match=r"^2\.weight has NaN or infinite entries") as found:
        propagate(model, gaussian(3))
    assert "Piecewise" not in str(found.value)
    assert "bound it first" not in str(found.value)


@pytest.mark.parametrize(
    "method",
    [
        cp.Split(3), cp.Split(3, base=cp.Linearized()), cp.Split(3, base=cp.ControlVariate(128)),
        cp.ControlVariate(128), cp.ControlVariate(128, base=cp.Linearized()), cp.Sketched(16),
        cp.ControlVariate(128, base=cp.Sketched(16)), cp.Linearized(), cp.AssumedDensity(),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "last", [nn.Softmax(-1), nn.LayerNorm(3), nn.Tanh(), nn.Identity()], ids=repr
)
@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
def test_broken_weights_are_named_by_every_method(
    method: Any, dtype: torch.dtype, last: nn.Module
) -> None:
    for value in (math.nan, INF):
        model = nn.Sequential(nn.Linear(3, 3), last).requires_grad_(False).to(dtype)
        model[0].weight[0, 0] = value
        x = cp.Gaussian.isotropic(torch.ones(1, 3, dtype=dtype), stddev=1.0, batch_dims=1)
        with pytest.raises(cp.MomentOverflow) as found:
            propagate(model, x, method=method)
        assert str(found.value).startswith("0.weight has NaN or infinite entries")
        assert str(found.value).count("0.weight has NaN or infinite entries") == 1


def test_samples_that_are_not_finite_are_refused_as_elsewhere() -> None:
    with pytest.raises(cp.MomentOverflow, match=r"not finite .* weights and constants"):
        propagate(
            lambda x: F.pad(x, (1, 1), value=-INF), gaussian(3), method=cp.ControlVariate(128)
        )


def test_a_function_that_quadrature_cannot_do_has_its_name() -> None:
    with pytest.raises(cp.QuadratureError, match=r"moments of torch\.nn\.functional\.softplus "):
        propagate(lambda x: cp.activation(F.softplus)(x, 1000.0), gaussian(3))


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda x: F.celu(x, 0.0), ValueError, "celu needs an alpha other than 0"),
        (lambda x: F.softplus(x, 0.0), ValueError, "softplus needs a beta other than 0"),
        (lambda x: F.softshrink(x, -1.0), ValueError, "softshrink needs lambd >= 0, not -1"),
        (lambda x: F.leaky_relu(x, math.nan), cp.UnsupportedOperation,
         "torch.nn.functional.leaky_relu with negative_slope = nan has no finite moments"),
        (lambda x: F.leaky_relu(x, INF), cp.UnsupportedOperation, "negative_slope = inf has no"),
        (lambda x: F.elu(x, math.nan), cp.UnsupportedOperation,
         "torch.nn.functional.elu with alpha = nan has no finite moments"),
        (lambda x: F.celu(x, math.nan), cp.UnsupportedOperation,
         "torch.nn.functional.celu with alpha = nan has no finite moments"),
        (lambda x: F.threshold(x, math.nan, 0.0), cp.UnsupportedOperation,
         "torch.nn.functional.threshold with threshold = nan has no finite moments"),
        (lambda x: F.threshold(x, 0.0, INF), cp.UnsupportedOperation,
         "torch.nn.functional.threshold with value = inf has no finite moments"),
        (lambda x: F.softplus(x, INF), cp.UnsupportedOperation, "beta = inf has no finite"),
    ],
)  # fmt: skip
def test_an_option_that_no_number_suits_is_blamed_and_nothing_else(
    function: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(error, match=re.escape(text)):
            propagate(function, gaussian(3).to(dtype))


def test_an_overflow_of_torchs_hidden_functions_has_their_public_name() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
    with pytest.raises(cp.MomentOverflow, match=r"of torch\.nn\.functional\.threshold overflow"):
        propagate(lambda x: F.threshold(x, 0.0, 1e30), x)


def test_a_threshold_below_all_sizes_leaves_everything() -> None:
    x = gaussian(3)
    y = propagate(lambda x: F.hardshrink(x, -1.0), x)
    assert torch.equal(y.mean, x.mean)
    assert torch.equal(y.covariance_matrix, x.covariance_matrix)


def test_an_overflow_names_the_function() -> None:
    x = cp.Gaussian.isotropic(torch.full((2,), 1e30), stddev=1e15)
    with pytest.raises(
        cp.MomentOverflow, match=r"moments of torch.*square overflow torch\.float32"
    ):
        propagate(torch.square, x)


def test_a_result_whose_variance_rounds_to_zero_is_a_valid_input() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        factor = torch.randn(6, 5, dtype=torch.float64, generator=generator)
        still = torch.linalg.svd(factor)[0][:, 5:]  # the direction in which nothing varies
        x = cp.Gaussian(torch.zeros(6, dtype=torch.float64), 1e4 * factor @ factor.mT)
        for model in (lambda x: x @ still, lambda x: torch.cat([x @ still, 2 * x @ still, x[:1]])):  # noqa: B023
            y = propagate(model, x)
            assert bool((y.variance >= 0).all())
            assert cp.Gaussian(y.mean, y.covariance_matrix).event_shape == y.event_shape
            propagate(torch.tanh, y)


def test_rounding_excuses_no_covariance_between_constants() -> None:
    matrix = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    with pytest.raises(cp.InvalidGaussian, match="semi-definite"):
        cp.Gaussian(torch.zeros(2, dtype=torch.float64), matrix)
