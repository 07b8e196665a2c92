"""Products of tensors that vary: moments of products of jointly Gaussian variables."""

from collections.abc import Callable
from itertools import product as every
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from tests.gaussians import gaussian, weight
from tests.layers import propagate
from tests.oracles import assert_close


def hermite_moments(
    function: Callable[[Tensor], Tensor], x: cp.Gaussian, nodes: int = 5
) -> tuple[Tensor, Tensor]:
    """Mean and covariance by Gauss-Hermite quadrature over all elements of the input.

    Exact to rounding for polynomials: their squares have degree below 2 * nodes.
    """
    points, weights = torch.from_numpy(gauss_hermite(nodes))
    size = x.mean.numel()
    index = torch.tensor(list(every(range(nodes), repeat=size)))
    probability = weights[index].prod(-1)
    factor = torch.linalg.cholesky(x.covariance_matrix)
    inputs = x.mean + (points[index] @ factor.mT).reshape(-1, *x.mean.shape)
    outputs = torch.stack([function(one) for one in inputs]).reshape(len(inputs), -1)
    mean = probability @ outputs
    deviation = outputs - mean
    return mean, (deviation * probability[:, None]).mT @ deviation


def gauss_hermite(nodes: int) -> Any:
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return np.stack([points, weights / weights.sum()])


W = weight(4, 4) / 2
PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "with itself": lambda x: x * x,
    "square": torch.square,
    "power": lambda x: x**2,
    "two maps": lambda x: F.linear(x, W) * x,
    "shifted": lambda x: (x + 1) * (2 - x),
    "function": lambda x: torch.mul(x, F.linear(x, W)),
    "method": lambda x: x.multiply(x.flip(0)),
    "in place": lambda x: F.linear(x, W).mul_(x),
    "with a view of itself": lambda x: x.reshape(2, 2) * x.reshape(2, 2).mT,
    "chunks": lambda x: torch.mul(*x.chunk(2, dim=-1)),
    "broadcast": lambda x: x.reshape(2, 2) * x[:2],
    "outer": lambda x: x[:, None] * x[None, :2],
    "gate of one": lambda x: x * x.mean(),
    "with a constant": lambda x: x * W[0] * x,
    "sum of products": lambda x: (x * F.linear(x, W)).sum() + x,
    "product and factor": lambda x: torch.cat([x * x.flip(0), x]),
    "two products": lambda x: x * x[0] - F.linear(x, W),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_have_exact_moments(name: str) -> None:
    x = gaussian(4)
    y = propagate(PRODUCTS[name], x)
    mean, covariance = hermite_moments(PRODUCTS[name], x)
    assert y.mean.shape == PRODUCTS[name](x.mean).shape
    assert_close(y.mean.reshape(-1), mean, atol=1e-11)
    assert_close(y.covariance_matrix, covariance, atol=1e-10)


def test_a_product_with_itself_is_the_square() -> None:
    x = gaussian(5, batch=(2,))
    square, product = propagate(torch.square, x), propagate(lambda x: x * x, x)
    assert_close(product.mean, square.mean, atol=1e-14)
    assert_close(product.covariance_matrix, square.covariance_matrix, atol=1e-13)


def test_a_product_of_independent_inputs_has_the_textbook_moments() -> None:
    x, w = gaussian(4), gaussian(4, seed=1)
    y = propagate(torch.mul, x, w)
    a, b, first, second = x.mean, w.mean, x.covariance_matrix, w.covariance_matrix
    assert_close(y.mean, a * b, rtol=0.0)
    expected = first * second + a[:, None] * second * a + b[:, None] * first * b
    assert_close(y.covariance_matrix, expected, atol=1e-13)


def test_the_variance_of_a_pair_is_the_known_formula() -> None:
    """Var(uv) = m_u^2 V + m_v^2 U + 2 m_u m_v C + U V + C^2 (Goodman 1960 and Isserlis)."""
    x = gaussian(2)
    (a, b), s = x.mean.tolist(), x.covariance_matrix.tolist()
    y = propagate(lambda x: x[0] * x[1], x)
    u, v, c = s[0][0], s[1][1], s[0][1]
    assert abs(float(y.mean) - (a * b + c)) <= 1e-14
    expected = a * a * v + b * b * u + 2 * a * b * c + u * v + c * c
    assert abs(float(y.variance) - expected) <= 1e-13


