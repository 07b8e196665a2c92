"""Squares, powers, products and sums of products: one family, exact wherever they meet.

The oracle is a quadratic form for each output, from autograd's second derivatives of the plain
function: of f(x) = x'Ax + b'x + c, Cov(f, g) = (2Am + b)' S (2Bm + d) + 2 tr(A S B S).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from covprop.flow.algebra import Contraction
from covprop.flow.lineage import Lineage
from tests.gaussians import gaussian, weight
from tests.layers import propagate
from tests.oracles import assert_close

ROUNDING = 2e-12
"""A few thousand additions of numbers of the order of 1 to 10, in float64."""
A, B, C = (weight(4, 4, seed=seed) / 2 for seed in range(3))


def quadratic_moments(
    function: Callable[[Tensor], Tensor], x: cp.Gaussian
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a polynomial of degree two of a Gaussian vector."""

    def flat(point: Tensor) -> Tensor:
        return function(point.reshape(x.mean.shape)).reshape(-1)

    point, matrix = x.mean.reshape(-1), x.covariance_matrix
    slope, bend = torch.func.jacrev(flat)(point), torch.func.jacrev(torch.func.jacrev(flat))(point)
    halves = bend @ matrix
    covariance = slope @ matrix @ slope.mT + torch.einsum("ijk,lkj->il", halves, halves) / 2
    return flat(point) + halves.diagonal(dim1=-2, dim2=-1).sum(-1) / 2, covariance


def assert_quadratic(function: Callable[[Any], Any], x: cp.Gaussian, method: Any = None) -> None:
    y = propagate(function, x, method=cp.Exact() if method is None else method)
    mean, covariance = quadratic_moments(function, x)
    scale = max(1.0, float(covariance.abs().max()))
    assert_close(y.mean.reshape(-1), mean, atol=ROUNDING * scale)
    assert_close(y.covariance_matrix, covariance, atol=ROUNDING * scale)


def mapped(x: Any, matrix: Tensor) -> Any:
    return F.linear(x, matrix.to(x.dtype))


def later(x: Any) -> Any:
    """Linear functions of squares and products, the older after the newer."""
    square, product = x.square(), x * mapped(x, A)
    third = mapped(product, B)
    return torch.cat([third + square[0], mapped(square, C), product.sum()[None]])


def matrices(x: Any) -> Any:
    """Matrix products beside element-wise ones of the same matrix."""
    m = x.reshape(2, 2)
    return torch.stack([m @ m, m * m, m**2, m.mT @ m, (m[:, None] * m.mT[None]).sum(-1)])


FAMILY: dict[str, Callable[[Any], Any]] = {
    "square less product": lambda x: x.square() - x * x,
    "product less square": lambda x: x * x - torch.square(x),
    "power and product": lambda x: x**2 + x * x,
    "power and square": lambda x: x.pow(2) - x.square() + x,
    "square and another product": lambda x: x[0].square() + x[0] * x[1],
    "square of a sum": lambda x: (x + x.flip(0)).square() - x * x - 2 * x * x.flip(0),
    "shifted": lambda x: (x - 3).square() - x * (x - 6),
    "scaled": lambda x: (3 * x).square() - 9 * x * x,
    "side by side": lambda x: torch.cat([x.square(), x * x, x * x.flip(0), x, x**2]),
    "dot and products": lambda x: (x @ x) - (x * x).sum(),
    "dot and squares": lambda x: (x @ x) - x.square().sum(),
    "dots": lambda x: torch.stack([x @ x, x[:2] @ x[2:], x @ mapped(x, A)]),
    "outer": lambda x: torch.einsum("i,j->ij", x, x) - x[:, None] * x[None, :],
    "outer and its diagonal": lambda x: torch.einsum("i,j->ij", x, x).diagonal() - x.square(),
    "matrices": matrices,
    "traces": lambda x: torch.einsum("ij,ji->", x.reshape(2, 2), x.reshape(2, 2)) - x.square(),
    "batched": lambda x: torch.bmm(x.reshape(2, 2, 1), x.reshape(2, 1, 2))[0].flatten() + x**2,
    "variance": lambda x: x.var() * 3 - (x - x.mean()) @ (x - x.mean()),
    "variance of rows": lambda x: x.reshape(2, 2).var(1) - (x[::2] - x[1::2]).square() / 2,
    "broadcast": lambda x: (x[:, None] * x[None, :2]).sum(0) - x.sum() * x[:2] + x[:2].square(),
    "two maps": lambda x: mapped(x, A) * mapped(x, B) + mapped(x, C).square(),
    "linear maps after": later,
    "chunks": lambda x: torch.mul(*x.chunk(2)) - (x[:2] + x[2:]).square() / 4,
    "addcmul": lambda x: torch.addcmul(x, x, x.flip(0)) - x.square(),
    "lerp": lambda x: torch.lerp(x, x.flip(0), x) - x * x.flip(0) + x.square(),
}


