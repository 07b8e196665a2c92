"""Variational inference by sampling (MCVI), to compare with: local reparametrisation."""

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from covprop.bayes.layers import draw, random_linear
from covprop.bayes.weights import Weights
from covprop.covariance.base import symmetric
from covprop.dispatch import Entered
from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian


@final
@dataclass(frozen=True)
class LocalReparametrisation:
    """Draws of the outputs of every layer, of Kingma et al. (2015), in place of their moments.

    samples: how many for every element of the batch; one is enough to train with, a prediction
    takes two. generator: where the randomness of weights and inputs comes from (torch's global one
    by default; dropout has that one always).
    """

    samples: int = 10
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)

    def __post_init__(self) -> None:
        """There is at least one draw."""
        if type(self.samples) is not int or self.samples < 1:
            raise ValueError(f"samples is a whole number from 1, not {self.samples!r}")

    def check_spread(self) -> None:
        """See that the draws have a variance."""
        if self.samples < 2:  # noqa: PLR2004
            raise ValueError(
                "one draw has no variance; it is enough to train with, but predict with "
                "bayes.LocalReparametrisation(samples) of two or more"
            )

    def moments(self, drawn: Tensor, batch_dims: int) -> Gaussian:
        """Mean and unbiased covariance of draws (samples, *batch, *event), differentiable."""
        self.check_spread()
        flat = drawn.flatten(1 + batch_dims) if drawn.dim() > 1 + batch_dims else drawn[..., None]
        mean = flat[0] + (flat - flat[0]).mean(0)  # of equal draws, their value to the last bit
        deviation = (flat - mean).movedim(0, -1)  # (*batch, m, samples)
        covariance = symmetric(deviation @ deviation.mT / (len(drawn) - 1))
        return Gaussian(mean.reshape(drawn.shape[1:]), covariance, validate_args=False, method=self)


class _Drawing(TorchFunctionMode):
    """Gives Bayesian layers a generator, and sees that none is used twice."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.generator = generator
        self.entered = Entered()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is not random_linear:
            return func(*args, **(kwargs or {}))
        self.entered.see(func, args)
        x, _, layer = args
        return draw(x, layer, self.generator)


def draws(
    model: nn.Module,
    x: Tensor | Gaussian,
    samples: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Outputs (samples, *batch, *event) for weights, and inputs, drawn anew for each.

    x: a tensor (batch, ...), or (members, batch, ...) where layers have members, or a Gaussian of
    such a batch. Differentiable with respect to all parameters, and to x.
    """
    dims = batch_dims(model, x)
    given = x if isinstance(x, Gaussian) else Gaussian.constant(x, dims)
    many = given.sample(samples, generator)
    # Samples are more of the batch; members stay in front.
    side = many.movedim(0, dims - 1).flatten(dims - 1, dims)
    with _Drawing(generator):
        result = model(side)
    if not isinstance(result, Tensor):
        raise UnsupportedOperation(
            f"draws are those of one tensor, and the model returns a {type(result).__name__}"
        )
    return result.unflatten(dims - 1, (samples, -1)).movedim(dims - 1, 0)


def batch_dims(model: nn.Module, x: Tensor | Gaussian) -> int:
    """How many dimensions lead the event: the batch, and the members before it."""
    members = {layer.members for layer in model.modules() if isinstance(layer, Weights)}
    if len(members) > 1:
        raise UnsupportedOperation(
            f"the layers of the model have different members: {sorted(map(str, members))}"
        )
    dims = 2 if members and None not in members else 1
    wanted = "(members, batch)" if dims > 1 else "(batch,)"
    if isinstance(x, Gaussian):
        if len(x.batch_shape) != dims:
            raise ValueError(
                f"the Gaussian needs a batch of shape {wanted}, and has {tuple(x.batch_shape)}; "
                "for a single one use its x[None] as the mean of a batch"
            )
    elif not isinstance(x, Tensor):
        raise TypeError(f"x is a tensor or a cp.Gaussian, not {type(x).__name__}")
    elif x.dim() <= dims:
        raise ValueError(f"x has the shape {wanted} and then features, not {tuple(x.shape)}")
    return dims
