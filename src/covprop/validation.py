"""Whether a mean and a covariance describe a Gaussian: checked when it is built, trusted inside."""

import math

import torch
from torch import Tensor

from covprop.covariance import Covariance
from covprop.covariance.base import is_finite
from covprop.covariance.sharded import is_distributed
from covprop.errors import InvalidGaussian
from covprop.kernels.rounding import NEGATIVE_VARIANCE

SUPPORTED = (torch.float32, torch.float64)


def unsupported_dtype(tensor: Tensor) -> str:
    """The sentence for an operation that gives another dtype, often because of autocast."""
    advice = "convert model and Gaussian with .float() or .double()"
    if torch.is_autocast_enabled(tensor.device.type):
        advice = "leave torch.autocast out, or disable it with torch.autocast(..., enabled=False)"
    return (
        f"covprop computes in float32 or float64, and this operation gives {tensor.dtype}; {advice}"
    )


def check_tensors(mean: object, covariance: object, name: str = "covariance") -> None:
    """Types, dtypes and devices of a mean and something else of this name."""
    if not isinstance(mean, Tensor):
        raise InvalidGaussian(
            f"the mean must be a tensor, not {type(mean).__name__}; make one in the model's dtype, "
            "as with torch.as_tensor(mean, dtype=torch.float32)"
        )
    if is_distributed(mean):
        raise InvalidGaussian("the mean is whole on every process; use mean.full_tensor()")
    if not isinstance(covariance, Tensor | Covariance):
        raise InvalidGaussian(
            f"the {name} must be a tensor or a Covariance, not {type(covariance).__name__}"
        )
    for what, dtype in (("mean", mean.dtype), (name, covariance.dtype)):
        if dtype not in SUPPORTED:
            raise InvalidGaussian(
                f"the {what} has dtype {dtype}; covprop computes in float32 or float64, so convert "
                "it with .float() or .double()"
            )
    if mean.dtype != covariance.dtype:
        raise InvalidGaussian(
            f"the mean has dtype {mean.dtype} and the {name} {covariance.dtype}; convert one to "
            "the model's dtype, as with mean.to(torch.float32)"
        )
    if mean.device != covariance.device:
        raise InvalidGaussian(
            f"the mean is on {mean.device} and the {name} on {covariance.device}; move one"
        )


def given_variance(mean: Tensor, stddev: object, variance: object) -> Tensor:
    """Variances in the dtype of a mean, from whichever of the two is given."""
    if (stddev is None) == (variance is None):
        raise InvalidGaussian(
            f"give the noise as stddev=... or as variance=..., "
            f"{'one of them' if stddev is None else 'not both'}"
        )
    if stddev is None:
        return torch.as_tensor(variance, dtype=mean.dtype, device=mean.device)
    width = torch.as_tensor(stddev, dtype=mean.dtype, device=mean.device)
    if bool((width < 0).any()):
        raise InvalidGaussian("a standard deviation cannot be negative")
    return width.square()


def checked_variances(mean: Tensor, stddev: object, variance: object) -> Tensor:
    """Variances of each element, in the shape of the mean."""
    for name, given in (("standard deviations", stddev), ("variances", variance)):
        if given is None:
            continue
        if not isinstance(given, Tensor):
            raise InvalidGaussian(
                f"{name} are a tensor in the shape of the mean, not {type(given).__name__}; for "
                "one number use cp.Gaussian.isotropic"
            )
        check_tensors(mean, given, name)
        if given.shape != mean.shape:
            raise InvalidGaussian(
                f"{name} have the shape of the mean {tuple(mean.shape)}, not {tuple(given.shape)}"
            )
    return given_variance(mean, stddev, variance)


def check_isotropic(mean: Tensor, variance: Tensor, batch_dims: int) -> None:
    """One number for all, or one for each Gaussian of the batch."""
    shape, batch = tuple(variance.shape), tuple(mean.shape[:batch_dims])
    if variance.dim() > batch_dims:
        raise InvalidGaussian(
            f"noise of shape {shape} is more than one number for each of {batch_dims} batch "
            "dimensions; use cp.Gaussian.diagonal(mean, stddev=...)"
        )
    if variance.dim() and shape != batch:
        raise InvalidGaussian(
            f"the batch has shape {batch} and the noise {shape}; give one number, or one for each "
            "Gaussian of the batch"
        )


