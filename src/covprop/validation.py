"""Whether a mean and a covariance describe a Gaussian: checked at the gate, trusted inside."""

import math

import torch
from torch import Tensor

from covprop.covariance import Covariance, Dense, Sharded, Zero
from covprop.covariance.sharded import is_distributed
from covprop.errors import InvalidGaussian
from covprop.kernels.normal import is_finite

SUPPORTED = (torch.float32, torch.float64)
ALWAYS_EXACT = 64
EXACT_CHECK = 512
"""Eigenvalues are computed up to the first size for any batch, up to the second for a single
matrix (or as much work); beyond, conditions that cost O(n^2)."""
PROBES = 4
ROUNDING = 100.0
"""In units of machine epsilon: asymmetry and negative eigenvalues that rounding explains."""


def check_tensors(mean: object, covariance: object) -> None:
    """Types, dtypes and devices."""
    if not isinstance(mean, Tensor):
        raise InvalidGaussian(f"the mean must be a tensor, not {type(mean).__name__}")
    if is_distributed(mean):
        raise InvalidGaussian("the mean is whole on every process; use mean.full_tensor()")
    if not isinstance(covariance, Tensor | Covariance):
        raise InvalidGaussian(
            f"the covariance must be a tensor or a Covariance, not {type(covariance).__name__}"
        )
    for name, dtype in (("mean", mean.dtype), ("covariance", covariance.dtype)):
        if dtype not in SUPPORTED:
            raise InvalidGaussian(
                f"the {name} has dtype {dtype}; covprop computes in float32 or float64, so convert "
                "it with .float() or .double()"
            )
    if mean.dtype != covariance.dtype:
        raise InvalidGaussian(
            f"the mean has dtype {mean.dtype} and the covariance {covariance.dtype}; convert one"
        )
    if mean.device != covariance.device:
        raise InvalidGaussian(
            f"the mean is on {mean.device} and the covariance on {covariance.device}; move one"
        )


def check_stddev(mean: Tensor, width: Tensor, batch_dims: int) -> None:
    """One standard deviation for all, or one for each Gaussian of the batch; none negative."""
    if width.dim() > batch_dims:
        raise InvalidGaussian(
            f"stddev of shape {tuple(width.shape)} is more than one number for each of "
            f"{batch_dims} batch dimensions; use cp.Gaussian.diagonal(mean, variance)"
        )
    if width.dim() and width.shape != mean.shape[:batch_dims]:
        raise InvalidGaussian(
            f"the batch has shape {tuple(mean.shape[:batch_dims])} and stddev "
            f"{tuple(width.shape)}; give one number, or one for each Gaussian of the batch"
        )
    if bool((width < 0).any()):
        raise InvalidGaussian("a standard deviation cannot be negative")


def check_shapes(mean: Tensor, covariance: Covariance | Tensor) -> None:
    """The batch of the covariance leads the mean, and the rest has n elements."""
    if isinstance(covariance, Tensor):
        shape = tuple(covariance.shape)
        if covariance.dim() < 2 or shape[-1] != shape[-2]:  # noqa: PLR2004
            raise InvalidGaussian(
                f"a covariance has shape (*batch, n, n), not {shape}; for variances alone use "
                "cp.Gaussian.diagonal(mean, variance)"
            )
        batch, size = shape[:-2], shape[-1]
    else:
        batch, size = tuple(covariance.batch_shape), covariance.size
    event = tuple(mean.shape[len(batch) :])
    if tuple(mean.shape[: len(batch)]) != batch:
        raise InvalidGaussian(
            f"the covariance is a batch of shape {batch}, but the mean has shape "
            f"{tuple(mean.shape)}, which does not begin with it"
        )
    if math.prod(event) != size:
        raise InvalidGaussian(
            f"the covariance is for {size} features, but the mean has {math.prod(event)} "
            f"(shape {tuple(mean.shape)}, of which {batch} is the batch); give the covariance the "
            "shape (*batch, n, n), n the number of elements of one event, if need be with "
            "covariance.expand(*batch, n, n)"
        )


def check_batch_dims(mean: Tensor, batch_dims: int) -> None:
    """Leading dimensions of the mean."""
    if not 0 <= batch_dims <= mean.dim():
        raise InvalidGaussian(
            f"a mean of {mean.dim()} dimensions cannot have {batch_dims} batch dimensions"
        )