def test_a_batch_of_products_is_each_of_them() -> None:
    x, w = gaussian(3, batch=(2,)), gaussian(2, 3, batch=(2,), seed=1)
    y = propagate(lambda x, w: w * x[:, None] * x[:, None], x, w)
    for i in range(2):
        one = propagate(lambda x, w: w * x * x, x[i], w[i])
        assert_close(y.mean[i], one.mean, atol=1e-13)
        assert_close(y.covariance_matrix[i], one.covariance_matrix, atol=1e-12)


def test_a_product_that_would_mix_the_batch_is_refused() -> None:
    with pytest.raises(cp.BatchDimensionError):
        propagate(lambda x: x * x.sum(-1), gaussian(3, 3, batch=(3,)))


def test_a_certain_factor_scales() -> None:
    x = gaussian(3)
    certain = cp.Gaussian.isotropic(weight(3), stddev=0.0)
    y = propagate(torch.mul, x, certain)
    assert_close(y.covariance_matrix, weight(3)[:, None] * x.covariance_matrix * weight(3))
    zero = propagate(lambda x: x * (x - x), x)
    assert not zero.mean.any()
    assert not zero.covariance_matrix.any()


def test_a_gate_agrees_with_sampling() -> None:
    """x sigmoid(x): the gate is not Gaussian, so that only the mean is exact (Stein)."""
    x = cp.Gaussian(gaussian(3).mean + 1, gaussian(3).covariance_matrix / 100)
    y = propagate(lambda x: x * torch.sigmoid(x), x)
    sample = F.silu(x.sample(400_000, torch.Generator().manual_seed(0)))
    standard = (sample - sample.mean(0)) / sample.std(0)
    error = ((standard.pow(4).mean(0) - 1) / (4 * len(sample))).sqrt()
    assert bool(((y.mean - sample.mean(0)).abs() <= 5 * sample.std(0) / len(sample) ** 0.5).all())
    assert bool(((y.stddev / sample.std(0) - 1).abs() <= 5 * error).all())
    assert float(error.max()) < 0.002


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x[:2] @ x[2:].mT, (5, 2)),
        (lambda x: x[0] @ x[1:].mT, (4, 3)),
        (lambda x: torch.bmm(x[:2], x[2:].mT), (4, 2, 3)),
        (lambda x: F.glu(x, -1), (2, 6)),
        (lambda x: 2.0 / (x + 9), (3,)),
        (lambda x: x[:2] / (x[2:] + 9), (4,)),
    ],
    ids=["matmul", "vector", "bmm", "glu", "reciprocal", "quotient"],
)
def test_products_and_quotients_agree_with_sampling_at_small_noise(function, shape):
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel()
    factor = 0.05 * torch.randn(size, size, dtype=torch.float64, generator=generator) / size**0.5
    mean = torch.randn(*shape, dtype=torch.float64, generator=generator)
    x = cp.Gaussian(mean, factor @ factor.mT)
    result = propagate(function, x)
    samples = torch.func.vmap(function)(x.sample(100_000, generator))
    assert result.mean.shape == samples.shape[1:]
    spread = samples.std(0)
    assert float((result.stddev / spread - 1).abs().max()) < 5 / (2 * 100_000) ** 0.5 + 5e-3
    assert float(((result.mean - samples.mean(0)) / spread).abs().max()) < 5 / 100_000**0.5 + 2e-3


# Sums of products of two tensors: einsum and matmul.


