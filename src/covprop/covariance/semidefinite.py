"""Positive semi-definite matrices: roots of covariances, and flaws of matrices that are none."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from covprop.errors import InvalidGaussian
from covprop.kernels.normal import inverse_deviation, standard_deviation
from covprop.kernels.rounding import SINGULAR

ALWAYS_EXACT = 64
EXACT_CHECK = 512
"""Eigenvalues are computed up to the first size for any batch, up to the second for a single
matrix (or as much work); beyond, conditions that cost O(n^2)."""
PROBES = 4


def square_root(matrix: Tensor) -> Tensor:
    """L with L L^T = S: the Cholesky factor, or scaled eigenvectors where S is singular."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed.any()):
        return factor
    # Each element of a batch on its own, and without the gradient of a factor that failed.
    flat, singular = matrix.reshape(-1, *matrix.shape[-2:]), failed.reshape(-1) > 0
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor = torch.linalg.cholesky(torch.where(singular[:, None, None], identity, flat))
    eigenvalues, eigenvectors = torch.linalg.eigh(flat[singular])
    scaled = eigenvectors * standard_deviation(eigenvalues)[..., None, :]
    still = flat[singular].diagonal(dim1=-2, dim2=-1) == 0  # where roundings would be noise
    scaled = torch.where(still[..., None], 0, scaled)
    return factor.index_put((singular,), scaled).reshape(matrix.shape)


def nearest_semidefinite(matrix: Tensor) -> tuple[Tensor, float]:
    """A covariance with the same variances and correlations without negative eigenvalues.

    Also the lowest eigenvalue of the given correlations, relative to the largest, 0 but for
    rounding: units do not count. A gradient is that of the given matrix.
    """
    values = matrix.detach()
    variance = values.diagonal(dim1=-2, dim2=-1)
    inverse, stddev = inverse_deviation(variance), standard_deviation(variance)
    rho = values * inverse[..., :, None] * inverse[..., None, :]
    rounding = torch.finfo(values.dtype).eps * max(8, values.shape[-1])
    unit = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
    failed = torch.linalg.cholesky_ex(rho + rounding * unit)[1]
    if not bool(failed.any()):
        return matrix, 0.0
    eigenvalues, vectors = torch.linalg.eigh(rho)
    lowest = float((eigenvalues[..., 0] / eigenvalues[..., -1].clamp(min=rounding)).min())
    if lowest >= -rounding:
        return matrix, 0.0
    raised = (vectors * eigenvalues.clamp(min=0)[..., None, :]) @ vectors.mT
    scale = stddev * inverse_deviation(raised.diagonal(dim1=-2, dim2=-1))
    raised = raised * scale[..., :, None] * scale[..., None, :]
    raised = torch.where((failed > 0)[..., None, None], raised, values)
    return matrix + ((raised + raised.mT) / 2 - values), lowest


class Root(ABC):
    """L (*batch, n, width)."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of columns."""

    @abstractmethod
    def times(self, numbers: Tensor) -> Tensor:
        """L z (count, *batch, n) of numbers (count, *batch, width)."""

    @abstractmethod
    def after(self, rows: Tensor) -> Tensor:
        """A L (*batch, m, width) of rows A (*batch, m, n)."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of L, (*batch, n, count)."""


