"""Operations that leave the distribution as it is."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from covprop.activations import spellings
from covprop.dispatch import rule
from covprop.errors import UnsupportedOperation
from covprop.tensor import GaussianTensor


@rule(*spellings("clone", "contiguous"), kind="shape", treatment="exact", name="clone, contiguous")
def copy(function: Callable[..., Any], x: GaussianTensor, **kwargs: Any) -> GaussianTensor:
    """Covariances are never changed in place, so a copy may share them."""
    return x.replace(function(x.loc, **kwargs), x.covariance)


@rule(*spellings("detach"), kind="shape", treatment="exact", name="detach")
def detach(function: Callable[..., Any], x: GaussianTensor) -> GaussianTensor:
    """Leave autograd's graph with mean and covariance."""
    return x.replace(x.loc.detach(), x.covariance.map(torch.Tensor.detach))


@rule(*spellings("to", "type_as", "float", "double", "cpu", "cuda"), kind="shape",
      treatment="exact", name="to, float, double, cpu, cuda")  # fmt: skip
def to(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Change dtype or device of mean and covariance."""
    if not isinstance(x, GaussianTensor):  # tensor.to(x): only x's type matters
        return x.to(args[0].loc, *args[1:], **kwargs)
    others = [other.loc if isinstance(other, GaussianTensor) else other for other in args]
    loc = function(x.loc, *others, **kwargs)
    if not loc.dtype.is_floating_point:
        raise UnsupportedOperation(f"a Gaussian cannot be converted to {loc.dtype}")
    return x.replace(loc, x.covariance.map(lambda t: t.to(loc.dtype).to(loc.device)))


@rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
      torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
      kind="shape", treatment="exact (evaluation mode)", name="dropout")  # fmt: skip
def dropout(
    function: Callable[..., Any],
    x: GaussianTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **kwargs: Any,
) -> GaussianTensor:
    """Nothing in evaluation mode."""
    if kwargs.get("train", training) and p > 0:
        raise UnsupportedOperation(
            "dropout in training mode draws noise of its own; call model.eval() first"
        )
    return x