def isserlis(
    function: Callable[[Tensor, Tensor], Tensor],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    mean: Tensor,
    covariance: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a bilinear function of jointly Gaussian u and v, term by term.

    mean and covariance are of u and v one after the other. Which products each output sums is
    found by trying torch's function on every pair of unit tensors.
    """
    m, s = mean.tolist(), covariance.tolist()
    sizes = [torch.Size(shape).numel() for shape in shapes]
    units = [torch.eye(n, dtype=torch.float64) for n in sizes]
    terms: dict[int, list[tuple[float, int, int]]] = {}
    for i, j in every(range(sizes[0]), range(sizes[1])):
        values = function(units[0][i].reshape(shapes[0]), units[1][j].reshape(shapes[1]))
        for out, value in enumerate(values.flatten().tolist()):
            terms.setdefault(out, [])
            if value:
                terms[out].append((value, i, sizes[0] + j))

    def of_pairs(a: int, b: int, c: int, d: int) -> float:
        """Cov(z_a z_b, z_c z_d)."""
        centred = s[a][c] * s[b][d] + s[a][d] * s[b][c]
        first = m[a] * m[c] * s[b][d] + m[a] * m[d] * s[b][c]
        return centred + first + m[b] * m[c] * s[a][d] + m[b] * m[d] * s[a][c]

    means = [sum(w * (m[a] * m[b] + s[a][b]) for w, a, b in terms[out]) for out in sorted(terms)]
    rows = [
        [sum(w * v * of_pairs(a, b, c, d) for w, a, b in terms[p] for v, c, d in terms[q])
         for q in sorted(terms)]
        for p in sorted(terms)
    ]  # fmt: skip
    return torch.tensor(means, dtype=torch.float64), torch.tensor(rows, dtype=torch.float64)


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
SUMS: dict[str, tuple[Callable[[Any, Any], Any], Shapes]] = {
    "matrices": (lambda u, v: torch.einsum("ij,jk->ik", u, v), ((2, 3), (3, 2))),
    "transposed result": (lambda u, v: torch.einsum("ij,jk->ki", u, v), ((2, 3), (3, 1))),
    "outer": (lambda u, v: torch.einsum("i,j->ij", u, v), ((3,), (2,))),
    "dot": (lambda u, v: torch.einsum("i,i->", u, v), ((4,), (4,))),
    "element-wise": (lambda u, v: torch.einsum("ij,ij->ij", u, v), ((2, 2), (2, 2))),
    "sum of all": (lambda u, v: torch.einsum("ij,kl->", u, v), ((2, 2), (1, 2))),
    "sum of one factor": (lambda u, v: torch.einsum("ij,k->ik", u, v), ((2, 2), (2,))),
    "spaces": (lambda u, v: torch.einsum(" i j , j -> i ", u, v), ((2, 3), (3,))),
    "implicit": (lambda u, v: torch.einsum("ij,jk", u, v), ((2, 2), (2, 2))),
    "implicit, by the alphabet": (lambda u, v: torch.einsum("zj,ja", u, v), ((2, 2), (2, 3))),
    "implicit, capitals first": (lambda u, v: torch.einsum("aj,jB", u, v), ((2, 2), (2, 3))),
    "implicit, nothing left": (lambda u, v: torch.einsum("ij,ji", u, v), ((2, 2), (2, 2))),
    "ellipsis": (lambda u, v: torch.einsum("...ij,...jk->...ik", u, v), ((2, 1, 2), (2, 2, 1))),
    "ellipsis of nothing": (lambda u, v: torch.einsum("...j,j...->...", u, v), ((3,), (3,))),
    "ellipsis of one": (lambda u, v: torch.einsum("...i,i->...", u, v), ((2, 2), (2,))),
    "ellipses that differ": (
        lambda u, v: torch.einsum("...i,...i->...i", u, v), ((2, 2, 2), (2, 2)),
    ),
    "ellipsis, implicit": (lambda u, v: torch.einsum("b...,b", u, v), ((2, 2), (2,))),
    "ellipsis in the middle": (
        lambda u, v: torch.einsum("i...j,jk->k...i", u, v), ((2, 1, 2), (2, 2)),
    ),
    "ellipsis summed away": (lambda u, v: torch.einsum("i...,i...->i...", u, v), ((2, 2), (2, 2))),
    "diagonal": (lambda u, v: torch.einsum("ii,i->i", u, v), ((2, 2), (2,))),
    "diagonals": (lambda u, v: torch.einsum("ii,ij->j", u, v), ((3, 3), (3, 2))),
    "traces": (lambda u, v: torch.einsum("ii,jj->", u, v), ((2, 2), (2, 2))),
    "dimensions of one": (lambda u, v: torch.einsum("ij,ij->ij", u, v), ((1, 3), (2, 1))),
    "in a list": (lambda u, v: torch.einsum("ij,j->i", [u, v]), ((2, 2), (2,))),
    "matmul": (torch.matmul, ((2, 3), (3, 2))),
    "operator": (lambda u, v: u @ v, ((2, 2), (2, 3))),
    "mm": (torch.mm, ((2, 2), (2, 2))),
    "mv": (lambda u, v: u.mv(v), ((2, 3), (3,))),
    "bmm": (torch.bmm, ((2, 1, 2), (2, 2, 2))),
    "vectors": (torch.matmul, ((4,), (4,))),
    "vector and matrix": (torch.matmul, ((2,), (2, 3))),
    "matrix and vector": (torch.matmul, ((3, 2), (2,))),
    "vector and many": (torch.matmul, ((2,), (2, 2, 2))),
    "many and vector": (torch.matmul, ((2, 2, 2), (2,))),
    "many and matrix": (torch.matmul, ((2, 1, 2), (2, 2))),
    "matrix and many": (torch.matmul, ((1, 2), (2, 2, 2))),
    "broadcast both ways": (torch.matmul, ((2, 1, 1, 2), (2, 2, 1))),
    "a column": (torch.matmul, ((2, 1), (1, 2))),
}  # fmt: skip


def joint(x: cp.Gaussian, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of two linear maps of x, one after the other."""
    both = torch.cat([first, second])
    return both @ x.mean, both @ x.covariance_matrix @ both.mT


def assert_moments(y: cp.Gaussian, expected: tuple[Tensor, Tensor], shape: torch.Size) -> None:
    mean, covariance = expected
    scale = max(1.0, float(covariance.abs().max()))
    assert_close(y.mean, mean.reshape(shape), atol=1e-12 * scale)
    assert_close(y.covariance_matrix, covariance, atol=1e-12 * scale)


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_products_of_dependent_tensors_have_exact_moments(name: str) -> None:
    """u and v are parts of one vector, all of whose elements depend on each other."""
    function, shapes = SUMS[name]
    n, m = (torch.Size(shape).numel() for shape in shapes)
    x, unit = gaussian(n + m), torch.eye(n + m, dtype=torch.float64)

    def forward(x: Any) -> Any:
        return function(x[:n].reshape(shapes[0]), x[n:].reshape(shapes[1]))

    expected = isserlis(function, shapes, *joint(x, unit[:n], unit[n:]))
    assert_moments(propagate(forward, x), expected, forward(x.mean).shape)


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_products_of_independent_tensors_have_exact_moments(name: str) -> None:
    function, shapes = SUMS[name]
    u, v = gaussian(*shapes[0]), gaussian(*shapes[1], seed=3)
    mean = torch.cat([u.mean.flatten(), v.mean.flatten()])
    covariance = torch.block_diag(u.covariance_matrix, v.covariance_matrix)
    expected = isserlis(function, shapes, mean, covariance)
    assert_moments(propagate(function, u, v), expected, function(u.mean, v.mean).shape)


TWICE = {name: case for name, case in SUMS.items() if case[1][0] == case[1][1]}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("second", ["itself", "shifted", "map"])
def test_sums_of_products_of_a_tensor_with_itself_have_exact_moments(
    name: str, second: str
) -> None:
    """One random vector in both places: as it is, around another mean, or through a map."""
    function, shapes = TWICE[name]
    n = torch.Size(shapes[0]).numel()
    x, unit, map = gaussian(n), torch.eye(n, dtype=torch.float64), weight(n, n)

    def forward(x: Any) -> Any:
        other = {"itself": lambda: x, "shifted": lambda: x + 2, "map": lambda: F.linear(x, map)}
        return function(x.reshape(shapes[0]), other[second]().reshape(shapes[1]))

    mean, covariance = joint(x, unit, map if second == "map" else unit)
    mean[n:] += 2.0 if second == "shifted" else 0.0
    expected = isserlis(function, shapes, mean, covariance)
    assert_moments(propagate(forward, x), expected, forward(x.mean).shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.einsum("bij,bjk->bik", x, w),
        lambda x, w: torch.einsum("bij,bjk->bki", x, w),
        lambda x, w: torch.einsum("...ij,...jk->...ik", x, w),
        lambda x, w: torch.einsum("b...,b...->b...", x, w),
        lambda x, w: torch.einsum("bij,bkl->b", x, w),
        lambda x, w: torch.einsum("bii,bij->bj", x, w),
        lambda x, w: x @ w,
        lambda x, w: x[:, 0, None] @ w,
        lambda x, w: torch.bmm(x, x.mT) @ w,
        lambda x, w: x[:, None] @ w[:, :, :, None],
        lambda x, w: x @ x + w,
    ],
)
def test_a_batch_of_sums_of_products_is_each_of_them(function: Callable[..., Any]) -> None:
    x, w = gaussian(2, 2, batch=(2,)), gaussian(2, 2, batch=(2,), seed=1)
    y = propagate(function, x, w)
    assert y.mean.shape == function(x.mean, w.mean).shape
    for i in range(2):
        one = propagate(lambda u, v: function(u[None], v[None])[0], x[i], w[i])
        assert_close(y.mean[i], one.mean, atol=1e-13)
        assert_close(y.covariance_matrix[i], one.covariance_matrix, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.einsum("bij,bij->ij", x, x),
        lambda x: torch.einsum("bij,bjk", x, x),
        lambda x: torch.einsum("bij,bjk->kbi", x, x).sum(1),
        lambda x: torch.einsum("bij,cij->bc", x, x),
        lambda x: torch.einsum("bij,cjk->bik", x, x),
        lambda x: torch.einsum("bij,jbk->bik", x, x),
        lambda x: x[:, 0] @ x[:, 0].mT,
        lambda x: x[:, 0] @ x,
        lambda x: x[:, 0] @ x[:, 0],
        lambda x: x @ x[:, 0],
        lambda x: torch.mm(x[:, 0], x[:, 1]),
        lambda x: x * x[:, 0],
        lambda x: x[:, 0] * torch.relu(x),
        lambda x: torch.relu(x).mul_(x[:, 0]),
        lambda x: x + x[:, 0],
        lambda x: x / (x[:, 0] + 99),
        lambda x: torch.maximum(x, x[:, 0]),
        lambda x: F.linear(x, weight(3, 3)) - x.sum(1),
    ],
)
def test_a_sum_of_products_that_would_mix_the_batch_is_refused(
    function: Callable[..., Any],
) -> None:
    x = gaussian(3, 3, batch=(3,))
    function(x.mean)  # torch has no objection
    with pytest.raises(cp.BatchDimensionError):
        propagate(function, x)


