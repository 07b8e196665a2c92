"""Numbers with their uncertainty."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from covprop.bayes.estimators import settings
from covprop.bayes.estimators.base import BayesEstimator
from covprop.bayes.estimators.scaling import Floats, Scaling, array
from covprop.bayes.evaluation import lead_of, log_predictive, slices
from covprop.bayes.likelihoods import (
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Likelihood,
    Poisson,
)
from covprop.bayes.prediction import predict
from covprop.bayes.sampling import LocalReparametrisation, draws
from covprop.bayes.training import History
from covprop.errors import warn_user

HALVINGS = 64
"""Steps of a bisection: 1420 / 2^64 is below the rounding of standardised targets."""
Noise: TypeAlias = HeteroskedasticGaussian | HomoskedasticGaussian
Cumulative: TypeAlias = Callable[[Tensor], Tensor]


@final
class BayesRegressor(RegressorMixin, BayesEstimator):
    """Regression with a Bayesian network, trained without sampling.

    hidden: widths of hidden layers; activation: a name (`relu`, `gelu`, `tanh` ...);
    likelihood: `heteroskedastic` (default: the noise depends on the features), `homoskedastic`,
    `poisson` for counts, or an object, whose noise is in units of y;
    prior: `he`, `wide-he`, `xavier`, `fixed`, `mixture`, `empirical-bayes`, or an object;
    method: `exact`, `series`, `dvi`, `ddvi`, `mcvi`, or an object such as `cp.Series(order=2)`;
    input_noise: standard deviation of a sensor's noise on the features, in their units: a number,
    one for each, or a covariance matrix, in training and prediction;
    cooldown: the share of the steps of all epochs, at the end, in which the learning rate falls to
    zero (early stopping may end before);
    early_stopping: hold out `validation_fraction` of the rows, end when their density has not
    improved for `patience` epochs, and restore the best epoch;
    verbose: show a bar.

    Features and targets are standardised inside. y may have several columns.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "BayesRegressor":
        """Train on features (rows, features) and targets (rows,) or (rows, targets)."""
        x, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        y = np.asarray(y, dtype=np.float64)
        self.flat_ = y.ndim == 1
        y = y.reshape(len(x), -1)
        rows, weight = self._begin(x, sample_weight)
        x, y = x[rows], y[rows]
        likelihood = self._own_likelihood(settings.NOISES, "heteroskedastic")
        counts = isinstance(likelihood, Poisson)
        if counts and ((y < 0) | (y != np.round(y))).any():
            raise ValueError("counts are whole numbers from 0, and y has others")
        self.targets_ = Scaling.none(y.shape[1]) if counts else Scaling.of(y, weight)
        if isinstance(likelihood, HomoskedasticGaussian) and not list(likelihood.parameters()):
            # The noise is given, so that targets which do not vary have one as well.
            self.targets_ = Scaling(self.targets_.mean, self.targets_.unit)
        self.likelihood_ = self._in_units(likelihood)
        constant = np.flatnonzero(self.targets_.stddev == 0)
        if len(constant):
            which = "y" if self.flat_ else f"y in columns {constant.tolist()}"
            warn_user(
                f"{which} is the same for all rows: it is predicted with a standard deviation of "
                "0, since nothing can be learned of its noise",
            )
        targets = torch.as_tensor(self.targets_.apply(y)).to(settings.torch_dtype(self.dtype))
        self._train(x, targets, weight)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means of the targets, and their standard deviations with noise and all."""
        found = self._moments(self._inputs(self._features(X)))
        mean = self._original(found.mean)
        if not return_std:
            return mean
        return mean, self._shaped(self.targets_.spread(array(found.stddev)))

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Floats, Floats]:
        """Bounds of the central interval that holds each target with this probability.

        From the predictive distribution itself, which has heavier tails than the Gaussian of its
        variance where the size of the noise is not known.
        """
        if not 0 < level < 1:
            raise ValueError(f"the level of an interval is between 0 and 1, not {level}")
        bounds = [
            [_quantile(below, centre, share) for share in ((1 - level) / 2, (1 + level) / 2)]
            for _, below, centre in self._distributions(X, "an interval")
        ]
        lower, upper = (torch.cat(parts) for parts in zip(*bounds, strict=True))
        return self._original(lower), self._original(upper)

    def cumulative(self, X: Any, y: Any) -> Floats:
        """P(T <= y) of each target: uniform over [0, 1] if predictions are calibrated."""
        check_is_fitted(self)
        target = torch.as_tensor(self.targets_.apply(self._columns(y)))
        parts = [
            below(target[rows].to(centre))
            for rows, below, centre in self._distributions(X, "a cumulative probability")
        ]
        certain, given = self.targets_.stddev == 0, self._columns(y)
        below = np.where(certain, given >= self.targets_.mean, array(torch.cat(parts)))
        return self._shaped(below)

    def log_predictive(self, X: Any, y: Any) -> Floats:
        """The logarithm of the density that was predicted where each target is (rows,)."""
        inputs = self._inputs(self._features(X))
        target = torch.as_tensor(self.targets_.apply(self._columns(y))).to(self.device)
        inside = log_predictive(self.network_, self.likelihood_, inputs, target, self._inference())
        density = array(inside) - np.log(self.targets_.unit).sum()
        certain = self.targets_.stddev == 0
        if not certain.any():
            return density
        right = (self._columns(y) == self.targets_.mean)[:, certain].all(1)
        return np.where(right, np.inf, -np.inf)

    @torch.no_grad()
    def _distributions(self, X: Any, what: str) -> Iterator[tuple[slice, Cumulative, Tensor]]:
        """Some rows at a time, P(T <= t) of their standardised targets, and E[T]."""
        likelihood = self._gaussian(what)
        inputs, method = self._inputs(self._features(X)), self._inference()
        for rows in slices(lead_of(inputs, 1)):
            if isinstance(method, LocalReparametrisation):
                values = draws(self.network_, inputs[rows], method.samples, method.generator)
                below, found = (
                    partial(likelihood.cumulative_draws, values),
                    likelihood.predict_draws(values),
                )
            else:
                output = predict(self.network_, inputs[rows], method)
                below, found = partial(likelihood.cumulative, output), likelihood.predict(output)
            yield rows, below, found.mean

    def _gaussian(self, what: str) -> Noise:
        check_is_fitted(self)
        if isinstance(self.likelihood_, HeteroskedasticGaussian | HomoskedasticGaussian):
            return self.likelihood_
        raise ValueError(
            f"{what} is found for Gaussian noise, not {type(self.likelihood_).__name__}"
        )

    def _in_units(self, likelihood: Likelihood) -> Likelihood:
        """Noise that the user gave in units of y, in those of standardised targets."""
        if not isinstance(likelihood, HomoskedasticGaussian) or isinstance(self.likelihood, str):
            return likelihood
        scale = torch.as_tensor(self.targets_.unit)
        stddev = (likelihood.log_variance.detach() / 2).exp() / scale
        learned = isinstance(likelihood.log_variance, torch.nn.Parameter)
        return HomoskedasticGaussian(stddev, learned=learned)

    def _columns(self, y: Any) -> Floats:
        values = np.asarray(y, dtype=np.float64)
        wanted = 1 if self.flat_ else 2
        if values.ndim != wanted:
            raise ValueError(f"y had {wanted} dimensions in fit, and has {values.ndim} here")
        if np.isnan(values).any():
            raise ValueError("y contains NaN; leave those rows out")
        return values.reshape(len(values), -1)

    def _original(self, inside: Tensor) -> Floats:
        return self._shaped(self.targets_.mean + self.targets_.stddev * array(inside))

    def _shaped(self, values: Floats) -> Floats:
        return values[:, 0] if self.flat_ else values

    def _outputs(self) -> int:
        return self.likelihood_.outputs(len(self.targets_.mean))

    def _facts(self) -> dict[str, Any]:
        return {"flat": self.flat_}

    def _recall(self, facts: dict[str, Any]) -> None:
        self.flat_ = bool(facts["flat"])
        self.history_ = History()
        likelihood = self._own_likelihood(settings.NOISES, "heteroskedastic")
        self.likelihood_ = self._in_units(likelihood)
        if isinstance(likelihood, HomoskedasticGaussian):
            self.likelihood_.to(settings.torch_dtype(self.dtype))  # type: ignore[attr-defined]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


@torch.no_grad()
def _quantile(below: Cumulative, centre: Tensor, share: float) -> Tensor:
    """Where the cumulative probability of each target reaches a share, by bisection.

    In units of asinh of the distance from the mean: variances of noise of unknown size may be
    beyond all numbers where the quantiles are not.
    """
    far = torch.full_like(centre, math.asinh(torch.finfo(centre.dtype).max))
    low, high = -far, far
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        under = below(centre + torch.sinh(middle)) < share
        low, high = torch.where(under, middle, low), torch.where(under, high, middle)
    return centre + torch.sinh((low + high) / 2)