def check_low_rank(mean: object, factor: object, variance: object, batch_dims: int) -> None:
    """A factor has the shape of the mean and one dimension more, variances that of the mean."""
    check_tensors(mean, factor)
    check_tensors(mean, mean if variance is None else variance)
    assert isinstance(mean, Tensor)
    assert isinstance(factor, Tensor)
    check_batch_dims(mean, batch_dims)
    if factor.shape[:-1] != mean.shape:
        raise InvalidGaussian(
            f"a factor has the shape of the mean {tuple(mean.shape)} and a last dimension for its "
            f"columns, not {tuple(factor.shape)}; expand it over the batch with .expand"
        )
    if isinstance(variance, Tensor) and variance.shape != mean.shape:
        raise InvalidGaussian(
            f"variances have the shape of the mean {tuple(mean.shape)}, not {tuple(variance.shape)}"
        )


@torch.no_grad()
def check_values(mean: Tensor, covariance: Covariance) -> None:
    """Finite, symmetric and positive semi-definite, up to rounding."""
    if not is_finite(mean):
        raise InvalidGaussian("the mean has NaN or infinite entries")
    if isinstance(covariance, Zero):
        return
    variance = covariance.diagonal()
    if not bool(torch.isfinite(variance).all()):
        raise InvalidGaussian("the covariance has NaN or infinite entries")
    if variance.numel() == 0:
        return
    rounding = ROUNDING * torch.finfo(mean.dtype).eps
    if bool((variance < -rounding * variance.abs().amax(-1, keepdim=True)).any()):
        raise InvalidGaussian(f"the covariance has a negative variance ({variance.min():.3g})")
    if (flaw := covariance.flaw(rounding)) is not None:
        raise InvalidGaussian(flaw)
    if isinstance(covariance, Dense):
        _check_matrix(covariance.values, variance.clamp(min=0), rounding)
    if isinstance(covariance, Sharded):
        _check_products(covariance, variance.clamp(min=0), rounding)


def _check_matrix(matrix: Tensor, variance: Tensor, rounding: float) -> None:
    """In units of the standard deviations, so that neither large nor small ones hide anything."""
    if not bool(torch.isfinite(matrix).all()):
        raise InvalidGaussian("the covariance has NaN or infinite entries")
    stddev, lost = _units(variance, rounding)
    scaled = matrix / stddev[..., :, None] / stddev[..., None, :]
    asymmetry = (scaled - scaled.mT).abs()
    if bool((asymmetry > rounding).any()):
        raise InvalidGaussian(
            f"the covariance is not symmetric (entries differ by up to "
            f"{(matrix - matrix.mT).abs().max():.3g}); use (covariance + covariance.mT) / 2"
        )
    if bool((scaled.abs() > 1 + rounding).any()):
        raise InvalidGaussian(
            "the covariance is not positive semi-definite: an entry exceeds the product of its two "
            "standard deviations"
        )
    scaled.diagonal(dim1=-2, dim2=-1).add_(lost)
    size = matrix.shape[-1]
    small = size <= ALWAYS_EXACT or matrix.numel() * size <= EXACT_CHECK**3
    lowest = torch.linalg.eigvalsh(scaled)[..., 0] if small else _lowest_quotient(scaled)
    if bool((lowest < -rounding * size).any()):
        raise InvalidGaussian(
            "the covariance is not positive semi-definite (an eigenvalue of its correlations is "
            f"{'' if small else 'at most '}{lowest.min():.3g})"
        )


def _check_products(covariance: Sharded, variance: Tensor, rounding: float) -> None:
    """What a few products tell, of which all processes see the same: they end in the same way."""
    stddev, lost = (part[..., :, None] for part in _units(variance, rounding))
    probes = _probes(variance)
    products = covariance.products(probes / stddev)
    right, left = (product / stddev + lost * probes for product in products)
    if not (is_finite(right) and is_finite(left)):
        raise InvalidGaussian("the covariance has NaN or infinite entries")
    bound = rounding * covariance.size**0.5
    if bool(((right - left).abs() > bound).any()):
        raise InvalidGaussian("the covariance is not symmetric; distribute a symmetric one")
    lowest = (probes * right).sum(-2).amin(-1)
    if bool((lowest < -rounding * covariance.size).any()):
        raise InvalidGaussian(
            "the covariance is not positive semi-definite (an eigenvalue of its correlations is "
            f"at most {lowest.min():.3g})"
        )


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
