"""What the parameters of an estimator mean: names, and objects in their place."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, cast, get_args

import numpy as np
import torch
from torch import nn

from covprop.bayes.layers import BayesLinear
from covprop.bayes.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Likelihood,
    Poisson,
)
from covprop.bayes.priors import (
    EmpiricalBayes,
    FixedPrior,
    HePrior,
    Prior,
    ScaleMixturePrior,
    WideHePrior,
    XavierPrior,
)
from covprop.bayes.sampling import LocalReparametrisation
from covprop.methods import AssumedDensity, Exact, LayerwiseMethod, Series, Wu2019

Inference: TypeAlias = LayerwiseMethod | LocalReparametrisation
T = TypeVar("T")

METHODS: Mapping[str, Callable[[], Inference]] = {
    "exact": Exact,
    "series": Series,
    "dvi": Wu2019,
    "ddvi": AssumedDensity,
    "mcvi": LocalReparametrisation,
}
PRIORS: Mapping[str, Callable[[], Prior]] = {
    "fixed": FixedPrior,
    "he": HePrior,
    "wide-he": WideHePrior,
    "xavier": XavierPrior,
    "mixture": ScaleMixturePrior,
    "empirical-bayes": EmpiricalBayes,
}
NOISES: Mapping[str, Callable[[], Likelihood]] = {
    "heteroskedastic": HeteroskedasticGaussian,
    "homoskedastic": HomoskedasticGaussian,
    "poisson": Poisson,
}
LABELLINGS: Mapping[str, Callable[[], Likelihood]] = {
    "bernoulli": Bernoulli,
    "categorical": Categorical,
}
ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
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


def chosen(name: str, value: Any, known: Mapping[str, Callable[[], T]], kinds: Any) -> T:
    """The object of a name, or the object given in place of one."""
    if isinstance(value, str) and value in known:
        return known[value]()
    if isinstance(value, kinds):
        return cast(T, value)
    types = get_args(kinds) or (kinds if isinstance(kinds, tuple) else (kinds,))
    objects = f", or an object of {', '.join(kind.__name__ for kind in types)}" if types else ""
    raise ValueError(f"{name} is one of {', '.join(known)}{objects}; not {value!r}")


def network(
    sizes: tuple[int, ...], activation: str, prior: Any, dtype: torch.dtype
) -> nn.Sequential:
    """Bayesian linear layers with activations between them, on no device: without values yet."""
    made = chosen("prior", prior, PRIORS, Prior)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        if layers:
            layers.append(chosen("activation", activation, ACTIVATIONS, ()))
        layers.append(BayesLinear(inputs, outputs, prior=made, device="meta", dtype=dtype))
    return nn.Sequential(*layers)


def begin(model: nn.Module, generator: torch.Generator) -> None:
    """Give every layer of a network its first values, from a generator alone."""
    model.to_empty(device="cpu")
    for layer in model.modules():
        if isinstance(layer, BayesLinear):
            layer.reset_parameters(generator)


def hidden_sizes(hidden: Any) -> tuple[int, ...]:
    """The widths of hidden layers, none of which is empty; one number is one layer."""
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


def check_numbers(
    epochs: Any,
    batch_size: Any,
    learning_rate: Any,
    patience: Any,
    validation_fraction: Any,
    cooldown: Any,
) -> None:
    """Settings of the training that make sense."""
    for name, value in {"epochs": epochs, "batch_size": batch_size, "patience": patience}.items():
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} is a whole number from 1, not {value!r}")
    real = (int, float, np.number)
    if not isinstance(learning_rate, real) or not learning_rate > 0:
        raise ValueError(f"learning_rate is positive, not {learning_rate!r}")
    if not isinstance(cooldown, real) or not 0 <= cooldown <= 1:
        raise ValueError(f"cooldown is a share of the steps, from 0 to 1, not {cooldown!r}")
    if not isinstance(validation_fraction, real) or not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction is between 0 and 1, not {validation_fraction!r}")
