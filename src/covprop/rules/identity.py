"""Operations that leave the distribution as it is."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.dispatch import rule
from covprop.errors import UnsupportedOperation
from covprop.tensor import GaussianTensor


@rule(*spellings("clone", "contiguous", "positive"), kind="shape", treatment="exact",
      name="clone, contiguous, positive")  # fmt: skip
def copy(function: Callable[..., Any], input: GaussianTensor, **kwargs: Any) -> GaussianTensor:
    """Covariances are never changed in place, so a copy may share them."""
    loc = function(input.loc, **kwargs)
    return input if loc is input.loc else input.replace(loc, input.covariance)


@rule(*spellings("detach"), kind="shape", treatment="exact", name="detach")
def detach(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """Leave autograd's graph with mean and covariance."""
    covariance = input.covariance.map(torch.Tensor.detach)
    return GaussianTensor(input.loc.detach(), covariance, input.method, view_of=input)


@rule(Tensor.to, Tensor.type_as, Tensor.float, Tensor.double, Tensor.cpu, Tensor.cuda,
      kind="shape", treatment="exact", name="to, type_as, float, double, cpu, cuda")  # fmt: skip
def to(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Change dtype or device of mean and covariance."""
    if not isinstance(x, GaussianTensor):  # tensor.to(x): only x's type matters
        return x.to(args[0].loc, *args[1:], **kwargs)
    others = [other.loc if isinstance(other, GaussianTensor) else other for other in args]
    loc = function(x.loc, *others, **kwargs)
    if loc is x.loc:
        return x
    return x.replace(loc, x.covariance.map(lambda t: t.to(loc.device)))


@rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
      torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
      kind="shape", treatment="exact (evaluation mode)", name="dropout")  # fmt: skip
def dropout(
    function: Callable[..., Any],
    input: GaussianTensor,
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
    return input