def observation_noise(
    mean: Tensor, count: int, stddev: object, variance: object, covariance: Tensor | None
) -> Tensor | None:
    """The covariance (count, count) of the error of an observation, of those given; None if none.

    mean: of what is observed, whose dtype and device it has.
    """
    given = [value is not None for value in (stddev, variance, covariance)]
    if not any(given):
        return None
    if sum(given) > 1:
        raise InvalidGaussian(
            "give the noise of an observation as stddev=, variance= or covariance=, one of them"
        )
    if covariance is None:
        error = given_variance(mean, stddev, variance)
        if tuple(error.shape) not in ((), (count,)):
            raise InvalidGaussian(
                f"{count} elements are observed, so their noise is one number or has the shape "
                f"({count},), not {tuple(error.shape)}"
            )
        error = torch.diag_embed(error.expand(count))
    else:
        error = torch.as_tensor(covariance, dtype=mean.dtype, device=mean.device)
        if tuple(error.shape[-2:]) != (count, count):
            raise InvalidGaussian(
                f"{count} elements are observed, so the covariance of their noise has the shape "
                f"({count}, {count}), not {tuple(error.shape)}"
            )
    if not is_finite(error):
        raise InvalidGaussian("the noise of an observation has NaN or infinite entries")
    if bool((error.diagonal(dim1=-2, dim2=-1) < 0).any()):
        raise InvalidGaussian("the noise of an observation has a negative variance")
    return error


def checked_observation(value: object, mean: Tensor) -> Tensor:
    """What was observed of elements with a mean (*batch, m), as a tensor of its kind."""
    observed = torch.as_tensor(value, dtype=mean.dtype, device=mean.device)
    try:
        fits = torch.broadcast_shapes(observed.shape, mean.shape) == mean.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InvalidGaussian(
            f"{mean.shape[-1]} elements are observed, so the value has the shape "
            f"{tuple(mean.shape)}, or broadcasts to it, and not {tuple(observed.shape)}"
        )
    if not is_finite(observed):
        raise InvalidGaussian("the observed value has NaN or infinite entries")
    return observed


def check_shapes(mean: Tensor, covariance: Covariance) -> None:
    """The batch of the covariance leads the mean, and the rest has n elements."""
    if (flaw := covariance.shape_flaw()) is not None:
        raise InvalidGaussian(flaw)
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


def check_moments(mean: Tensor, covariance: Covariance) -> None:
    """Types and shapes of a mean and a covariance structure."""
    check_tensors(mean, covariance)
    check_shapes(mean, covariance)


def check_batch_dims(mean: Tensor, batch_dims: int) -> None:
    """Leading dimensions of the mean."""
    if not 0 <= batch_dims <= mean.dim():
        raise InvalidGaussian(
            f"a mean of {mean.dim()} dimensions cannot have {batch_dims} batch dimensions"
        )


def check_batch_index(index: object, batch_shape: torch.Size) -> None:
    """An index of the batch alone: the event is whole in every element of it."""
    used = index if isinstance(index, tuple) else (index,)
    if any(item is Ellipsis or item is None for item in used):
        raise IndexError("index the batch with integers, slices or tensors")
    masks = [item for item in used if isinstance(item, Tensor) and item.dtype == torch.bool]
    count = len(used) - len(masks) + sum(mask.dim() for mask in masks)
    if count > len(batch_shape):
        raise IndexError(
            f"{count} indices for a batch of shape {tuple(batch_shape)}; the event is not indexed: "
            "select its elements with cp.propagate(lambda x: x[...], gaussian)"
        )


def check_low_rank(mean: object, factor: object, batch_dims: int) -> None:
    """A factor has the shape of the mean and one dimension more."""
    check_tensors(mean, factor, "factor")
    assert isinstance(mean, Tensor)
    assert isinstance(factor, Tensor)
    check_batch_dims(mean, batch_dims)
    if factor.shape[:-1] != mean.shape:
        raise InvalidGaussian(
            f"a factor has the shape of the mean {tuple(mean.shape)} and a last dimension for its "
            f"columns, not {tuple(factor.shape)}; expand it over the batch with .expand"
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
