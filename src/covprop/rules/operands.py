"""Which argument of a torch function is the Gaussian, and the function of it alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.dispatch import leaves, name_of
from covprop.errors import BatchDimensionError, UnsupportedOperation
from covprop.tensor import GaussianTensor


def the_gaussian(function: Callable[..., Any], args: Any, kwargs: Any) -> GaussianTensor:
    """The one in-flight Gaussian among the arguments."""
    found = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, GaussianTensor)]
    if len(found) > 1:
        raise UnsupportedOperation(
            f"{name_of(function)} joins two tensors that both depend on the input, and covprop "
            "does not carry the dependence between branches yet"
        )
    return found[0]


def substitute(nest: Any, value: Any) -> Any:
    """A copy of the arguments with the in-flight Gaussian replaced by a value."""
    if isinstance(nest, GaussianTensor):
        return value
    if isinstance(nest, list | tuple):
        return type(nest)([substitute(item, value) for item in nest])
    if isinstance(nest, dict):
        return {key: substitute(item, value) for key, item in nest.items()}
    return nest


def of_tensor(function: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[Tensor], Any]:
    """The torch function as a function of what stands where the Gaussian stands."""
    return lambda value: function(*substitute(args, value), **substitute(kwargs, value))


def check_batch_shape(function: Callable[..., Any], x: GaussianTensor, shape: torch.Size) -> None:
    """The batch must lead the result as it leads the argument."""
    if shape[: len(x.batch_shape)] != x.batch_shape:
        raise batch_error(function, x)


def batch_error(function: Callable[..., Any], x: GaussianTensor) -> BatchDimensionError:
    """The error for an operation that mixes, moves or drops the batch."""
    count = len(x.batch_shape)
    which = "the first dimension is" if count == 1 else f"the first {count} dimensions are"
    return BatchDimensionError(
        f"{name_of(function)} mixes, moves or drops the batch of shape {tuple(x.batch_shape)} in a "
        f"tensor of shape {tuple(x.shape)}; {which} the batch, whose Gaussians are separate"
    )
