"""Fitted models of scikit-learn as torch modules, and a regressor that takes noisy features.

Importing this module needs scikit-learn; `cp.from_sklearn` imports it at first use.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeAlias, final

import numpy as np
import torch
from sklearn import linear_model as linear
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone, is_regressor
from sklearn.compose import TransformedTargetRegressor
from sklearn.decomposition import PCA, IncrementalPCA, TruncatedSVD
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    RobustScaler,
    StandardScaler,
)
from sklearn.svm import LinearSVR
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.propagate import propagate

Array: TypeAlias = np.ndarray[Any, Any]
ROWS = 256
"""How many rows are propagated at a time: each has matrices of its own."""


def from_sklearn(estimator: Any) -> nn.Module:
    """Convert a fitted model of scikit-learn to a torch module with the same predictions.

    The module maps features (*batch, features) in float64 to (*batch, outputs): `predict` of a
    regressor, `predict_proba` of a classifier in the order of `classes_`, `transform` of a scaler
    or PCA. Its parameters need no gradients.

    Args:
        estimator: A fitted `MLPRegressor`, `MLPClassifier`, `LogisticRegression`, linear regressor
            (such as `LinearRegression`, `Ridge` and `Lasso`), `StandardScaler`, `MinMaxScaler`,
            `MaxAbsScaler`, `RobustScaler`, `PCA`, `IncrementalPCA` or `TruncatedSVD`; or a
            `Pipeline`, `TransformedTargetRegressor`, `FrozenEstimator`, `GridSearchCV` or
            `RandomizedSearchCV` of these.

    Returns:
        An `nn.Module` in evaluation mode, with copies of the numbers.

    Raises:
        UnsupportedOperation: If a step cannot be converted; the message names it.

    Example:
        from sklearn.linear_model import Ridge
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        X = np.random.default_rng(0).normal(size=(40, 3))
        pipeline = make_pipeline(StandardScaler(), Ridge()).fit(X, X.sum(1))
        noisy = cp.Gaussian.isotropic(torch.as_tensor(X), stddev=0.1, batch_dims=1)
        y = cp.propagate(cp.from_sklearn(pipeline), noisy)
    """
    return _module(estimator, "the estimator").eval().requires_grad_(requires_grad=False)


def _module(estimator: Any, where: str) -> nn.Module:
    """The module of an estimator; where: how messages name it."""
    if type(estimator) not in MODULES:
        raise _unsupported(estimator, where)
    check_is_fitted(estimator)
    return MODULES[type(estimator)](estimator)


def _unsupported(estimator: Any, where: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"{where} is a {type(estimator).__name__}, for which cp.from_sklearn has no module; write "
        "one yourself and join it with the modules of the other steps by nn.Sequential, or draw "
        "inputs and take the mean and the deviation of their predictions"
    )


class _Scaler(nn.Module):
    """(x - center) / scale, element by element, or the inverse, x * scale + center."""

    center: Tensor
    scale: Tensor

    def __init__(self, center: Any, scale: Any, *, inverse: bool = False) -> None:
        super().__init__()
        self.register_buffer("center", _numbers(center))
        self.register_buffer("scale", _numbers(scale))
        self.inverse = inverse

    def forward(self, x: Tensor) -> Tensor:
        features = self.scale.numel()
        if self.scale.dim() and x.shape[-1] != features:  # torch would broadcast
            raise ValueError(f"the model takes {features} features, and x has {x.shape[-1]}")
        if self.inverse:
            return x * self.scale + self.center
        return (x - self.center) / self.scale


class _Elementwise(nn.Module):
    """One torch function of every element."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "softmax": lambda: nn.Softmax(-1),
    "exp": lambda: _Elementwise(torch.exp),
}
"""Those of `MLPRegressor` and `MLPClassifier`, by their names."""


def _numbers(values: Any) -> Tensor:
    """A copy in float64, also of a sparse matrix."""
    dense = values.toarray() if hasattr(values, "toarray") else values
    return torch.as_tensor(np.array(np.asarray(dense), np.float64, order="C"))