@pytest.mark.parametrize("name", FAMILY)
def test_squares_powers_products_and_sums_of_products_know_each_other(name: str) -> None:
    assert_quadratic(FAMILY[name], gaussian(4))


@pytest.mark.parametrize("method", [cp.Series(2), cp.Series(), cp.Series(tolerance=1e-9)], ids=str)
@pytest.mark.parametrize("name", ["square less product", "side by side", "matrices", "dots"])
def test_a_series_of_two_terms_has_all_of_them(name: str, method: cp.Series) -> None:
    assert_quadratic(FAMILY[name], gaussian(4), method)


def test_a_series_of_one_term_ends_with_the_first_order() -> None:
    """2 Var(x^2) - 2 * 4 m^2 v, with exact variances, and positive semi-definite."""
    x = gaussian(3)
    both = propagate(lambda x: torch.cat([x.square(), x * x]), x, method=cp.Series(1))
    apart = torch.cat([torch.eye(3), -torch.eye(3)], 1).double()
    difference = apart @ both.covariance_matrix @ apart.mT
    assert_close(difference.diagonal(), 4 * x.variance.square(), atol=ROUNDING)
    assert float(torch.linalg.eigvalsh(both.covariance_matrix)[0]) > -1e-12


DEGENERATE: dict[str, cp.Gaussian] = {
    "zero means": cp.Gaussian(torch.zeros(4).double(), gaussian(4).covariance_matrix),
    "independent": cp.Gaussian.diagonal(weight(4), variance=weight(4, seed=2).square()),
    "correlations of one": cp.Gaussian(weight(4), weight(4, 1) @ weight(4, 1).mT),
    "nothing varies": cp.Gaussian.isotropic(weight(4), stddev=0.0),
    "one is certain": cp.Gaussian.diagonal(
        weight(4), variance=torch.tensor([1.0, 0.0, 2.0, 0.5]).double()
    ),
    "hardly anything varies": cp.Gaussian.isotropic(weight(4), stddev=1e-12),
    "low rank": cp.Gaussian.low_rank(weight(4), weight(4, 2, seed=5)),
}


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("name", ["square less product", "side by side", "matrices", "dots"])
def test_it_holds_where_variances_or_means_are_zero(name: str, case: str) -> None:
    assert_quadratic(FAMILY[name], DEGENERATE[case])


@pytest.mark.parametrize("name", FAMILY)
def test_what_is_identically_zero_has_no_variance_that_could_be_negative(name: str) -> None:
    y = propagate(FAMILY[name], gaussian(4))
    bent = quadratic_moments(FAMILY[name], gaussian(4))[1].diagonal() < ROUNDING
    assert bool((y.variance[bent.reshape(y.variance.shape)] == 0).all())
    assert bool((y.variance >= 0).all())
    again = propagate(lambda x: 2 * FAMILY[name](x) - FAMILY[name](x), gaussian(4))
    assert_close(again.variance, y.variance, atol=ROUNDING * max(1.0, float(y.variance.max())))


def test_a_batch_is_each_of_its_elements() -> None:
    x = gaussian(4, batch=(2, 3))

    def forward(x: Any) -> Any:
        m = x.unflatten(-1, (2, 2))
        return torch.cat([x.square() - x * x.flip(-1), (m @ m.mT).flatten(-2), x**2], -1)

    y = propagate(forward, x)
    for i in range(2):
        for j in range(3):
            mean, covariance = quadratic_moments(forward, x[i, j])
            assert_close(y.mean[i, j], mean, atol=ROUNDING)
            assert_close(y.covariance_matrix[i, j], covariance, atol=10 * ROUNDING)


@pytest.mark.parametrize("name", FAMILY)
def test_single_precision_is_near_double(name: str) -> None:
    x = gaussian(4)
    single = cp.Gaussian(x.mean.float(), x.covariance_matrix.float())

    y = propagate(FAMILY[name], single)
    _, covariance = quadratic_moments(FAMILY[name], x)
    atol = 2e-5 * max(1.0, float(covariance.abs().max()))
    assert_close(y.covariance_matrix.double(), covariance, atol=atol)


