"""J S J^T at the mean: Jacobians by rows, by columns and in pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.methods import Network, linearized
from tests.layers import propagate
from tests.oracles import assert_close
from tests.test_propagate import gaussian

D = torch.float64


def network(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).to(D)


def expected(model: Any, x: cp.Gaussian) -> Tensor:
    j = torch.autograd.functional.jacobian(model, x.mean)
    return j @ x.covariance_matrix @ j.mT


@pytest.mark.parametrize("outputs", [1, 3, 9])
@torch.no_grad()
def test_it_is_the_jacobian_of_autograd_on_both_sides(outputs: int) -> None:
    model, x = network(4, outputs), gaussian()
    y = propagate(model, x, cp.Linearized())
    with torch.enable_grad():
        want = expected(model, x)
    assert_close(y.mean, model(x.mean), atol=1e-15)
    assert_close(y.covariance_matrix, want, atol=1e-14)


@pytest.mark.parametrize("way", [linearized._by_rows, linearized._by_columns])
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_rows_columns_and_pieces_of_them_are_the_same(
    way: Any, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(4, 3)
    whole = linearized.linearize(Network(model, [gaussian(*batch)]))
    monkeypatch.setattr("covprop.methods.network.HELD", 12)
    values, ((found,),) = way(pieces := Network(model, [gaussian(*batch)]))
    assert pieces.step < 3
    assert found.shape == (*batch, 3, 4)
    assert_close(values[0], whole[0][0], atol=1e-15)
    assert_close(found, whole[1][0][0], atol=1e-15)


def test_two_inputs_of_different_shapes_and_two_outputs() -> None:
    a = cp.Gaussian(gaussian().mean.reshape(2, 2), gaussian().covariance_matrix)
    b = cp.Gaussian.isotropic(torch.tensor([0.5, -1.0], dtype=D), stddev=0.3)

    def model(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(a) @ b, (a * b).exp()

    found = propagate(model, a, b, cp.Linearized())
    for i, y in enumerate(found):
        jacobians = torch.autograd.functional.jacobian(lambda *ab: model(*ab)[i], (a.mean, b.mean))  # noqa: B023
        want = sum(
            j.reshape(y.mean.numel(), -1) @ x.covariance_matrix @ j.reshape(y.mean.numel(), -1).mT
            for j, x in zip(jacobians, (a, b), strict=True)
        )
        assert_close(y.covariance_matrix, want, atol=1e-14)


def test_columns_and_rows_are_chosen_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("_by_rows", "_by_columns"):
        real = getattr(linearized, name)
        monkeypatch.setattr(
            linearized, name, lambda net, real=real, name=name: (used.append(name), real(net))[1]
        )
    with torch.no_grad():
        for outputs in (2, 9):
            propagate(network(4, outputs), gaussian(), cp.Linearized())
    assert used == ["_by_rows", "_by_columns"]
    propagate(network(4, 9), gaussian(), cp.Linearized())  # autograd follows the weights
    assert used[2:] == ["_by_rows"]


def _unseen(x: Any) -> Any:
    with torch.no_grad():
        return torch.tanh(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outputs", [1, 6])
@pytest.mark.parametrize("beside", [0.0, 0.5])
def test_no_grad_inside_a_model_is_seen_through(
    outputs: int, beside: float, dtype: torch.dtype
) -> None:
    """Reverse mode, for few outputs, would be zero, or lack a part."""
    x = gaussian(2).to(dtype)
    weight = torch.randn(4, outputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = propagate(lambda x: (_unseen(x) + beside * x) @ weight, x, cp.Linearized())
    slopes = 1 - torch.tanh(x.mean).square() + beside
    jacobian = weight.mT * slopes[:, None, :]
    assert_close(found.covariance_matrix, jacobian @ x.covariance_matrix @ jacobian.mT)


INTEGERS = {
    "rounding": lambda x: torch.round(3 * x),
    "integers": lambda x: (3 * x).long().to(x.dtype),
    "sign": torch.sign,
    "comparison": lambda x: (x > 0.1).to(x.dtype),
}


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("model", INTEGERS.values(), ids=INTEGERS)
def test_what_varies_without_a_slope_is_refused(model: Any, batch: tuple[int, ...]) -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"zero at the mean.*cp\.Unscented"):
        propagate(model, gaussian(*batch), cp.Linearized())
    far = propagate(lambda x: torch.relu(x - 1e3), gaussian(*batch), cp.Linearized())
    assert float(far.covariance_matrix.abs().max()) == 0.0


CUT = {
    "detached": lambda x: 2 * x.detach(),
    "in part": lambda x: torch.tanh(x.detach()) + x,
    "one of many": lambda x: torch.cat([x, x[..., :1].detach()], -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", CUT.values(), ids=CUT)
def test_derivatives_that_are_cut_off_are_refused(model: Any, dtype: torch.dtype) -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"cuts them off"):
        propagate(model, gaussian(2).to(dtype), cp.Linearized())


def test_kinks_at_the_mean_are_not_taken_for_cuts() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(3, dtype=torch.float64), stddev=1.0)
    y = propagate(lambda x: torch.relu(x) + 2 * x, x, cp.Linearized())
    assert_close(y.stddev, torch.full((3,), 2.0, dtype=torch.float64))


def test_what_torch_cannot_differentiate_is_refused() -> None:
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            del ctx
            return x.clone()

    with pytest.raises(cp.UnsupportedOperation, match="torch cannot differentiate this model"):
        propagate(Opaque.apply, gaussian(), cp.Linearized())


def test_an_element_that_steps_beside_smooth_ones_is_told() -> None:
    x = cp.Gaussian.isotropic(torch.tensor([0.2, -0.4, 0.9]), stddev=0.3)
    with pytest.warns(cp.ApproximationWarning, match="1 of 3 output elements as constant"):
        propagate(lambda t: torch.cat([(10 * t[:1]).round(), t[1:]]), x, cp.Linearized())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_constant_but_for_rounding_is_not_refused(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = cp.Gaussian.isotropic(torch.randn(6, dtype=dtype), stddev=1.0)
    for constant in (
        lambda t: t.softmax(-1).sum(-1, keepdim=True),
        lambda t: t / 3 + t / 3 + t / 3 - t,
    ):
        y = propagate(constant, x, cp.Linearized())
        # Derivatives of a few terms of size one, each rounded.
        assert float(y.stddev.max()) <= 16 * torch.finfo(dtype).eps


def test_gradients_through_a_norm_are_right() -> None:
    """torch's derivative of the forward mode of layer_norm is wrong: rows are taken by reverse."""
    x = gaussian()

    def total(mean: Tensor) -> Tensor:
        y = propagate(
            lambda t: nn.functional.layer_norm(t, (4,)),
            cp.Gaussian(mean, x.covariance_matrix),
            cp.Linearized(),
        )
        return (y.covariance_matrix * x.covariance_matrix).sum()

    mean = x.mean.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(mean), mean)
    line, step = torch.cos(torch.arange(4, dtype=D)), 1e-4
    with torch.no_grad():
        slope = (total(mean + step * line) - total(mean - step * line)) / (2 * step)
    assert_close(gradient @ line, slope, rtol=1e-5, atol=1e-7)
