"""What a network with random weights predicts, and what its uncertainty comes from."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from covprop.bayes.likelihoods import Likelihood, Prediction
from covprop.bayes.sampling import LocalReparametrisation, batch_dims, draws
from covprop.bayes.weights import Weights
from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods import Exact, Method
from covprop.propagate import propagate_undoubted

EXACT = Exact()


def predict(
    model: nn.Module, x: Tensor | Gaussian, method: Method | LocalReparametrisation = EXACT
) -> Gaussian:
    """The mean and covariance of a network's output, for random weights and any input.

    x: a tensor (batch, ...) that is known, or a Gaussian of batch shape (batch,) that is not; with
    members both lead with them. method: `cp.Exact()`, `cp.Series()`, `cp.Wu2019()` (DVI),
    `cp.AssumedDensity()` (dDVI), `bayes.LocalReparametrisation()` (MCVI), or any other.
    """
    dims = batch_dims(model, x)
    if isinstance(method, LocalReparametrisation):
        return method.moments(draws(model, x, method.samples, method.generator), dims)
    given = x if isinstance(x, Gaussian) else Gaussian.constant(x, dims)
    result = propagate_undoubted(model, (given,), {}, method)  # training may mean its dropout
    if not isinstance(result, Gaussian):
        raise UnsupportedOperation(
            f"predict is for models that return one tensor, and this one returns a "
            f"{type(result).__name__}; use cp.propagate"
        )
    return result


def kl(model: nn.Module) -> Tensor:
    """The divergence of all weights from their priors: one number, or (members,)."""
    parts = [layer.divergence() for layer in model.modules() if isinstance(layer, Weights)]
    if not parts:
        raise ValueError(
            "the model has no Bayesian layers, so there is no divergence; make some with "
            "bayes.to_bayesian(model)"
        )
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def predict_some(
    model: nn.Module,
    likelihood: Likelihood,
    x: Tensor | Gaussian,
    method: Method | LocalReparametrisation = EXACT,
) -> Prediction:
    """Mean and variances of the target, from moments or from draws, of all rows together."""
    if isinstance(method, LocalReparametrisation):
        method.check_spread()
        values = draws(model, x, method.samples, method.generator)
        return likelihood.predict_draws(values)
    return likelihood.predict(predict(model, x, method))


@final
@dataclass(frozen=True)
class Decomposition:
    """Variances of the target, in its shape; their sum is the variance of the prediction.

    aleatoric: the noise of the likelihood; epistemic: what random weights do at the mean of the
    input; input: what the uncertainty of the input adds to that, alone and together with the
    weights. It is zero for a known input, and can be negative where the network is much flatter
    away from the mean of the input than at it.
    """

    aleatoric: Tensor
    epistemic: Tensor
    input: Tensor

    @classmethod
    def of(cls, whole: Prediction, known: Prediction) -> "Decomposition":
        """From the prediction, and the one for the input at its mean."""
        added = whole.epistemic - known.epistemic
        added = torch.where(whole.epistemic == known.epistemic, 0, added)  # also where infinite
        return cls(whole.aleatoric, known.epistemic, added)

    @property
    def total(self) -> Tensor:
        """The variance of the prediction."""
        return self.aleatoric + self.epistemic + self.input


def decompose(
    model: nn.Module,
    x: Tensor | Gaussian,
    likelihood: Likelihood | None = None,
    method: Method | LocalReparametrisation = EXACT,
) -> Decomposition:
    """Where the variance of a prediction comes from: noise, weights, input.

    With T the variance of what is expected of the target (without a likelihood, of the network's
    output) and E the same for the input at its mean, epistemic = E and input = T - E. The noise is
    the likelihood's expected one, zero without a likelihood. With draws T and E are estimates of
    their own, so that a small input part needs many draws.
    """
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"likelihood is an object such as bayes.Poisson(), not {likelihood!r}; a method is "
            "given by name, method=..."
        )

    def found(given: Tensor | Gaussian) -> Prediction:
        if likelihood is not None:
            return predict_some(model, likelihood, given, method)
        output = predict(model, given, method)
        return Prediction(output.mean, torch.zeros_like(output.mean), output.variance)

    whole = found(x)
    return Decomposition.of(whole, found(x.mean) if isinstance(x, Gaussian) else whole)
