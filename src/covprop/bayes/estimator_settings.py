"""The parameters of an estimator: names, objects in their place, units of the data, files."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast, final, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from covprop.bayes.discrete_likelihoods import Bernoulli, Categorical, Delta, Poisson
from covprop.bayes.gaussian_likelihoods import HeteroskedasticGaussian, HomoskedasticGaussian
from covprop.bayes.likelihoods import Cubature, Likelihood
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
from covprop.kernels.rounding import STANDARDISED, rounding
from covprop.methods import AssumedDensity, GaussianLayers, LayerwiseMethod, Series, Wu2019

Inference: TypeAlias = LayerwiseMethod | LocalReparametrisation
Floats: TypeAlias = NDArray[np.float64]
T = TypeVar("T")

METHODS: Mapping[str, type[Inference]] = {
    "gaussian-layers": GaussianLayers,
    "exact": GaussianLayers,  # the former name
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
"""The format that is written, and the one before it, which is read with a warning."""
KIND = "type"
KNOWN: dict[str, type[Any]] = {
    kind.__name__: kind
    for table in (
        METHODS, PRIORS, REGRESSION, CLASSIFICATION,
        {"cubature": Cubature, "delta": Delta},
    )
    for kind in table.values()
} | {"Exact": GaussianLayers}  # fmt: skip
"""Types that a file may name; older ones have `Exact`."""


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
        constant = stddev <= rounding(STANDARDISED, torch.float64) * np.abs(values).max(axis=0)
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
        return Gaussian.diagonal(x, variance=values, batch_dims=1)
    return Gaussian(x, values, validate_args=False)


def check_numbers(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors of a file that no network can have."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or bool(torch.isnan(tensor).any()):
            raise ValueError(f"{name} is not of numbers")


def fill(module: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Move all tensors of a module out of those of a file."""
    for name, own in module.state_dict().items():
        value = tensors.get(prefix + name)
        if value is None or value.shape != own.shape or value.dtype != own.dtype:
            what = "nothing" if value is None else f"{tuple(value.shape)} of {value.dtype}"
            raise ValueError(f"{prefix}{name} is {what}, not {tuple(own.shape)} of {own.dtype}")
    state = {name: tensors.pop(prefix + name) for name in module.state_dict()}
    module.load_state_dict(state, assign=True)
    for parameter in module.parameters():
        parameter.requires_grad_(True)


def encode(value: Any) -> Any:
    """Encode parameters for JSON, objects by the name of their type and their fields."""
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if type(value) in KNOWN.values():
        return {KIND: type(value).__name__, **encode(_fields(value))}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise ValueError(f"a file cannot hold the parameter {value!r}; use a name, or pickle")


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, HomoskedasticGaussian):
        stddev = (value.log_variance.detach() / 2).exp().tolist()
        return {"stddev": stddev, "learned": isinstance(value.log_variance, nn.Parameter)}
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: item for name, item in fields.items() if item is not None and item != {}}


def decode(value: Any) -> Any:
    """Decode parameters from JSON; only known types are constructed."""
    if isinstance(value, list):
        items = [decode(item) for item in value]
        return tuple(items) if all(isinstance(item, int) for item in items) else items
    if not isinstance(value, dict):
        return value
    fields = {name: decode(item) for name, item in value.items() if name != KIND}
    if KIND not in value:
        return fields
    if value[KIND] not in KNOWN:
        raise ValueError(f"it names an unknown type {value[KIND]!r}")
    if isinstance(fields.get("stddev"), list):
        fields["stddev"] = torch.tensor(fields["stddev"])
    return KNOWN[value[KIND]](**fields)
