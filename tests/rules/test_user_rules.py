"""How a user adds an operation or an element-wise function."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import extending
from covprop.covariance import Diagonal
from covprop.flow.table import TABLE
from tests.layers import propagate
from tests.oracles import assert_close, moments, pair_covariance
from tests.registry import ELEMENTWISE_WITHOUT_RULE, WITHOUT_RULE, registry_kept
from tests.rules.test_elementwise import gaussian


@pytest.fixture(autouse=True)
def _the_registry_is_as_before() -> Iterator[None]:
    with registry_kept():
        yield


def assert_moments(
    y: cp.Gaussian, x: cp.Gaussian, function: Callable[[Tensor], Tensor], **options: Any
) -> None:
    """Mean, variance and one covariance of an element-wise function, by quadrature."""
    means, stddevs = x.mean.tolist(), x.stddev.tolist()
    expected = [moments(function, m, s, **options)[:2] for m, s in zip(means, stddevs, strict=True)]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert_close(y.mean, expected[:, 0], atol=1e-8)
    assert_close(y.variance, expected[:, 1], rtol=1e-7)
    rho = float(x.correlation_matrix[0, 1])
    covariance = pair_covariance(function, means[:2], stddevs[:2], rho, **options)
    scale = float(y.stddev[0] * y.stddev[1])
    assert abs(float(y.covariance_matrix[0, 1]) - covariance) <= 1e-7 * scale


def test_a_rule_is_what_the_function_does() -> None:
    @cp.rule(torch.nansum, torch.Tensor.nansum)
    def finite_sum(
        function: Any, x: extending.GaussianTensor, dim: int
    ) -> extending.GaussianTensor:
        linear = extending.LinearMap(lambda t: function(t, dim), x.event_shape)
        return x.through(function(x.loc, dim), linear)

    x = gaussian()
    for call in (lambda x: torch.nansum(x, -1), lambda x: x.nansum(dim=-1)):
        y = propagate(call, x)
        assert_close(y.mean, x.mean.sum(), atol=1e-14)
        assert_close(y.variance, x.covariance_matrix.sum(), atol=1e-14)


def test_a_rule_is_used_inside_a_model() -> None:
    @cp.rule(WITHOUT_RULE)
    def certain(function: Any, x: extending.GaussianTensor, dim: int) -> extending.GaussianTensor:
        return x.replace(function(x.loc, dim), Diagonal(torch.zeros_like(x.covariance.diagonal())))

    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return WITHOUT_RULE(x, -1)

    x = gaussian(2)
    y = propagate(Model(), x)
    assert_close(y.mean, WITHOUT_RULE(x.mean, -1), rtol=0.0)
    assert not y.covariance_matrix.any()


def nothing(function: Any, x: extending.GaussianTensor) -> extending.GaussianTensor:
    del function
    return x


@pytest.mark.parametrize("function", [torch.relu, torch.Tensor.relu_, torch.flatten])
def test_a_second_rule_for_a_function_raises(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="has a rule already"):
        cp.rule(function)(nothing)


def test_a_rule_that_raises_registers_nothing() -> None:
    with pytest.raises(ValueError, match="has a rule already"):
        cp.rule(WITHOUT_RULE, torch.relu)(nothing)
    with pytest.raises(cp.UnsupportedOperation, match=WITHOUT_RULE.__name__):
        propagate(lambda x: WITHOUT_RULE(x, -1), gaussian())


def test_a_rule_and_an_activation_need_a_function() -> None:
    with pytest.raises(ValueError, match="at least one torch function"):
        cp.rule()
    with pytest.raises(ValueError, match="at least one torch function"):
        cp.register_activation()


def test_a_registered_activation_is_integrated() -> None:
    function, name = ELEMENTWISE_WITHOUT_RULE, ELEMENTWISE_WITHOUT_RULE.__name__
    with pytest.raises(cp.UnsupportedOperation, match=rf"no rule for torch\.{name}"):
        propagate(function, gaussian())
    cp.register_activation(function, getattr(Tensor, name))
    x = gaussian()
    assert_moments(propagate(function, x), x, function)
    assert_moments(propagate(lambda x: getattr(x, name)(), x), x, function)


def test_a_registered_activation_takes_options_and_kinks() -> None:
    def bent(y: Any, slope: float = 1.0, *, offset: float = 0.0) -> Any:
        if torch.overrides.has_torch_function_unary(y):
            return torch.overrides.handle_torch_function(bent, (y,), y, slope, offset=offset)
        return (slope * y).relu().square() + offset

    cp.register_activation(bent, kinks=(0.0,))
    x = gaussian()
    y = propagate(lambda x: bent(x, 2.0, offset=1.0), x)
    assert_moments(y, x, lambda y: bent(y, 2.0, offset=1.0), kinks=[0.0])


def test_a_registered_activation_may_bring_its_own_moments() -> None:
    cp.register_activation(ELEMENTWISE_WITHOUT_RULE, activation=lambda: cp.activations.smooth.erf())
    x = gaussian()
    assert_moments(propagate(ELEMENTWISE_WITHOUT_RULE, x), x, torch.erf)


def test_an_activation_is_registered_once() -> None:
    cp.register_activation(ELEMENTWISE_WITHOUT_RULE)
    with pytest.raises(ValueError, match=f"{ELEMENTWISE_WITHOUT_RULE.__name__} has a rule already"):
        cp.register_activation(ELEMENTWISE_WITHOUT_RULE)
    with pytest.raises(ValueError, match="relu has a rule already"):
        cp.register_activation(torch.relu)


def swish(y: Any, rate: float = 1.0) -> Any:
    return y * torch.sigmoid(rate * y)


def test_an_activation_is_made_from_plain_torch_code() -> None:
    x = gaussian()
    wrapped = cp.activation(swish)
    assert wrapped.__name__ == "swish"
    assert_close(wrapped(x.mean), swish(x.mean), rtol=0.0)
    assert_moments(propagate(wrapped, x), x, swish)
    y = propagate(lambda x: wrapped(x, rate=3.0), x)
    assert_moments(y, x, lambda y: swish(y, 3.0))


def test_an_activation_is_a_decorator_with_or_without_kinks() -> None:
    @cp.activation
    def smooth(y: Any) -> Any:
        return torch.exp(-y.square())

    @cp.activation(kinks=(0.5,))
    def bent(y: Any, slope: float) -> Any:
        return torch.where(y > 0.5, slope * (y - 0.5), 0.0) + y.sin()

    x = gaussian()
    assert_moments(propagate(smooth, x), x, smooth)
    y = propagate(lambda x: bent(x, 2.0), x)
    assert_moments(y, x, lambda y: bent(y, 2.0), kinks=[0.5])


def test_an_activation_works_in_a_model_with_every_method() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Any) -> Any:
            return cp.activation(swish)(self.layer(x))

    model = Model().double().requires_grad_(requires_grad=False)
    x = gaussian(2)
    exact, series = (propagate(model, x, m) for m in (cp.Exact(), cp.Series(order=30)))
    assert_close(series.covariance_matrix, exact.covariance_matrix)
    middle = propagate(model.layer, x)
    for one, given in zip(exact, middle, strict=True):
        assert_moments(one, given, swish)


def test_a_jump_is_refused() -> None:
    @cp.activation
    def step(y: Any) -> Any:
        return torch.where(y > 0.1, 1.0, 0.0) + y

    with pytest.raises(cp.QuadratureError, match="step"):
        propagate(step, gaussian())


def test_a_rule_may_be_made_of_other_operations_wherever_the_batch_is() -> None:
    """With public names alone; the tensors may be pending, and their batch anywhere."""

    def hypot(function: Any, x: Any, y: Any) -> Any:
        del function
        return (x.square() + y.square()).sqrt()

    mean = torch.tensor([[3.0, 4.0], [1.0, 2.0], [-2.0, 5.0]], dtype=torch.float64)
    x = cp.Gaussian.isotropic(mean, stddev=0.01, batch_dims=1)
    with registry_kept():
        cp.rule(torch.hypot, batch=cp.Batch.STEPWISE)(hypot)
        y = propagate(lambda t: torch.hypot(2 * t.t()[0], t.t()[1] + 1), x)
    first, second = 2 * mean[:, 0], mean[:, 1] + 1
    length = torch.hypot(first, second)
    variance = 1e-4 * (4 * first.square() + second.square()) / length.square()
    assert_close(y.mean, length, rtol=1e-3)
    assert_close(y.variance, variance, rtol=1e-3)


def test_a_rule_has_in_place_forms() -> None:
    @cp.rule(torch.hypot, Tensor.hypot, in_place=[Tensor.hypot_], batch=cp.Batch.STEPWISE)
    def hypot(function: Any, input: Any, other: Any) -> Any:
        assert function in (torch.hypot, Tensor.hypot)
        return (input.square() + other.square()).sqrt()

    def in_place(x: Any) -> Any:
        y = x.tanh() + 20
        changed = y.hypot_(x)
        assert changed is y
        return 2 * y

    x = gaussian()
    y = propagate(in_place, x)
    assert_close(y.mean, propagate(lambda x: 2 * torch.hypot(x.tanh() + 20, x), x).mean, rtol=0.0)
    with pytest.raises(ValueError, match="hypot_ has a rule already"):
        cp.rule(WITHOUT_RULE, in_place=[Tensor.hypot_])(nothing)
    with pytest.raises(cp.UnsupportedOperation, match=WITHOUT_RULE.__name__):
        propagate(lambda x: WITHOUT_RULE(x, -1), x)


def test_in_place_forms_of_several_functions_keep_their_names() -> None:
    names = ("square", "exp")
    for function in (*extending.spellings(*names), *extending.in_place_spellings(*names)):
        TABLE.pop(function, None)

    @cp.rule(*extending.spellings(*names), in_place=extending.in_place_spellings(*names))
    def mean_alone(function: Any, x: extending.GaussianTensor) -> extending.GaussianTensor:
        return x.moved(function(x.loc))

    x = gaussian()
    for name in names:
        expected = getattr(torch, name)(x.mean)
        for call in (getattr(torch, f"{name}_"), lambda y, name=name: getattr(y, f"{name}_")()):
            y = propagate(lambda x, call=call: call(1 * x), x)
            assert_close(y.mean, expected, rtol=0.0)


def test_a_registered_activation_has_in_place_forms() -> None:
    name = ELEMENTWISE_WITHOUT_RULE.__name__
    cp.register_activation(ELEMENTWISE_WITHOUT_RULE, in_place=extending.in_place_spellings(name))
    x = gaussian()
    y = propagate(lambda x: getattr(1 * x, f"{name}_")(), x)
    assert_moments(y, x, ELEMENTWISE_WITHOUT_RULE)


@pytest.mark.parametrize(
    "method", [cp.GaussianLayers(), cp.Cumulants(), cp.Series(), cp.AssumedDensity(), cp.Sketched()]
)
def test_a_rule_in_terms_of_the_algebra_works_with_every_carrier(method: Any) -> None:
    """Each element times a gain of its own: Cov + s^2 diag(Cov + mean mean^T)."""

    def random_gain(x: Any, spread: float) -> Any:
        return torch.overrides.handle_torch_function(random_gain, (x,), x, spread)

    @cp.rule(random_gain, kind=extending.Kind.NOISE)
    def body(function: Any, x: extending.GaussianTensor, spread: float) -> Any:
        del function
        carrier: extending.Carrier = x.carrier.dropout(x.loc, x.flat, spread**2, None)
        return extending.GaussianTensor(x.loc, carrier)

    x = gaussian()
    y = propagate(lambda x: random_gain(x, 0.3), x, method)
    assert_close(y.mean, x.mean)
    expected = x.variance + 0.09 * (x.variance + x.mean.square())
    assert_close(y.variance, expected, rtol=0.1 if isinstance(method, cp.Sketched) else 1e-12)


def test_ready_bodies_are_rules_of_linear_moving_and_smooth_functions() -> None:
    def linear(x: Any, offset: float = 0.0) -> Any:
        return x.cumsum(-1) + offset

    def moved(x: Any) -> Any:
        return x.flip(-1)

    def smooth(x: Any) -> Any:
        return x.logsumexp(-1)

    def call(function: Any) -> Any:
        return lambda x, *args: torch.overrides.handle_torch_function(function, (x,), x, *args)

    @cp.rule(linear)
    def linear_rule(function: Any, *args: Any) -> Any:
        return extending.affine(function, *args, strip=lambda args, kwargs: (args[:1], kwargs))

    cp.rule(moved)(extending.movement)
    cp.rule(smooth)(extending.delta)
    x = gaussian()
    for own, known in (
        (lambda x: call(linear)(x, 3.0), lambda x: x.cumsum(-1) + 3.0),
        (call(moved), lambda x: x.flip(-1)),
        (call(smooth), lambda x: x.logsumexp(-1)),
    ):
        y, expected = (propagate(each, x) for each in (own, known))
        assert_close(y.mean, expected.mean, atol=1e-14)
        assert_close(y.covariance_matrix, expected.covariance_matrix, atol=1e-14)


def test_a_power_of_a_number_is_an_exponential() -> None:
    """E[a^x] and Cov[a^x, a^y] of a log-normal distribution."""
    x, rate = gaussian(), math.log(2.5)
    y = propagate(lambda t: 2.5**t, x)
    mean = torch.exp(rate * x.mean + rate**2 * x.variance / 2)
    assert_close(y.mean, mean)
    flat = mean.reshape(-1)
    expected = torch.outer(flat, flat) * torch.expm1(rate**2 * x.covariance_matrix)
    assert_close(y.covariance_matrix, expected, rtol=1e-10)
    with pytest.raises(cp.UnsupportedOperation, match="not positive"):
        propagate(lambda t: (-1.0) ** t, x)