@final
@dataclass(frozen=True)
class DiagonalRoot(Root):
    """The root of a diagonal covariance: deviations (*batch, n)."""

    values: Tensor

    @property
    def width(self) -> int:
        """One column for each feature."""
        return self.values.shape[-1]

    def times(self, numbers: Tensor) -> Tensor:
        """s_i z_i."""
        return numbers * self.values

    def after(self, rows: Tensor) -> Tensor:
        """A_pi s_i."""
        return rows * self.values[..., None, :]

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns of a diagonal matrix."""
        block = torch.diag_embed(self.values[..., start:stop])
        return pad(block, (0, 0, start, self.width - stop))


@final
@dataclass(frozen=True)
class FactorRoot(Root):
    """A root with materialized columns: values (*batch, n, k)."""

    values: Tensor

    @property
    def width(self) -> int:
        """The number of columns k."""
        return self.values.shape[-1]

    def times(self, numbers: Tensor) -> Tensor:
        """F z, samples as rows: broadcast as vectors, each would get a copy of F."""
        return (numbers.movedim(0, -2) @ self.values.mT).movedim(-2, 0)

    def after(self, rows: Tensor) -> Tensor:
        """A F."""
        return rows @ self.values

    def columns(self, start: int, stop: int) -> Tensor:
        """Some of the columns."""
        return self.values[..., start:stop]


@final
@dataclass(frozen=True)
class ConcatenatedRoot(Root):
    """The root of a sum of two independent noises: the columns of both."""

    first: Root
    second: Root

    @property
    def width(self) -> int:
        """The columns of both."""
        return self.first.width + self.second.width

    def times(self, numbers: Tensor) -> Tensor:
        """L z + L' z'."""
        ours, others = numbers.split([self.first.width, self.second.width], dim=-1)
        return self.first.times(ours) + self.second.times(others)

    def after(self, rows: Tensor) -> Tensor:
        """[A L, A L']."""
        return torch.cat([self.first.after(rows), self.second.after(rows)], dim=-1)

    def columns(self, start: int, stop: int) -> Tensor:
        """Those of the first, then those of the second."""
        end = self.first.width
        parts = []
        if start < end:
            parts.append(self.first.columns(start, min(stop, end)))
        if stop > end:
            parts.append(self.second.columns(max(start, end) - end, stop - end))
        return torch.cat(parts, dim=-1)


def matrix_flaw(matrix: Tensor, rounding: float) -> str | None:
    """Why a matrix is not finite, symmetric and positive semi-definite up to rounding, or None.

    In units of the standard deviations, so that neither large nor small ones hide anything.
    """
    variance = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    if not bool(torch.isfinite(matrix).all()):
        return "the covariance has NaN or infinite entries"
    stddev, lost = _units(variance, rounding)
    scaled = matrix / stddev[..., :, None] / stddev[..., None, :]
    asymmetry = (scaled - scaled.mT).abs()
    if bool((asymmetry > rounding).any()):
        return (
            f"the covariance is not symmetric (entries differ by up to "
            f"{(matrix - matrix.mT).abs().max():.3g}); use (covariance + covariance.mT) / 2"
        )
    if bool((scaled.abs() > 1 + rounding).any()):
        return (
            "the covariance is not positive semi-definite: an entry exceeds the product of its two "
            "standard deviations"
        )
    scaled.diagonal(dim1=-2, dim2=-1).add_(lost)
    size = matrix.shape[-1]
    small = size <= ALWAYS_EXACT or matrix.numel() * size <= EXACT_CHECK**3
    lowest = torch.linalg.eigvalsh(scaled)[..., 0] if small else _lowest_quotient(scaled)
    if bool((lowest < -rounding * size).any()):
        return (
            "the covariance is not positive semi-definite (an eigenvalue of its correlations is "
            f"{'' if small else 'at most '}{lowest.min():.3g})"
        )
    return None


def products_flaw(
    products: Callable[[Tensor], tuple[Tensor, Tensor]], variance: Tensor, rounding: float
) -> str | None:
    """The same from S v and S^T v of a few v, for a matrix that no process has as a whole."""
    variance, size = variance.clamp(min=0), variance.shape[-1]
    stddev, lost = (part[..., :, None] for part in _units(variance, rounding))
    probes = _probes(variance)
    right, left = (product / stddev + lost * probes for product in products(probes / stddev))
    if not bool((torch.isfinite(right) & torch.isfinite(left)).all()):
        return "the covariance has NaN or infinite entries"
    bound = rounding * size**0.5
    if bool(((right - left).abs() > bound).any()):
        return "the covariance is not symmetric; distribute a symmetric one"
    lowest = (probes * right).sum(-2).amin(-1)
    if bool((lowest < -rounding * size).any()):
        return (
            "the covariance is not positive semi-definite (an eigenvalue of its correlations is "
            f"at most {lowest.min():.3g})"
        )
    return None


def _units(variance: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Standard deviations to divide by, and in their units what to add to lost variances.

    A variance that rounding of the largest explains is lost: it may be anything up to that, and has
    covariances of that size.
    """
    floor = rounding * variance.amax(-1, keepdim=True)
    stddev = variance.maximum(floor).sqrt()
    lost = (variance <= floor) & (floor > 0)
    return torch.where(stddev > 0, stddev, 1), lost.to(variance.dtype)


def _probes(like: Tensor) -> Tensor:
    """Vectors (n, PROBES) of length one, the constant one first."""
    waves = torch.arange(like.shape[-1], dtype=like.dtype, device=like.device)[:, None]
    probes = torch.cos(waves * torch.arange(PROBES, dtype=like.dtype, device=like.device))
    return probes / probes.norm(dim=0)


def _lowest_quotient(matrix: Tensor) -> Tensor:
    """The smallest of a few Rayleigh quotients, none of which is below the lowest eigenvalue."""
    probes = _probes(matrix)
    return (probes * (matrix @ probes)).sum(-2).amin(-1)


def checked_positive(values: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """Refuse values that are not positive; torch.compile disables torch.distributions' check."""
    if not bool((values.detach() > least).all()):
        raise singular()
    return values


@torch.no_grad()
def check_regular(root: Tensor, variance: Tensor) -> None:
    """Refuse a Cholesky factor (*batch, n, n) of a matrix that only rounding keeps from singular.

    (S^-1)_ii = 1 / Var(y_i | all others), of which S_ii is the variance itself.
    """
    identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    inverse = torch.linalg.solve_triangular(root, identity.expand_as(root), upper=False)
    rounding = max(SINGULAR, root.shape[-1]) * torch.finfo(root.dtype).eps
    checked_positive(1 / inverse.square().sum(-2), rounding * variance)


def singular() -> InvalidGaussian:
    """The error for a covariance without a density."""
    return InvalidGaussian(
        "there is no density: it needs a positive definite covariance, and this one is singular "
        "within rounding; .sample() works all the same, and .marginal() leaves out elements that "
        "depend on others or do not vary"
    )
