"""Whether a matrix is a covariance: finite, symmetric, positive semi-definite up to rounding."""

from collections.abc import Callable

import torch
from torch import Tensor

from covprop.kernels.normal import is_finite

ALWAYS_EXACT = 64
EXACT_CHECK = 512
"""Eigenvalues are computed up to the first size for any batch, up to the second for a single
matrix (or as much work); beyond, conditions that cost O(n^2)."""
PROBES = 4


def matrix_flaw(matrix: Tensor, rounding: float) -> str | None:
    """What of a matrix is not finite, symmetric or positive semi-definite, up to rounding.

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
    if not (is_finite(right) and is_finite(left)):
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
