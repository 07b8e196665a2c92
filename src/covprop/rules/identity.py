"""Operations that leave the distribution as it is."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.dispatch import Batch, rule
from covprop.tensor import GaussianTensor


@rule(*spellings("clone", "contiguous", "positive"), kind="shape", treatment="exact",
      batch=Batch.ANYWHERE,
      name="clone, contiguous, positive")  # fmt: skip
def copy(function: Callable[..., Any], input: GaussianTensor, **kwargs: Any) -> GaussianTensor:
    """Covariances are never changed in place, so a copy may share them."""
    loc = function(input.loc, **kwargs)
    return input if loc is input.loc else input.moved(loc)


@rule(*spellings("detach"), kind="shape", treatment="exact", name="detach", batch=Batch.ANYWHERE)
def detach(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """Leave autograd's graph with mean and covariance."""
    if not torch.is_grad_enabled():
        return input.moved(input.loc, view=True)
    covariance = input.covariance.map(torch.Tensor.detach)
    result = input.replace(input.loc.detach(), covariance, transfer=torch.Tensor.detach)
    return GaussianTensor(result.loc, result.node, input.lineage, view_of=input)


@rule(Tensor.to, Tensor.type_as, Tensor.float, Tensor.double, Tensor.cpu, Tensor.cuda,
      kind="shape", treatment="exact", name="to, type_as, float, double, cpu, cuda",
      batch=Batch.ANYWHERE)  # fmt: skip
def to(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Change dtype or device of mean and covariance."""
    if not isinstance(x, GaussianTensor):  # tensor.to(x): only x's type matters
        return x.to(args[0].loc, *args[1:], **kwargs)
    others = [other.loc if isinstance(other, GaussianTensor) else other for other in args]
    loc = function(x.loc, *others, **kwargs)
    if loc is x.loc:
        return x
    covariance = x.covariance.map(lambda t: t.to(loc.device))
    return x.replace(loc, covariance, transfer=lambda cross: cross.to(loc))
