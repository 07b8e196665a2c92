"""Element-wise operations: every spelling is the same function, and in place means in place."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covprop as cp
from covprop.activations import DECLARATIONS
from tests.layers import propagate
from tests.oracles import assert_close, moments
from tests.registry import rule_of
from tests.rules.elementwise_spellings import FUNCTIONS, OPERATORS, Function, plain, spellings


def gaussian(*batch: int, event: tuple[int, ...] = (3,)) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(3)
    n = torch.Size(event).numel()
    factor = torch.randn((*batch, n, n), dtype=torch.float64, generator=generator) / n**0.5
    mean = torch.randn((*batch, *event), dtype=torch.float64, generator=generator)
    return cp.Gaussian(mean, factor @ factor.mT + 0.1 * torch.eye(n, dtype=torch.float64))


def assert_same(actual: cp.Gaussian, expected: cp.Gaussian) -> None:
    assert_close(actual.mean, expected.mean, rtol=0.0)
    assert_close(actual.covariance_matrix, expected.covariance_matrix, rtol=0.0)


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda row: f"{row.names} {row.options}")
def test_a_function_has_its_moments_in_every_spelling_and_in_place_means_in_place(
    row: Function,
) -> None:
    """The moments of the first spelling, and no other number in any of them."""
    x, function = gaussian(), plain(row)
    mean, covariance = x.mean.clone(), x.covariance_matrix.clone()
    y = propagate(function, x)
    expected = [
        moments(function, float(mean), float(stddev), kinks=row.kinks)[:2]
        for mean, stddev in zip(x.mean, x.stddev, strict=True)
    ]
    means, variances = torch.tensor(expected, dtype=torch.float64).unbind(-1)
    assert_close(y.mean, means, atol=1e-8)
    assert_close(y.variance, variances, rtol=1e-7)  # the oracle's own cancellation
    certain = propagate(function, cp.Gaussian.isotropic(x.mean, stddev=0.0))
    assert_close(certain.mean, function(x.mean).double())
    for label, call in spellings(row):
        changes = "inplace" in label or label.split(",")[0].endswith("_")

        def both(x: Any, call: Any = call, label: str = label, changes: bool = changes) -> Any:
            result = call(x)
            assert (result is x) == changes, label
            return result, x

        result, argument = propagate(both, x)
        for found, wanted in ((result, y), (argument, y if changes else x)):
            assert torch.equal(found.mean, wanted.mean), label
            assert torch.equal(found.covariance_matrix, wanted.covariance_matrix), label
        assert torch.equal(call(mean.clone()), function(mean)), label
        assert torch.equal(x.mean, mean), label
        assert torch.equal(x.covariance_matrix, covariance), label


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda row: f"{row.names} {row.options}")
def test_every_name_of_a_function_has_the_same_rule(row: Function) -> None:
    homes = (torch, F, torch.Tensor, torch.special)
    for end in ("", "_"):
        names = [name + end for name in row.names.split()]
        found = {rule_of(getattr(home, n)) for home in homes for n in names if hasattr(home, n)}
        assert len(found - {None}) <= 1
        assert end or None not in found


@pytest.mark.parametrize("name", OPERATORS)
def test_python_operators_are_the_function(name: str) -> None:
    row = next(row for row in FUNCTIONS if row.names.split()[0] == name)
    x = gaussian()
    assert_same(propagate(OPERATORS[name], x), propagate(plain(row), x))


def test_every_declared_activation_is_spelled_here() -> None:
    here = {name for row in FUNCTIONS for name in row.names.split()}
    assert sorted({row.name for row in DECLARATIONS} - here) == []


@pytest.mark.parametrize("batch", [(), (2,), (2, 2)])
def test_an_event_of_any_shape_is_a_vector_to_an_activation(batch: tuple[int, ...]) -> None:
    x = gaussian(*batch, event=(2, 3))
    y = propagate(torch.tanh, x)
    flat = cp.Gaussian(x.mean.flatten(-2), x.covariance_matrix)
    expected = propagate(torch.tanh, flat)
    assert_close(y.mean, expected.mean.unflatten(-1, (2, 3)), rtol=0.0)
    assert_close(y.covariance_matrix, expected.covariance_matrix, rtol=0.0)


def test_a_scalar_event_has_an_activation_too() -> None:
    x = cp.Gaussian.isotropic(
        torch.tensor([0.5, -1.0], dtype=torch.float64), stddev=0.7, batch_dims=1
    )
    y = propagate(torch.relu, x)
    assert y.event_shape == ()
    expected = [moments(torch.relu, float(mean), 0.7, kinks=[0.0])[1] for mean in x.mean]
    assert_close(y.variance, torch.tensor(expected, dtype=torch.float64), rtol=1e-10)


def test_layers_that_work_in_place_chain() -> None:
    def model(inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        activations = nn.ReLU(inplace), nn.LeakyReLU(0.1, inplace), nn.ELU(inplace=inplace)
        layers = [layer for act in activations for layer in (act, nn.Linear(3, 3))]
        return nn.Sequential(*layers, nn.Dropout(inplace=inplace)).double().eval()

    x = gaussian(2)
    assert_same(propagate(model(True), x), propagate(model(False), x))


def _changed_after(alias: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        x = x + 0.5
        other = alias(x)
        x.relu_()
        return other * 1

    return function


THE_SAME: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "dropout": lambda x: F.dropout(x, training=False),
    "identity": nn.Identity(),
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(x.shape),
    "flatten": lambda x: x.flatten(1),
    "slice": lambda x: x[..., :2],
    "transpose": lambda x: x.mT,
    "expand": lambda x: x.expand(2, 2, 3),
    "chunk": lambda x: x.chunk(3, -1)[1],
    "view of a view": lambda x: x.mT[:, :1],
}
SOMETIMES_VIEWS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float64),
    "double": lambda x: x.double(),
    "cpu": lambda x: x.cpu(),
    "detach": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", THE_SAME)
def test_what_is_the_same_tensor_follows_a_change_in_place(name: str) -> None:
    x = gaussian(2, event=(2, 3))
    expected = propagate(lambda x: torch.relu(x + 0.5), x)
    assert_same(propagate(_changed_after(THE_SAME[name]), x), expected)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_what_changed_in_place_is_refused(name: str) -> None:
    with pytest.raises(cp.UnsupportedOperation, match="changed in place through another view"):
        propagate(_changed_after(VIEWS[name]), gaussian(2, event=(2, 3)))


@pytest.mark.parametrize("name", SOMETIMES_VIEWS)
def test_what_shares_memory_follows_a_change_in_place_or_is_refused(name: str) -> None:
    x = cp.Gaussian.isotropic(gaussian(2, event=(2, 3)).mean, stddev=0.0, batch_dims=1)
    function = _changed_after(SOMETIMES_VIEWS[name])
    with suppress(cp.UnsupportedOperation):
        assert_close(propagate(function, x).mean, function(x.mean))


def test_what_was_changed_through_a_view_is_refused() -> None:
    def function(x: Any) -> Any:
        x[..., :1].relu_()
        return x

    with pytest.raises(cp.UnsupportedOperation, match="changed in place through another view"):
        propagate(function, gaussian())


@pytest.mark.parametrize("copy", [lambda x: x.clone(), lambda x: x * 1.0, lambda x: x + 0])
def test_a_copy_does_not_follow_a_change_in_place(copy: Callable[[Any], Any]) -> None:
    x = gaussian(2, event=(2, 3))
    assert_same(propagate(_changed_after(copy), x), propagate(lambda x: x + 0.5, x))


def test_a_plain_tensor_of_the_caller_is_not_changed_into_a_gaussian() -> None:
    constant = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(cp.UnsupportedOperation, match="plain tensor"):
        propagate(lambda x: constant.add_(x), gaussian())
    with pytest.raises(cp.UnsupportedOperation, match="out"):
        propagate(lambda x: torch.tanh(x, out=torch.zeros(3)), gaussian())


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rrelu while training": (lambda x: F.rrelu(x, training=True), "training mode"),
    "fractional power": (lambda x: x**0.5, "whole exponent"),
    "a power for each": (lambda x: x ** torch.arange(len(x)), "whole exponent"),
    "complex power": (lambda x: (x**2j).abs(), "whole exponent"),
    "negative power": (lambda x: x**-1, "no finite moments"),
    "Gaussian exponent": (lambda x: (-2) ** x, "not positive"),
    "power of two Gaussians": (lambda x: x**x, "first argument alone"),
    "jump in softplus": (lambda x: F.softplus(x, threshold=2), "threshold"),
    "heaviside of many values": (lambda x: x.heaviside(torch.ones(3)), "one number"),
    "comparison": (lambda x: x == 0, "is random"),
    "truth": (lambda x: x if x.sum() > 0 else -x, "is random"),
    "number": (lambda x: float(x.sum()), "is random"),
    "division by a Gaussian": (lambda x: 1 / x, "division by a Gaussian .* standard deviations"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_moments_or_no_rule_is_refused(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(cp.UnsupportedOperation, match=reason):
        propagate(function, gaussian())