def _linear(weight: Any, bias: Any) -> nn.Linear:
    """weight: (outputs, features), or (features,) for one output."""
    rows = torch.atleast_2d(_numbers(weight))
    layer = nn.Linear(rows.shape[1], rows.shape[0], dtype=torch.float64, device="meta")
    layer.weight = nn.Parameter(rows)
    layer.bias = nn.Parameter(_numbers(bias).broadcast_to(len(rows)).clone())
    return layer


def _two_classes() -> nn.Linear:
    """The probability of the second class to those of both."""
    return _linear([[-1.0], [1.0]], [1.0, 0.0])


def _perceptron(estimator: MLPRegressor | MLPClassifier) -> nn.Sequential:
    names = [estimator.activation] * (len(estimator.coefs_) - 1) + [estimator.out_activation_]
    layers: list[nn.Module] = []
    for weight, bias, name in zip(estimator.coefs_, estimator.intercepts_, names, strict=True):
        if name not in ACTIVATIONS:
            raise UnsupportedOperation(
                f"{type(estimator).__name__} has the activation {name!r}, and cp.from_sklearn "
                f"knows {', '.join(ACTIVATIONS)}; write the network as a module yourself"
            )
        layers += [_linear(weight.T, bias), ACTIVATIONS[name]()]
    if isinstance(estimator, MLPClassifier) and estimator.n_outputs_ == 1:
        layers.append(_two_classes())
    return nn.Sequential(*(layer for layer in layers if not isinstance(layer, nn.Identity)))


def _logistic_regression(estimator: Any) -> nn.Sequential:
    scores = _linear(estimator.coef_, estimator.intercept_)
    rule = getattr(estimator, "multi_class", "auto")  # which scikit-learn 1.8 took away
    one_against_rest = estimator.solver == "liblinear" and scores.out_features > 1
    if rule not in ("auto", "deprecated") or one_against_rest:
        raise UnsupportedOperation(
            f"LogisticRegression with solver={estimator.solver!r} and multi_class={rule!r} of "
            f"{len(estimator.classes_)} classes has no module; fit it with another solver, and "
            "without multi_class"
        )
    if scores.out_features > 1:
        return nn.Sequential(scores, nn.Softmax(-1))
    return nn.Sequential(scores, nn.Sigmoid(), _two_classes())


def _center_and_scale(estimator: StandardScaler | RobustScaler | MaxAbsScaler) -> tuple[Any, Any]:
    """What a scaler subtracts, and then divides by; zeros and ones where that is switched off."""
    if isinstance(estimator, StandardScaler):
        center = estimator.mean_ if estimator.with_mean else None
    else:
        center = getattr(estimator, "center_", None)
    zeros = np.zeros(estimator.n_features_in_)
    scale = zeros + 1 if estimator.scale_ is None else estimator.scale_
    return zeros if center is None else center, scale


def _min_max_scaler(estimator: MinMaxScaler) -> nn.Module:
    scaled = _Scaler(estimator.min_, estimator.scale_, inverse=True)
    if not estimator.clip:
        return scaled
    low, high = estimator.feature_range
    return nn.Sequential(scaled, _Elementwise(partial(torch.clamp, min=low, max=high)))


def _principal_components(estimator: PCA | IncrementalPCA) -> nn.Module:
    components = estimator.components_
    projected = _linear(components, -np.asarray(estimator.mean_ @ components.T))
    if not estimator.whiten:
        return projected
    stddev = np.sqrt(estimator.explained_variance_)
    smallest = np.finfo(stddev.dtype).eps  # as scikit-learn has it
    return nn.Sequential(projected, _Scaler(0.0, np.maximum(stddev, smallest)))


def _pipeline(pipeline: Pipeline) -> nn.Sequential:
    steps = [step for step in pipeline.steps if step[1] not in (None, "passthrough")]
    return nn.Sequential(*(_module(step, f"step {name!r} of the pipeline") for name, step in steps))


