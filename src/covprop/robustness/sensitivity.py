"""Which input elements matter: derivatives with respect to the noise of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor

from covprop.covariance import Dense, Diagonal, Zero
from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.propagate import EXACT, propagate
from covprop.robustness.logits import margins
from covprop.robustness.probabilities import misclassification_probability
from covprop.robustness.randomisation import POINTS
from covprop.robustness.sampled import Classifier, Model, refuse_inference_mode

Measure: TypeAlias = Callable[[Gaussian, Tensor], Tensor]
"""A number (*batch,) for every output Gaussian and label; differentiable."""


@final
@dataclass(frozen=True)
class Misclassification:
    """P(another class than the label has the largest logit)."""

    points: int = POINTS
    generator: torch.Generator | None = field(default=None, compare=False)

    def __call__(self, output: Gaussian, label: Tensor) -> Tensor:
        """(*batch,)."""
        found = misclassification_probability(
            output, label, points=self.points, generator=self.generator
        )
        return found.probability


@final
@dataclass(frozen=True)
class ExpectedMargin:
    """min_j E[y_label - y_j]: the expected margin to the nearest rival."""

    def __call__(self, output: Gaussian, label: Tensor) -> Tensor:
        """(*batch,)."""
        return margins(output, label).mean.amin(-1)


@final
@dataclass(frozen=True)
class StandardisedMargin:
    """min_j E[y_label - y_j] / Std[y_label - y_j]; the expected margin where one does not vary.

    For two classes Phi(-margin) is the probability of misclassification; unlike it, the margin has
    a gradient however small that is.
    """

    def __call__(self, output: Gaussian, label: Tensor) -> Tensor:
        """(*batch,)."""
        found = margins(output, label)
        variance = found.variance
        varies = (variance > 0).all(-1, keepdim=True)
        return (found.mean / torch.where(varies, variance, 1).sqrt()).amin(-1)


@final
@dataclass(frozen=True)
class OutputVariance:
    """The variance of one output, by its number in the flattened event, or of all together."""

    output: int | None = None

    def __call__(self, output: Gaussian, label: Tensor) -> Tensor:
        """(*batch,); the label does not matter."""
        del label
        variance = output.covariance.diagonal()
        return variance.sum(-1) if self.output is None else variance[..., self.output]


def sensitivity(
    model: Model,
    x: Gaussian,
    label: int | Tensor | None = None,
    of: Measure | None = None,
    *,
    method: Method = EXACT,
) -> Tensor:
    """d(measure) / d(variance of each input element), in the shape of the input's mean.

    From one gradient through `cp.propagate` (Bibi et al. 2018). Variances, not standard
    deviations: that derivative is finite at zero noise, and times 2 sigma it is that with respect
    to the standard deviation sigma. Of a dense covariance the diagonal changes, all else stays.

    label: a class number or one for each of the batch, the network's own decision by default; of:
    `Misclassification()` by default, `ExpectedMargin()`, `StandardisedMargin()`,
    `OutputVariance()`, or any differentiable function of the output and the label.
    """
    refuse_inference_mode("sensitivity")
    if label is None:
        chosen = torch.zeros(x.batch_shape, dtype=torch.long, device=x.device)
        if not isinstance(of, OutputVariance):
            chosen = Classifier(model, x).decision()
    else:
        chosen = torch.as_tensor(label, device=x.device).expand(x.batch_shape)
    measure = Misclassification() if of is None else of
    with torch.enable_grad():
        variance, noisy = _with_variance(x.detach())
        output = propagate(model, noisy, method=method)
        if not isinstance(output, Gaussian):
            raise TypeError(
                f"a sensitivity takes a model that returns one tensor, and this one returns a "
                f"{type(output).__name__}; wrap it in a function that picks one"
            )
        value = measure(output, chosen)
        if not value.requires_grad:
            raise UnsupportedOperation(
                f"cp.{type(method).__name__} gives no gradients of this model with respect to its "
                "input's variances; use cp.Exact() or cp.Series(order=4)"
            )
        (gradient,) = torch.autograd.grad(value.sum(), variance)
    return gradient.reshape(x.mean.shape)


def _with_variance(x: Gaussian) -> tuple[Tensor, Gaussian]:
    """Variances (*batch, n) that ask for a gradient, and the same Gaussian made with them."""
    if isinstance(x.covariance, Diagonal | Zero):
        variance = x.covariance.diagonal().clone().requires_grad_()
        return variance, Gaussian(x.mean, Diagonal(variance), validate_args=False)
    matrix = x.covariance_matrix
    variance = matrix.diagonal(dim1=-2, dim2=-1).clone().requires_grad_()
    dense = torch.diagonal_scatter(matrix, variance, dim1=-2, dim2=-1)
    return variance, Gaussian(x.mean, Dense(dense), validate_args=False)
