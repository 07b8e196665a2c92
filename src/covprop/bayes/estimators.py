"""scikit-learn's estimators on Bayesian networks (extra `bayes`): a regressor and a classifier."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from covprop.bayes import estimator_settings as settings
from covprop.bayes.discrete_likelihoods import Bernoulli, Poisson
from covprop.bayes.estimator_base import BayesEstimator
from covprop.bayes.estimator_settings import Floats, Scaling, array
from covprop.bayes.gaussian_likelihoods import GaussianNoise, HomoskedasticGaussian
from covprop.bayes.likelihoods import Likelihood
from covprop.bayes.prediction import (
    LocalReparametrisation,
    chunks,
    draws,
    log_predictive,
    predict,
)
from covprop.errors import warn_user

HALVINGS = 64
"""Steps of a bisection: 1420 / 2^64 is below the rounding of standardised targets."""
TWO = 2
"""Classes that one logit separates."""
LABELS = (bool, int, float, str)
"""Types of class labels that a file can hold."""
Cumulative: TypeAlias = Callable[[Tensor], Tensor]


@final
class BayesRegressor(RegressorMixin, BayesEstimator):
    """Regression with a Bayesian network, trained without sampling.

    Features and targets are standardised inside. y may have several columns.

    Args:
        hidden: Widths of hidden layers.
        activation: `relu`, `leaky_relu`, `elu`, `gelu`, `silu`, `softplus`, `sigmoid` or `tanh`.
        likelihood: `heteroskedastic` (default: the noise depends on the features),
            `homoskedastic`, `poisson` for counts, or an object, whose noise is in units of y.
        prior: `he`, `wide-he`, `xavier`, `fixed`, `mixture`, `empirical-bayes`, or an object.
        method: `gaussian-layers` (also `exact`), `series`, `dvi`, `ddvi`, `mcvi`, or an object
            such as `cp.Series(order=2)`.
        input_noise: Sensor noise on the features, in their units, for training and prediction: a
            standard deviation, one for each feature, or a covariance matrix.
        learning_rate: The learning rate of AdamW.
        epochs: The number of passes over the rows.
        batch_size: The number of rows in a step.
        weight_decay: The weight decay of AdamW.
        cooldown: The last part of all steps, in which the learning rate falls to zero (early
            stopping may end before).
        early_stopping: Hold out `validation_fraction` of the rows, stop when their density has not
            improved for `patience` epochs, and restore the best epoch.
        validation_fraction: The fraction of rows to hold out.
        patience: Epochs without improvement before the training ends.
        random_state: A seed, or a NumPy generator.
        device: The device of the network.
        dtype: `float64` or `float32`.
        verbose: Whether to show a progress bar.

    Example:
        X = np.random.default_rng(0).normal(size=(40, 2))
        model = bayes.BayesRegressor(epochs=5, random_state=0).fit(X, X.sum(1))
        mean, stddev = model.predict(X, return_std=True)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "BayesRegressor":
        """Train the network.

        Args:
            X: Features (rows, features).
            y: Targets (rows,) or (rows, targets).
            sample_weight: Weights of the rows (rows,); all the same by default.
        """
        x, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        y = np.asarray(y, dtype=np.float64)
        self.flat_ = y.ndim == 1
        y = y.reshape(len(x), -1)
        rows, weight = self._prepare(x, sample_weight)
        x, y = x[rows], y[rows]
        likelihood = self._new_likelihood(settings.REGRESSION, "heteroskedastic")
        counts = isinstance(likelihood, Poisson)
        if counts and ((y < 0) | (y != np.round(y))).any():
            raise ValueError("counts are whole numbers from 0, and y has others")
        self.targets_ = Scaling.identity(y.shape[1]) if counts else Scaling.of(y, weight)
        if isinstance(likelihood, HomoskedasticGaussian) and not list(likelihood.parameters()):
            # The noise is fixed, so that targets which do not vary have one as well.
            self.targets_ = Scaling(self.targets_.mean, self.targets_.unit)
        self.likelihood_ = self._standardised(likelihood)
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
        """Return means of the targets, and their standard deviations, noise included.

        Args:
            X: Features (rows, features).
            return_std: Whether to return the standard deviations as well.

        Returns:
            An array in the shape of the targets, or two of them.
        """
        prediction = self._moments(self._inputs(self._features(X)))
        mean = self._original(prediction.mean)
        if not return_std:
            return mean
        return mean, self._shaped(self.targets_.spread(array(prediction.stddev)))

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Floats, Floats]:
        """Return bounds of the central interval that holds each target with this probability.

        It uses the predictive distribution itself. If the size of the noise is uncertain, that has
        heavier tails than a Gaussian with the same variance.

        Args:
            X: Features (rows, features).
            level: The probability of the interval, between 0 and 1.

        Returns:
            The lower and the upper ends, in the shape of the targets.

        Example:
            X = np.random.default_rng(0).normal(size=(40, 2))
            model = bayes.BayesRegressor(epochs=5, random_state=0).fit(X, X.sum(1))
            lower, upper = model.predict_interval(X, level=0.9)
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
        """Return P(T <= y) of each target: uniform over [0, 1] if predictions are calibrated.

        Args:
            X: Features (rows, features).
            y: The observed targets.
        """
        check_is_fitted(self)
        y = self._columns(y)
        target = torch.as_tensor(self.targets_.apply(y))
        parts = [
            below(target[rows].to(centre))
            for rows, below, centre in self._distributions(X, "a cumulative probability")
        ]
        constant = self.targets_.stddev == 0
        return self._shaped(np.where(constant, y >= self.targets_.mean, array(torch.cat(parts))))

    def log_predictive(self, X: Any, y: Any) -> Floats:
        """Return the logarithm of the predicted density at each target, (rows,).

        Args:
            X: Features (rows, features).
            y: The observed targets.
        """
        inputs, y = self._inputs(self._features(X)), self._columns(y)
        target = torch.as_tensor(self.targets_.apply(y)).to(self.device)
        inside = log_predictive(self.network_, self.likelihood_, inputs, target, self._inference())
        constant = self.targets_.stddev == 0
        if constant.any():
            return np.where((y == self.targets_.mean)[:, constant].all(1), np.inf, -np.inf)
        return array(inside) - np.log(self.targets_.unit).sum()

    @torch.no_grad()
    def _distributions(self, X: Any, what: str) -> Iterator[tuple[slice, Cumulative, Tensor]]:
        """Some rows at a time, P(T <= t) of their standardised targets, and E[T]."""
        check_is_fitted(self)
        likelihood = self.likelihood_
        if not isinstance(likelihood, GaussianNoise):
            raise ValueError(f"{what} needs Gaussian noise, not {type(likelihood).__name__}")
        inputs, method = self._inputs(self._features(X)), self._inference()
        for rows, part in chunks(inputs, 1):
            if isinstance(method, LocalReparametrisation):
                values = draws(self.network_, part, method.samples, method.generator)
                below = partial(likelihood.cumulative_draws, values)
                yield rows, below, likelihood.predict_draws(values).mean
            else:
                output = predict(self.network_, part, method)
                below = partial(likelihood.cumulative, output)
                yield rows, below, likelihood.predict(output).mean

    def _standardised(self, likelihood: Likelihood) -> Likelihood:
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

    def _target_metadata(self) -> dict[str, Any]:
        return {"flat": self.flat_}

    def _restore_targets(self, metadata: dict[str, Any]) -> None:
        self.flat_ = bool(metadata["flat"])
        likelihood = self._new_likelihood(settings.REGRESSION, "heteroskedastic")
        self.likelihood_ = self._standardised(likelihood)
        if isinstance(self.likelihood_, HomoskedasticGaussian):
            self.likelihood_.to(settings.torch_dtype(self.dtype))

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


@final
class BayesClassifier(ClassifierMixin, BayesEstimator):
    """Classification with a Bayesian network, trained without sampling.

    Features are standardised inside; labels may be of any kind.

    Args:
        hidden: Widths of hidden layers.
        activation: `relu`, `leaky_relu`, `elu`, `gelu`, `silu`, `softplus`, `sigmoid` or `tanh`.
        likelihood: `bernoulli` (default for two classes), `categorical` (default for more), or an
            object such as `bayes.Categorical(bayes.Delta())`.
        prior: `he`, `wide-he`, `xavier`, `fixed`, `mixture`, `empirical-bayes`, or an object.
        method: `gaussian-layers` (also `exact`), `series`, `dvi`, `ddvi`, `mcvi`, or an object
            such as `cp.Series(order=2)`.
        input_noise: Sensor noise on the features, in their units, for training and prediction: a
            standard deviation, one for each feature, or a covariance matrix.
        learning_rate: The learning rate of AdamW.
        epochs: The number of passes over the rows.
        batch_size: The number of rows in a step.
        weight_decay: The weight decay of AdamW.
        cooldown: The last part of all steps, in which the learning rate falls to zero (early
            stopping may end before).
        early_stopping: Hold out `validation_fraction` of the rows, stop when their density has not
            improved for `patience` epochs, and restore the best epoch.
        validation_fraction: The fraction of rows to hold out.
        patience: Epochs without improvement before the training ends.
        random_state: A seed, or a NumPy generator.
        device: The device of the network.
        dtype: `float64` or `float32`.
        verbose: Whether to show a progress bar.

    Example:
        X = np.random.default_rng(0).normal(size=(40, 2))
        model = bayes.BayesClassifier(epochs=5, random_state=0).fit(X, X.sum(1) > 0)
        model.predict_proba(X), model.mutual_information(X)
    """

    classes_: Any

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "BayesClassifier":
        """Train the network.

        Args:
            X: Features (rows, features).
            y: Labels (rows,), of at least two classes.
            sample_weight: Weights of the rows (rows,); all the same by default.
        """
        x, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        rows, weight = self._prepare(x, sample_weight)
        self.classes_, labels = np.unique(y[rows], return_inverse=True)
        if len(self.classes_) < TWO:
            raise ValueError(
                f"y has one class, {self.classes_.tolist()[0]!r}; a classifier needs at least two"
            )
        self._set_likelihood()
        binary = isinstance(self.likelihood_, Bernoulli)
        kind = settings.torch_dtype(self.dtype) if binary else torch.long
        self._train(x[rows], torch.as_tensor(labels).to(kind), weight, labels)
        return self

    def predict_proba(self, X: Any) -> Floats:
        """Return probabilities (rows, classes), averaged over networks.

        Args:
            X: Features (rows, features).
        """
        mean = array(self._moments(self._inputs(self._features(X))).mean)
        return np.hstack([1 - mean, mean]) if mean.shape[1] == 1 else mean

    def predict(self, X: Any) -> Any:
        """Return the most probable class of each row."""
        best = self.predict_proba(X).argmax(1)  # which checks that there are classes
        return self.classes_[best]

    def predict_log_proba(self, X: Any) -> Floats:
        """Return logarithms of the probabilities."""
        return np.log(self.predict_proba(X))

    def mutual_information(self, X: Any) -> Floats:
        """Return the uncertainty in nats that comes from the weights: large far from the data.

        Args:
            X: Features (rows, features).
        """
        return array(self._moments(self._inputs(self._features(X))).mutual_information)

    def _set_likelihood(self) -> None:
        two = len(self.classes_) == TWO
        default = "bernoulli" if two else "categorical"
        self.likelihood_ = self._new_likelihood(settings.CLASSIFICATION, default)
        if isinstance(self.likelihood_, Bernoulli) and not two:
            raise ValueError(f"bernoulli is for two classes, and y has {len(self.classes_)}")
        self.targets_ = Scaling.identity(1)

    def _outputs(self) -> int:
        classes = len(self.classes_)
        return self.likelihood_.outputs(1 if isinstance(self.likelihood_, Bernoulli) else classes)

    def _target_metadata(self) -> dict[str, Any]:
        labels = self.classes_.tolist()
        if not all(isinstance(label, LABELS) for label in labels):
            raise ValueError("a file cannot hold labels other than numbers and strings; use pickle")
        return {"classes": labels, "dtype": self.classes_.dtype.str}

    def _restore_targets(self, metadata: dict[str, Any]) -> None:
        labels = metadata["classes"]
        if not all(isinstance(label, LABELS) for label in labels) or len(set(labels)) < TWO:
            raise ValueError("its classes are no list of labels")
        self.classes_ = np.array(labels, dtype=np.dtype(metadata["dtype"]))
        self._set_likelihood()