def test_einsum_of_two_tensors_has_no_room_for_a_third() -> None:
    for third in (None, W[0]):
        with pytest.raises(cp.UnsupportedOperation, match="multiply step by step"):
            propagate(
                lambda x, t=third: torch.einsum("i,i,i->i", x, x, x if t is None else t),
                gaussian(4),
            )


def test_a_matrix_product_knows_what_it_came_of() -> None:
    """Cov(u v, x) is of first order alone: Stein's m_u V + m_v U."""
    x, eye = gaussian(8), torch.eye(8, dtype=torch.float64)

    def forward(x: Any) -> Any:
        return torch.cat([(x[:4].reshape(2, 2) @ x[4:].reshape(2, 2)).flatten(), x])

    y = propagate(forward, x)
    means, matrix = x.mean.tolist(), x.covariance_matrix
    for p, (a, b) in enumerate(every(range(2), range(2))):
        expected = torch.zeros(8, dtype=torch.float64)
        for k in range(2):
            u, v = 2 * a + k, 4 + 2 * k + b
            expected += means[u] * matrix[v] + means[v] * matrix[u]
        assert_close(y.covariance_matrix[p, 4:], expected @ eye, atol=1e-13)
    assert_close(y.covariance_matrix[4:, 4:], matrix, atol=1e-14)


