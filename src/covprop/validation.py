"""Whether a mean and a covariance describe a Gaussian: checked when it is built, trusted inside."""

import math

import torch
from torch import Tensor

from covprop.covariance import Covariance
from covprop.covariance.sharded import is_distributed
from covprop.errors import InvalidGaussian
from covprop.kernels.normal import is_finite
from covprop.kernels.rounding import NEGATIVE_VARIANCE

SUPPORTED = (torch.float32, torch.float64)


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


def check_skewness(mean: Tensor, skewness: object, values: bool = True) -> None:
    """A tensor like the mean, of finite numbers if values are to be checked."""
    if not isinstance(skewness, Tensor):
        raise InvalidGaussian(f"the skewness must be a tensor, not {type(skewness).__name__}")
    if skewness.shape != mean.shape:
        raise InvalidGaussian(
            f"the skewness has the shape of the mean {tuple(mean.shape)}, not "
            f"{tuple(skewness.shape)}"
        )
    if skewness.dtype != mean.dtype:
        raise InvalidGaussian(
            f"the mean has dtype {mean.dtype} and the skewness {skewness.dtype}; convert one"
        )
    if skewness.device != mean.device:
        raise InvalidGaussian(
            f"the mean is on {mean.device} and the skewness on {skewness.device}; move one"
        )
    if values and not is_finite(skewness):
        raise InvalidGaussian("the skewness has NaN or infinite entries")


@torch.no_grad()
def check_values(mean: Tensor, covariance: Covariance) -> None:
    """Finite, symmetric and positive semi-definite, up to rounding."""
    if not is_finite(mean):
        raise InvalidGaussian("the mean has NaN or infinite entries")
    if covariance.constant:
        return
    variance = covariance.diagonal()
    if not bool(torch.isfinite(variance).all()):
        raise InvalidGaussian("the covariance has NaN or infinite entries")
    if variance.numel() == 0:
        return
    rounding = NEGATIVE_VARIANCE * torch.finfo(mean.dtype).eps
    if bool((variance < -rounding * variance.abs().amax(-1, keepdim=True)).any()):
        raise InvalidGaussian(f"the covariance has a negative variance ({variance.min():.3g})")
    if (flaw := covariance.flaw(rounding)) is not None:
        raise InvalidGaussian(flaw)