def polynomial(seed: int) -> Callable[[Any], Any]:
    """Twelve operations on earlier results, few of which are kept, of degree two at most."""

    def run(x: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        pool = [(x, 1)]
        for step in range(12):
            first, second, kind = torch.randint(0, 1000, (3,), generator=generator).tolist()
            (u, p), (v, q) = pool[first % len(pool)], pool[second % len(pool)]
            linear: tuple[Callable[[], Any], ...] = (
                lambda u=u, v=v: u - 0.5 * v,
                lambda u=u, s=step: F.linear(u, weight(4, 4, seed=s) / 2),
                lambda u=u, v=v: torch.cat([u[:2], v.flip(0)[2:]]),
            )
            products: tuple[Callable[[], Any], ...] = (
                lambda u=u, v=v: u * v / 2,
                lambda u=u: u.square() / 2,
                lambda u=u, v=v: (u.reshape(2, 2) @ v.reshape(2, 2)).flatten() / 2,
                lambda u=u: u**2 / 2,
                lambda u=u, v=v: torch.einsum(
                    "ij,kj->ik", u.reshape(2, 2), v.reshape(2, 2)
                ).ravel(),
            )
            chosen = (linear + products)[kind % 8] if p == q == 1 else linear[kind % 3]
            pool.append((chosen(), 2 if p == q == 1 and kind % 8 > 2 else max(p, q)))
            del u, v, chosen, linear, products
            if len(pool) > 4:  # forget one, so that covariances are dropped
                pool.pop(1 + first % (len(pool) - 1) if step < 8 else 0)
        return torch.cat([value for value, _ in pool])

    return run


@pytest.mark.parametrize("seed", range(25))
def test_random_polynomials_are_exact_whatever_is_forgotten(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_quadratic(polynomial(seed), gaussian(4))
    y = propagate(polynomial(seed), gaussian(4))
    monkeypatch.setattr(Lineage, "collect", lambda _: None)
    everything = propagate(polynomial(seed), gaussian(4))
    assert_close(y.covariance_matrix, everything.covariance_matrix, rtol=0.0)


def test_gradients_flow_through_squares_beside_products() -> None:
    factor = torch.linalg.cholesky(gaussian(4).covariance_matrix) / 2

    def moments(mean: Tensor, factor: Tensor) -> Any:
        def forward(x: Any) -> Any:
            m = x.reshape(2, 2)
            return torch.cat([x.square() + x * x.flip(0), (m @ m).flatten(), torch.tanh(x)])

        y = propagate(forward, cp.Gaussian(mean, factor @ factor.mT, validate_args=False))
        return y.mean, y.covariance_matrix

    inputs = (weight(4).requires_grad_(), factor.requires_grad_())
    assert torch.autograd.gradcheck(moments, inputs, fast_mode=True)


def test_gradients_are_right_where_nothing_varies() -> None:
    """d Var(x^2 + x y) / d Var(x) = (2 m_x + m_y)^2 at zero variances."""
    variance = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    mean = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
    x = cp.Gaussian.diagonal(mean, variance=variance)
    y = propagate(lambda x: x[0].square() + x[0] * x[1], x)
    slopes = torch.autograd.grad(y.variance.sum(), (variance, mean))
    assert_close(slopes[0], torch.tensor([(1 - 2.0) ** 2, 0.25]).double(), atol=1e-15)
    assert not slopes[1].any()


def test_an_einsum_that_uses_the_batch_twice_is_refused() -> None:
    x = gaussian(3, 3, batch=(3,))
    torch.einsum("bib,bi->bi", x.mean, x.mean[:, 0])  # torch has no objection
    with pytest.raises(cp.BatchDimensionError):
        propagate(lambda x: torch.einsum("bib,bi->bi", x, x[:, 0]), x)


def test_a_contraction_is_what_einsum_makes_of_it() -> None:
    batch, shapes = torch.Size((2,)), (torch.Size((3, 4)), torch.Size((4, 5)))
    f = Contraction(batch, (0, 1), (1, 2), (2, 0), shapes)
    u, v = weight(2, 3, 4), weight(2, 4, 5)
    assert_close(f(u, v), torch.einsum("bij,bjk->bki", u, v), rtol=0.0)
    cross = weight(2, 12, 20)
    expected = torch.einsum("bijjk->bki", cross.reshape(2, 3, 4, 4, 5))
    assert_close(f.expectation(cross), expected, atol=1e-15)
    assert f.covariance(f, ((None, None), (cross.mT, None))) is None