def _transformed_target(estimator: TransformedTargetRegressor) -> nn.Sequential:
    transformer = estimator.transformer_
    if type(transformer) not in INVERSES:
        raise _unsupported(transformer, "the transformer of the target")
    inverse = INVERSES[type(transformer)](transformer)
    return nn.Sequential(_module(estimator.regressor_, "the regressor"), inverse)


def _inverse_function(estimator: FunctionTransformer) -> nn.Module:
    functions: dict[Any, nn.Module] = {
        None: nn.Identity(),
        np.exp: _Elementwise(torch.exp),
        np.expm1: _Elementwise(torch.expm1),
    }
    if estimator.inv_kw_args or estimator.inverse_func not in functions:
        raise UnsupportedOperation(
            f"the target is transformed back by {estimator.inverse_func!r}, and cp.from_sklearn "
            "knows np.exp and np.expm1 alone; take cp.from_sklearn(model.regressor_), and append "
            "the function as a module of torch"
        )
    return functions[estimator.inverse_func]


INVERSES: dict[type, Callable[[Any], nn.Module]] = {
    **dict.fromkeys(
        (StandardScaler, RobustScaler, MaxAbsScaler),
        lambda scaler: _Scaler(*_center_and_scale(scaler), inverse=True),
    ),
    MinMaxScaler: lambda scaler: _Scaler(scaler.min_, scaler.scale_),
    FunctionTransformer: _inverse_function,
}
"""`inverse_transform` of what `TransformedTargetRegressor` does to targets."""

LINEAR_REGRESSORS = (
    linear.LinearRegression, linear.Ridge, linear.RidgeCV, linear.Lasso, linear.LassoCV,
    linear.ElasticNet, linear.ElasticNetCV, linear.Lars, linear.LarsCV, linear.LassoLars,
    linear.LassoLarsCV, linear.LassoLarsIC, linear.OrthogonalMatchingPursuit,
    linear.OrthogonalMatchingPursuitCV, linear.MultiTaskLasso, linear.MultiTaskLassoCV,
    linear.MultiTaskElasticNet, linear.MultiTaskElasticNetCV, linear.BayesianRidge,
    linear.ARDRegression, linear.HuberRegressor, linear.SGDRegressor, linear.TheilSenRegressor,
    linear.QuantileRegressor, LinearSVR,
)  # fmt: skip

MODULES: dict[type, Callable[[Any], nn.Module]] = {
    **dict.fromkeys(LINEAR_REGRESSORS, lambda fitted: _linear(fitted.coef_, fitted.intercept_)),
    **dict.fromkeys((linear.LogisticRegression, linear.LogisticRegressionCV), _logistic_regression),
    **dict.fromkeys((MLPRegressor, MLPClassifier), _perceptron),
    **dict.fromkeys(
        (StandardScaler, RobustScaler, MaxAbsScaler),
        lambda fitted: _Scaler(*_center_and_scale(fitted)),
    ),
    MinMaxScaler: _min_max_scaler,
    **dict.fromkeys((PCA, IncrementalPCA), _principal_components),
    TruncatedSVD: lambda fitted: _linear(fitted.components_, 0.0),
    Pipeline: _pipeline,
    TransformedTargetRegressor: _transformed_target,
    FrozenEstimator: lambda frozen: _module(frozen.estimator, "the frozen estimator"),
    **dict.fromkeys(
        (GridSearchCV, RandomizedSearchCV),
        lambda search: _module(search.best_estimator_, "the best estimator"),
    ),
}
"""By the class itself: a subclass may predict something else."""


