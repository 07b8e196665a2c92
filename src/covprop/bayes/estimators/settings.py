"""The parameters of an estimator: names, objects in their place, and units of the data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast, final, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from covprop.bayes.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Likelihood,
    Poisson,
)
from covprop.bayes.prediction import LocalReparametrisation
from covprop.bayes.priors import (
    EmpiricalBayes,
    FixedPrior,
    HePrior,
    Prior,
    ScaleMixturePrior,
    WideHePrior,
    XavierPrior,
)
from covprop.errors import InvalidGaussian
from covprop.gaussian import Gaussian
from covprop.methods import AssumedDensity, Exact, LayerwiseMethod, Series, Wu2019

Inference: TypeAlias = LayerwiseMethod | LocalReparametrisation
Floats: TypeAlias = NDArray[np.float64]
T = TypeVar("T")

METHODS: Mapping[str, type[Inference]] = {
    "exact": Exact,
    "series": Series,
    "dvi": Wu2019,
    "ddvi": AssumedDensity,
    "mcvi": LocalReparametrisation,
}
PRIORS: Mapping[str, type[Prior]] = {
    "fixed": FixedPrior,
    "he": HePrior,
    "wide-he": WideHePrior,
    "xavier": XavierPrior,
    "mixture": ScaleMixturePrior,
    "empirical-bayes": EmpiricalBayes,
}
REGRESSION: Mapping[str, type[Likelihood]] = {
    "heteroskedastic": HeteroskedasticGaussian,
    "homoskedastic": HomoskedasticGaussian,
    "poisson": Poisson,
}
CLASSIFICATION: Mapping[str, type[Likelihood]] = {
    "bernoulli": Bernoulli,
    "categorical": Categorical,
}
ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
ROUNDING = 10 * np.finfo(np.float64).eps
"""A spread below this part of the largest value is that of rounding."""


def chosen(name: str, value: Any, known: Mapping[str, type[T]], kinds: Any) -> T:
    """Return the object of a name, or the object passed in place of one."""
    if isinstance(value, str) and value in known:
        return known[value]()
    if isinstance(value, kinds):
        return cast(T, value)
    types = get_args(kinds) or (kinds if isinstance(kinds, tuple) else (kinds,))
    objects = f", or an object of {', '.join(kind.__name__ for kind in types)}" if types else ""
    raise ValueError(f"{name} is one of {', '.join(known)}{objects}; not {value!r}")


def hidden_sizes(hidden: Any) -> tuple[int, ...]:
    """Check the widths of hidden layers; one number is one layer."""
    whole = (int, np.integer)
    sizes = (hidden,) if isinstance(hidden, whole) else hidden
    if not isinstance(sizes, list | tuple) or not all(
        isinstance(size, whole) and not isinstance(size, bool) and size >= 1 for size in sizes
    ):
        raise ValueError(f"hidden has whole numbers from 1, such as (50,), not {hidden!r}")
    return tuple(int(size) for size in sizes)


def torch_dtype(dtype: Any) -> torch.dtype:
    """float32 or float64, by name or as torch has it."""
    for name, kind in DTYPES.items():
        if dtype == name or dtype is kind:
            return kind
    raise ValueError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r}")


def array(values: Tensor) -> Floats:
    """Convert a tensor for numpy."""
    return values.detach().cpu().double().numpy()


@final
@dataclass(frozen=True)
class Scaling:
    """The mean and deviation of each column; a column that does not vary has the deviation 0."""

    mean: Floats
    stddev: Floats

    @classmethod
    def of(cls, values: Floats, weight: Floats | None = None) -> "Scaling":
        """Measure columns (rows, columns), each row with its weight."""
        mean = np.average(values, axis=0, weights=weight)
        away = values - mean
        largest = np.abs(away).max(axis=0)
        unit = np.where(largest > 0, largest, 1)  # squares of large numbers would overflow
        stddev = unit * np.sqrt(np.average((away / unit) ** 2, axis=0, weights=weight))
        constant = stddev <= ROUNDING * np.abs(values).max(axis=0)
        return cls(np.where(constant, values[0], mean), np.where(constant, 0.0, stddev))

    @classmethod
    def identity(cls, columns: int) -> "Scaling":
        """Leave columns as they are."""
        return cls(np.zeros(columns), np.ones(columns))

    def check(self, columns: int | None) -> None:
        """Refuse numbers of a file that are not those of so many columns."""
        wanted = self.mean.shape if columns is None else (columns,)
        if self.mean.ndim != 1 or self.mean.shape != wanted or self.stddev.shape != wanted:
            raise ValueError(f"scales of shape {self.stddev.shape} are not those of the columns")
        if not np.isfinite(self.mean).all() or not (self.stddev >= 0).all():
            raise ValueError("its scales are not finite, or negative")

    @property
    def unit(self) -> Floats:
        """The divisor: 1 where a column does not vary."""
        return np.where(self.stddev > 0, self.stddev, 1.0)

    def apply(self, values: Floats) -> Floats:
        """Standardise columns to mean 0 and deviation 1."""
        return np.asarray((values - self.mean) / self.unit)

    def spread(self, values: Floats, power: int = 1) -> Floats:
        """Rescale deviations, or variances (power 2), to units of the columns.

        0 where those do not vary, also for infinite values, which 0 times would make no number.
        """
        return np.where(self.stddev > 0, self.unit**power * values, 0.0)


def input_variance(noise: ArrayLike, scaling: Scaling) -> Floats:
    """Variances (d,), or a covariance (d, d), of the noise on standardised features.

    noise: deviations (one, or one for each feature) or a covariance, in units of X.
    """
    values: Floats = np.asarray(noise, dtype=np.float64)
    size = len(scaling.mean)
    if values.shape not in ((), (size,), (size, size)) or not np.isfinite(values).all():
        raise ValueError(
            f"input_noise is a standard deviation, one for each of {size} features, or a "
            f"covariance ({size}, {size}), of finite numbers; not of shape {values.shape}"
        )
    if values.ndim < 2:  # noqa: PLR2004
        if (values < 0).any():
            raise ValueError("input_noise has a negative standard deviation")
        return np.broadcast_to(values, (size,)) ** 2 / scaling.unit**2
    matrix = values / np.outer(scaling.unit, scaling.unit)
    try:
        Gaussian(torch.zeros(size, dtype=torch.float64), torch.as_tensor(matrix))
    except InvalidGaussian as error:
        raise ValueError(f"input_noise is not a covariance: {error}") from error
    return matrix


def noisy(x: Tensor, variance: Floats) -> Gaussian:
    """Gaussians around known features (rows, d), of variances (d,) or a covariance (d, d)."""
    values = torch.as_tensor(variance).to(x).expand(len(x), *variance.shape)
    if variance.ndim == 1:
        return Gaussian.diagonal(x, values, 1)
    return Gaussian(x, values, validate_args=False)
