"""The Gaussian that options describe, in the shape and dtype that the model wants."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from covprop.cli import arrays
from covprop.cli.refusals import Refusal, quoted
from covprop.gaussian import Gaussian


@dataclass(frozen=True)
class Input:
    """What was said of the input: names of files, and how to see them."""

    mean: str
    covariance: str | None = None
    stddev: str | None = None
    batch_dims: int = 0
    shape: str | None = None


@dataclass(frozen=True)
class Expected:
    """What a model says of its input; None is any size, and anything if it says nothing."""

    shape: tuple[int | None, ...] | None = None
    dtype: torch.dtype | None = None

    def fits(self, shape: torch.Size) -> bool:
        """Whether it takes input of this shape."""
        return self.shape is None or (
            len(shape) == len(self.shape)
            and all(want in (None, have) for want, have in zip(self.shape, shape, strict=True))
        )

    def check(self, shape: torch.Size) -> None:
        """Refuse a mean of another shape."""
        if self.shape is not None and not self.fits(shape):
            wanted = ", ".join("any" if size is None else str(size) for size in self.shape)
            sizes = [1 if size is None else size for size in self.shape]
            advice = (
                f"give --shape {','.join(map(str, sizes))}"
                if math.prod(sizes) == shape.numel()
                else "export the model with dynamic_shapes if it is to take others"
            )
            raise Refusal(
                f"the model takes input of shape ({wanted}), and the mean has {tuple(shape)}; "
                f"{advice}"
            )


def gaussian(given: Input, expected: Expected) -> Gaussian:
    """Read, check and build."""
    if (given.covariance is None) == (given.stddev is None):
        raise Refusal("give the noise either as --covariance FILE or as --stddev NUMBER|FILE")
    mean = _mean(given, expected)
    if not mean.numel():
        raise Refusal(f"{given.mean} is empty: it has shape {tuple(mean.shape)}")
    if not 0 <= given.batch_dims <= mean.dim():
        raise Refusal(
            f"a mean of shape {tuple(mean.shape)} cannot have {given.batch_dims} batch dimensions"
        )
    expected.check(mean.shape)
    dtype = expected.dtype or mean.dtype
    mean = _converted(mean, dtype, given.mean)
    if given.covariance is not None:
        return _correlated(given.covariance, mean, given.batch_dims)
    assert given.stddev is not None
    stddev = _stddev(given.stddev, mean, given.batch_dims)
    return Gaussian.diagonal(mean, stddev.square(), given.batch_dims)


def _mean(given: Input, expected: Expected) -> Tensor:
    values = arrays.load(given.mean)
    wants_table = expected.shape is not None and len(expected.shape) == arrays.MATRIX
    if not given.batch_dims and not wants_table:
        values = _vector(given.mean, values)
    if given.shape is None:
        return values
    shape = _shape(given.shape)
    if math.prod(shape) != values.numel():
        raise Refusal(
            f"--shape {given.shape} has {math.prod(shape):,} elements, and {given.mean} "
            f"{values.numel():,}"
        )
    return values.reshape(shape)


def _shape(text: str) -> tuple[int, ...]:
    """`1,8,8`."""
    words = text.replace("x", ",").split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,18}\s*", word) for word in words):
        raise Refusal(f"--shape takes whole numbers such as 1,8,8 and not {quoted(text)}")
    return tuple(int(word) for word in words)


def _vector(name: str, values: Tensor) -> Tensor:
    """A .csv file always has rows and columns; one row or one column is a vector."""
    is_table = Path(name).suffix.lower() == ".csv"
    return values.flatten() if is_table and 1 in values.shape else values


def _converted(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    result = values.to(dtype)
    if not bool(torch.isfinite(result).all()):
        raise Refusal(f"{name} has numbers that are too large for {dtype}, the model's dtype")
    return result


def _stddev(text: str, mean: Tensor, batch_dims: int) -> Tensor:
    """One for all, one for each element of an event, or one for each element of the mean."""
    number = _number(text)
    event = mean.shape[batch_dims:]
    values = torch.tensor(number, dtype=torch.float64) if number is not None else _vector(
        text, arrays.load(text)
    )  # fmt: skip
    if values.dim() == 1 and values.numel() == event.numel():
        values = values.reshape(event)
    if values.shape not in (torch.Size(()), event, mean.shape):
        raise Refusal(
            f"{text} has shape {tuple(values.shape)}; standard deviations are one number, or have "
            f"the shape {tuple(event)} of the input"
        )
    if bool((values < 0).any()):
        raise Refusal(f"--stddev {text}: a standard deviation cannot be negative")
    stddev = _converted(values, mean.dtype, f"--stddev {text}")
    return stddev.expand(mean.shape)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        raise Refusal(f"--stddev takes a finite number or a file, and not {quoted(text)}")
    return number


def _correlated(name: str, mean: Tensor, batch_dims: int) -> Gaussian:
    """One covariance for every Gaussian of the batch, or one for each."""
    matrix = arrays.load(name)
    shape = tuple(matrix.shape)
    if matrix.dim() < arrays.MATRIX or shape[-1] != shape[-2]:
        raise Refusal(
            f"{name} has shape {shape}, and a covariance (n, n); give standard deviations with "
            "--stddev"
        )
    batch, size = mean.shape[:batch_dims], mean.shape[batch_dims:].numel()
    if shape[:-2] not in ((), tuple(batch)) or shape[-1] != size:
        wanted = f"({size}, {size})" + (f" or {(*batch, size, size)}" if batch_dims else "")
        raise Refusal(
            f"{name} has shape {shape}, and the mean has shape {tuple(mean.shape)} with "
            f"{batch_dims} batch dimensions, so the covariance has {wanted}"
        )
    matrix = _converted(matrix, mean.dtype, name)
    if matrix.dim() == arrays.MATRIX and batch_dims:
        Gaussian(mean[(0,) * batch_dims], matrix)  # checked once, not for each
        return Gaussian(mean, matrix.expand(*batch, size, size), validate_args=False)
    return Gaussian(mean, matrix)
