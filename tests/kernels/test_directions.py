"""Vectors over their lengths, against quadrature in polar coordinates, scipy and autograd."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from covprop.kernels.directions import (
    SMALL_NOISE,
    DiagonalGaussian,
    Elements,
    diagonalised,
    direction,
    independent_length,
    length,
    marginal,
)

D = torch.float64


def planar(mean: list[float], matrix: list[list[float]], offset: float) -> dict[str, Tensor]:
    """Moments in the plane by Gauss-Hermite points of the input, of which smooth ones need few."""
    x, w = np.polynomial.hermite_e.hermegauss(160)
    root = np.linalg.cholesky(np.array(matrix))
    first, second = np.meshgrid(x, x)
    z = np.array(mean)[:, None] + root @ np.stack([first.ravel(), second.ravel()])
    weight = np.outer(w, w).ravel() / (2 * math.pi)
    size = np.sqrt((z**2).sum(0) + offset)
    v = z / size
    average = (weight * v).sum(1)
    slope = np.eye(2) * (weight / size).sum() - (weight / size * v) @ v.T
    lengths = (weight * size).sum()
    return {
        "mean": torch.tensor(average),
        "slope": torch.tensor(slope),
        "covariance": torch.tensor((weight * v) @ v.T - np.outer(average, average)),
        "length": torch.tensor(lengths),
        "variance": torch.tensor((weight * size**2).sum() - lengths**2),
    }


def found(mean: Tensor, matrix: Tensor, offset: float = 0.0) -> dict[str, Tensor]:
    z, basis = diagonalised(mean, matrix)
    of = direction(z, offset)
    slope = basis @ of.slope @ basis.mT
    result = {
        "mean": (basis @ of.mean[..., None])[..., 0],
        "slope": slope,
        "covariance": slope @ matrix @ slope.mT + basis @ of.extra @ basis.mT,
    }
    if offset == 0:
        lengths = length(z, of)
        result |= {"length": lengths.mean, "variance": lengths.variance}
    return result


@pytest.mark.parametrize("offset", [0.0, 0.3])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.25])
def test_moments_in_the_plane_are_those_of_quadrature(noise: float, offset: float) -> None:
    mean, shape = [1.0, -0.8], [[1.0, 0.4], [0.4, 0.5]]
    matrix = [[noise**2 * value for value in row] for row in shape]
    ours = found(torch.tensor(mean, dtype=D), torch.tensor(matrix, dtype=D), offset)
    oracle = planar(mean, matrix, offset)
    for name, value in ours.items():
        scale = float(oracle[name].abs().max())
        torch.testing.assert_close(value, oracle[name], rtol=0, atol=2e-7 * scale)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 200])
def test_pure_noise_has_the_moments_of_chi(n: int) -> None:
    """v is uniform on the sphere: E[v v^T] = 1/n; |z| is chi, E[1 / |z|] that of its inverse."""
    z = DiagonalGaussian(torch.zeros(n, dtype=D), torch.full((n,), 4.0, dtype=D))
    of, lengths = direction(z), length(z, direction(z))
    spread = of.slope @ z.covariance @ of.slope + of.extra
    assert not bool(of.mean.any())
    torch.testing.assert_close(spread, torch.eye(n, dtype=D) / n, rtol=0, atol=1e-13)
    chi = stats.chi(n, scale=2)
    assert float(lengths.mean) == pytest.approx(chi.mean(), rel=1e-12)
    assert float(lengths.variance) == pytest.approx(chi.var(), rel=1e-10)
    if n > 1:  # E[dv/dz] = (1 - 1/n) E[1 / |z|]
        inverse = (1 - 1 / n) * integrate.quad(lambda r: chi.pdf(r) / r, 0, np.inf)[0]
        torch.testing.assert_close(
            of.slope.diagonal(), torch.full((n,), inverse, dtype=D), rtol=1e-8, atol=0
        )


def test_one_element_is_a_sign() -> None:
    """v = sign(z): E[v] = erf(m / (s sqrt 2)), Var = 1 - E[v]^2, E[v'] = 2 phi(m / s) / s."""
    z = DiagonalGaussian(torch.tensor([0.7], dtype=D), torch.tensor([0.25], dtype=D))
    of = direction(z)
    mean = math.erf(1.4 / math.sqrt(2))
    assert float(of.mean) == pytest.approx(mean, rel=1e-13)
    assert float(of.slope) == pytest.approx(4 * stats.norm.pdf(1.4), rel=1e-12)
    variance = float(of.slope**2 * 0.25 + of.extra)
    assert variance == pytest.approx(1 - mean**2, rel=1e-12)


@pytest.mark.parametrize("n", [3, 30])
def test_the_second_moments_add_up_to_one(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for noise in (1e-8, 1e-4, 0.01, 0.3, 1.0, 30.0):
        mean = torch.randn(4, n, dtype=D, generator=generator)
        factor = noise * torch.randn(4, n, n, dtype=D, generator=generator)
        ours = found(mean, factor @ factor.mT)
        traces = ours["covariance"].diagonal(dim1=-2, dim2=-1).sum(-1)
        total = traces + ours["mean"].square().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)
        lowest = torch.linalg.eigvalsh(ours["covariance"])[..., 0]
        assert bool((lowest >= -1e-14 * traces.clamp(min=1e-2)).all())


def test_little_noise_and_more_agree_where_they_meet() -> None:
    """On both sides of the border the difference to the first order is the same, but for 1e-8."""
    mean = torch.tensor([1.0, 2.0, -0.5, 0.3], dtype=D)
    shape = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=D) * mean.square().sum() * SMALL_NOISE
    below, above = (direction(DiagonalGaussian(mean, shape * k)) for k in (1 - 1e-9, 1 + 1e-9))
    scale = float(below.extra.abs().max())
    torch.testing.assert_close(below.extra, above.extra, rtol=0, atol=1e-3 * scale)
    sizes = [length(DiagonalGaussian(mean, shape * k), of) for k, of in ((1, below), (1, above))]
    assert float(sizes[0].extra) == pytest.approx(float(sizes[1].extra), rel=1e-3)