@final
class NoisyInputRegressor(MetaEstimatorMixin, RegressorMixin, BaseEstimator):
    """A scikit-learn regressor whose features are measured with noise.

    `fit` fits the regressor. `predict` returns the mean of its predictions under independent
    Gaussian noise on the features, and their standard deviation. This is the effect of the noise
    alone, without the regressor's own error.

    Args:
        estimator: A regressor that `cp.from_sklearn` supports. `fit` clones it; a fitted one needs
            no `fit`.
        X_stddev: Standard deviation of the noise, in units of `X`: a number, one for each feature,
            or one for each row and feature. `predict` can override it.
        method: As for `cp.propagate`.

    Example:
        from sklearn.linear_model import Ridge
        X = np.random.default_rng(0).normal(size=(40, 3))
        model = cp.NoisyInputRegressor(Ridge()).fit(X, X.sum(1))
        mean, stddev = model.predict(X, X_stddev=0.1, return_std=True)
    """

    estimator_: Any

    def __init__(
        self, estimator: Any, *, X_stddev: Any = None, method: Method | str = "auto"
    ) -> None:
        self.estimator = estimator
        self.X_stddev = X_stddev
        self.method = method

    def fit(self, X: Any, y: Any, **fit_params: Any) -> Self:
        """Fit a clone of the regressor, `estimator_`; `fit_params` go to its `fit`."""
        self._check_kind()
        self.estimator_ = clone(self.estimator).fit(X, y, **fit_params)
        return self

    def predict(self, X: Any, X_stddev: Any = None, return_std: bool = False) -> Any:
        """Return predictions of features (rows, features), as the regressor shapes them.

        Args:
            X: The features as measured.
            X_stddev: Standard deviation of their noise, in place of the one given before.
            return_std: Whether to return standard deviations of the predictions as well.
        """
        fitted = self._fitted()
        known = fitted.predict(X)
        noise = self.X_stddev if X_stddev is None else X_stddev
        if noise is None:
            if return_std:
                raise ValueError(
                    "return_std=True needs X_stddev, the standard deviation of the noise of X"
                )
            return known
        features = _numbers(validate_data(self, X, accept_sparse="csr", reset=False))
        moments = self._moments(from_sklearn(fitted), features, _noise(noise, features))
        mean, stddev = (np.concatenate(parts).reshape(known.shape) for parts in moments)
        return (mean, stddev) if return_std else mean

    @torch.no_grad()
    def _moments(self, module: nn.Module, x: Tensor, noise: Tensor) -> tuple[list[Array], ...]:
        means, stddevs = [], []
        for mean, stddev in zip(x.split(ROWS), noise.split(ROWS), strict=True):
            noisy = Gaussian.diagonal(mean, stddev=stddev, batch_dims=1)
            y = propagate(module, noisy, method=self.method)
            means.append(y.mean.numpy())
            stddevs.append(y.stddev.numpy())
        return means, stddevs

    def _fitted(self) -> Any:
        """The regressor that `fit` has made, or the one given where it is fitted."""
        self._check_kind()
        fitted = getattr(self, "estimator_", self.estimator)
        check_is_fitted(fitted)
        return fitted

    def _check_kind(self) -> None:
        if not is_regressor(self.estimator):
            raise TypeError(
                f"NoisyInputRegressor takes a regressor, not a {type(self.estimator).__name__}; "
                "of a classifier, propagate noise through cp.from_sklearn(classifier)"
            )

    @property
    def n_features_in_(self) -> int:
        """How many features `fit` has seen."""
        return int(self._fitted().n_features_in_)

    @property
    def feature_names_in_(self) -> Any:
        """The names of these features, if they had names."""
        return self._fitted().feature_names_in_

    def __sklearn_is_fitted__(self) -> bool:
        try:
            self._fitted()
        except NotFittedError:
            return False
        return True

    def __sklearn_tags__(self) -> Any:
        return get_tags(self.estimator)


def _noise(stddev: Any, features: Tensor) -> Tensor:
    """Standard deviations (rows, features)."""
    values, shape = _numbers(stddev), tuple(features.shape)
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError("X_stddev has numbers that are negative or not finite")
    if tuple(values.shape) not in ((), shape[1:], shape):
        raise ValueError(
            f"X_stddev has shape {tuple(values.shape)}; it is a number, one for each of {shape[1]} "
            f"features, or one for each element of X, {shape}"
        )
    return values.broadcast_to(shape)


MODULES[NoisyInputRegressor] = lambda noisy: _module(noisy._fitted(), "its regressor")