def test_gradients_of_a_product_of_matrices_are_right() -> None:
    matrix = gaussian(4).covariance_matrix / 4

    def moments(mean: Tensor) -> tuple[Tensor, Tensor]:
        x = cp.Gaussian(mean, matrix)
        y = propagate(lambda x: torch.einsum("ij,kj->ik", x, x + 1), x)
        return y.mean, y.covariance_matrix

    assert torch.autograd.gradcheck(moments, (weight(2, 2).requires_grad_(),))


def test_products_that_meet_know_of_each_other() -> None:
    """x^2 + x^2 has the variance of 2 x^2: 4 * 2, and not twice 2 plus a first-order term."""
    x = cp.Gaussian.isotropic(torch.zeros(2, dtype=torch.float64), stddev=1.0)
    assert_close(propagate(lambda x: x * x + x * x, x).variance, torch.full((2,), 8.0).double())
    beside = propagate(lambda x: torch.cat([x * x, x * x]), x).correlation_matrix
    assert_close(beside[:2, 2:], torch.eye(2).double(), atol=1e-14)


@pytest.mark.parametrize("swapped", [False, True])
def test_products_of_shared_factors_have_exact_moments_after_linear_maps(swapped: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b, c, d = (torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(4))
    root = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    x = cp.Gaussian(torch.randn(3, dtype=torch.float64, generator=generator), root @ root.mT)

    def model(x: Any) -> Any:
        u, v, w = (torch.nn.functional.linear(x, m) for m in (a, b, c))
        if swapped:
            later = torch.nn.functional.linear(u * w, d)
            return later + u * v
        first = u * v
        return first + torch.nn.functional.linear(u * w, d)

    # The same as one quadratic form of x for each output: x' Q x, with Q symmetric.
    forms = torch.einsum("ij,ik->ijk", a, b) + torch.einsum("ij,jk,jl->ikl", d, a, c)
    forms = (forms + forms.mT) / 2
    mean, matrix = x.mean, x.covariance_matrix
    expected = 2 * torch.einsum("ijk,kl,mln,nj->im", forms, matrix, forms, matrix)
    expected = expected + 4 * torch.einsum("j,ijk,kl,mln,n->im", mean, forms, matrix, forms, mean)
    y = propagate(model, x)
    assert_close(y.covariance_matrix, expected, rtol=1e-12, atol=1e-10)