@pytest.mark.parametrize("noise", [0.0, 1e-12, 1e-3, 0.02, 0.5, 4.0])
def test_independent_elements_need_no_matrix(noise: float) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 5, dtype=D, generator=generator)
    variance = noise**2 * torch.rand(2, 5, dtype=D, generator=generator)
    z = DiagonalGaussian(mean, variance)
    elements = Elements(mean, variance)
    of, alone = direction(z, 0.1), marginal(elements, 0.1)
    # Above little noise what is not linear is a difference of numbers of the size of one.
    rounding = 1e-14 * (1 if noise**2 > SMALL_NOISE else noise**2)
    matrix = of.slope @ z.covariance @ of.slope + of.extra
    expected = matrix.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(alone.mean, of.mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(alone.variance, expected, rtol=1e-9, atol=rounding)
    vectors = torch.randn(2, 3, 5, dtype=D, generator=generator)
    torch.testing.assert_close(alone.slope(vectors), vectors @ of.slope, rtol=1e-11, atol=1e-13)
    ours = independent_length(elements, marginal(elements))
    theirs = length(z, direction(z))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=rounding)


@pytest.mark.parametrize("noise", [1e-3, 0.3])
def test_derivatives_are_those_of_differences_where_eigenvalues_are_equal(noise: float) -> None:
    mean = torch.tensor([1.0, -0.4, 0.2], dtype=D, requires_grad=True)
    factor = (noise * torch.eye(3, dtype=D)).requires_grad_()

    def moments(mean: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        ours = found(mean, factor @ factor.mT)
        small = {"covariance", "variance"}
        return tuple(value / noise**2 if name in small else value for name, value in ours.items())

    assert torch.autograd.gradcheck(moments, (mean, factor), eps=1e-4 * noise, rtol=1e-5, atol=1e-5)


def test_second_derivatives_of_the_covariance_are_refused() -> None:
    mean, factor = torch.ones(2, dtype=D), torch.eye(2, dtype=D, requires_grad=True)
    value = found(mean, factor @ factor.mT)["mean"].sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(value, factor, create_graph=True)


def test_what_is_not_finite_stays_so() -> None:
    mean = torch.ones(2, 3, dtype=D)
    matrix = torch.eye(3, dtype=D).repeat(2, 1, 1)
    matrix[1, 0, 0] = math.nan
    ours = found(mean, matrix)
    assert bool(ours["mean"][1].isnan().all())
    assert bool(ours["mean"][0].isfinite().all())


def test_nothing_at_all_is_zero() -> None:
    of = direction(DiagonalGaussian(torch.zeros(3, dtype=D), torch.zeros(3, dtype=D)))
    assert not bool(of.mean.any())
    assert not bool(of.extra.any())
