"""The base of the regressor and the classifier: parameters, training, files."""

import copy
import itertools
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)
from torch import Tensor, nn

from covprop.bayes import estimator_settings as settings
from covprop.bayes.elbo import ELBO
from covprop.bayes.estimator_settings import Floats, Scaling
from covprop.bayes.layers import BayesLinear
from covprop.bayes.likelihoods import Likelihood, Prediction
from covprop.bayes.prediction import Decomposition, LocalReparametrisation, predict_target
from covprop.bayes.priors import HePrior, Prior
from covprop.bayes.training import History, fit
from covprop.files import reading_tensors, write_tensors
from covprop.gaussian import Gaussian

LARGEST_SEED = 2**31 - 1


class _Fitted:
    network_: nn.Sequential
    likelihood_: Likelihood
    features_: Scaling
    targets_: Scaling
    history_: History
    n_iter_: int
    seed_: int
    n_features_in_: int


@dataclass(eq=False, repr=False)
class BayesEstimator(_Fitted, BaseEstimator, ABC):
    """A Bayesian network of linear layers, on standardised features, as scikit-learn has it."""

    hidden: int | tuple[int, ...] = (50,)
    activation: str = "relu"
    _: KW_ONLY
    likelihood: str | Likelihood | None = None
    prior: Any = "he"
    method: str | settings.Inference = "gaussian-layers"
    input_noise: Any = None
    learning_rate: float = 0.01
    epochs: int = 200
    batch_size: int = 32
    weight_decay: float = 0.0
    cooldown: float = 0.0
    early_stopping: bool = False
    validation_fraction: float = 0.1
    patience: int = 20
    random_state: Any = None
    device: str = "cpu"
    dtype: Any = "float64"
    verbose: bool = False

    @abstractmethod
    def _outputs(self) -> int:
        """How many outputs the network has, for the data of the fit."""

    @abstractmethod
    def _target_metadata(self) -> dict[str, Any]:
        """What a file has of the targets, for JSON."""

    @abstractmethod
    def _restore_targets(self, metadata: dict[str, Any]) -> None: ...

    def save(self, path: str | PathLike[str]) -> None:
        """Write weights, scales and parameters to a safetensors file.

        Args:
            path: The file, which is replaced if it exists.
        """
        check_is_fitted(self)
        write_tensors(Path(path), type(self).__name__, self._description(), self._tensors())

    @classmethod
    def load(cls, path: str | PathLike[str], device: str = "cpu") -> Self:
        """Read a file of `save`, without its history; no code of the file is run.

        Args:
            path: The file.
            device: The device of the network.
        """
        with reading_tensors(Path(path), cls.__name__, device) as (described, tensors):
            settings.check_numbers(tensors)
            estimator = cls(**settings.decode(described["parameters"]), device=device)
            estimator._restore(described, tensors)
        return estimator

    def decompose(self, X: Any) -> Decomposition:
        """Split variances (rows, targets) of the predictions by origin: noise, weights, input.

        For classes, those of their indicators (rows, classes); of the second one only for
        `bernoulli`.
        """
        inputs = self._inputs(self._features(X))
        whole = self._moments(inputs)
        known = self._moments(inputs.mean) if isinstance(inputs, Gaussian) else whole
        parts = Decomposition.of(whole, known)
        scaled = (
            torch.as_tensor(self.targets_.spread(settings.array(part), power=2)).to(part)
            for part in (parts.aleatoric, parts.epistemic, parts.input)
        )
        return Decomposition(*scaled)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "network_")

    def _train(self, x: Floats, y: Tensor, weight: Floats | None, groups: Any = None) -> None:
        """Train a new network on features and ready targets; groups: classes to split evenly."""
        self._check_numbers()
        generator = torch.Generator().manual_seed(self.seed_)
        self.network_ = self._network()
        self.network_.to_empty(device="cpu")
        for layer in self.network_:
            if isinstance(layer, BayesLinear):
                layer.reset_parameters(generator)
        self.network_.to(self.device)
        if isinstance(self.likelihood_, nn.Module):
            self.likelihood_.to(self.device, settings.torch_dtype(self.dtype))
        y = y.to(self.device)
        weights = None if weight is None else torch.as_tensor(weight).to(y.device)
        rows, validation = np.arange(len(x)), None
        if self.early_stopping:
            rows, out = self._split(len(x), groups, generator)
            pair = (self._inputs(x[out]), y[torch.as_tensor(out)])
            validation = pair if weights is None else (*pair, weights[torch.as_tensor(out)])
        index = torch.as_tensor(rows)
        if weights is not None:
            weights = weights[index]
        # A datum of weight 2 is two data.
        size = len(rows) if weights is None else max(1, round(float(weights.sum())))
        self.history_ = fit(
            self.network_, ELBO(self.likelihood_, size), self._inputs(x[rows]), y[index],
            method=self._inference(), epochs=self.epochs, batch_size=self.batch_size,
            learning_rate=self.learning_rate, weight_decay=self.weight_decay,
            cooldown=self.cooldown, weight=weights, generator=generator, validation=validation,
            patience=self.patience if self.early_stopping else None, progress=bool(self.verbose),
        )  # fmt: skip
        self.n_iter_ = self.history_.epochs

    def _check_numbers(self) -> None:
        for name in ("epochs", "batch_size", "patience"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} is a whole number from 1, not {value!r}")
        real = (int, float, np.number)
        rate, cooldown, fraction = self.learning_rate, self.cooldown, self.validation_fraction
        if not isinstance(rate, real) or not rate > 0:
            raise ValueError(f"learning_rate is positive, not {rate!r}")
        if not isinstance(cooldown, real) or not 0 <= cooldown <= 1:
            raise ValueError(f"cooldown is a share of the steps, from 0 to 1, not {cooldown!r}")
        if not isinstance(fraction, real) or not 0 < fraction < 1:
            raise ValueError(f"validation_fraction is between 0 and 1, not {fraction!r}")

    def _split(self, count: int, groups: Any, generator: torch.Generator) -> tuple[Any, Any]:
        """Rows to train on and rows to validate with, in the same proportion of each group."""
        order = torch.randperm(count, generator=generator).numpy()
        labels = np.zeros(count) if groups is None else groups
        out = np.zeros(count, dtype=bool)
        for label in np.unique(labels):
            own = order[labels[order] == label]
            out[own[: min(len(own) - 1, round(self.validation_fraction * len(own)))]] = True
        if not out.any():
            raise ValueError(
                f"validation_fraction={self.validation_fraction} of {count} rows is no row; make "
                "it larger, or set early_stopping=False"
            )
        return np.flatnonzero(~out), np.flatnonzero(out)

    def _network(self) -> nn.Sequential:
        """Bayesian linear layers with activations between them, on the meta device."""
        sizes = (self.n_features_in_, *settings.hidden_sizes(self.hidden), self._outputs())
        dtype = settings.torch_dtype(self.dtype)
        prior = HePrior() if self.prior is None else self.prior
        prior = settings.chosen("prior", prior, settings.PRIORS, Prior)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            if layers:
                known = settings.ACTIVATIONS
                layers.append(settings.chosen("activation", self.activation, known, ()))
            layers.append(BayesLinear(inputs, outputs, prior=prior, device="meta", dtype=dtype))
        return nn.Sequential(*layers)

    def _inference(self) -> settings.Inference:
        """The method; draws are the same every time."""
        method = settings.chosen("method", self.method, settings.METHODS, settings.Inference)
        if not isinstance(method, LocalReparametrisation):
            return method
        method.check_spread()
        if method.generator is None:
            generator = torch.Generator(self.device).manual_seed(self.seed_)
            return LocalReparametrisation(method.samples, generator)
        return method

    def _inputs(self, x: Floats) -> Tensor | Gaussian:
        """Standardised features, with the noise of the sensor around them."""
        dtype = settings.torch_dtype(self.dtype)
        known = torch.as_tensor(self.features_.apply(x)).to(self.device, dtype)
        if self.input_noise is None:
            return known
        return settings.noisy(known, settings.input_variance(self.input_noise, self.features_))

    def _moments(self, inputs: Tensor | Gaussian) -> Prediction:
        """Of standardised targets."""
        return predict_target(self.network_, self.likelihood_, inputs, self._inference())

    def _features(self, data: Any) -> Floats:
        check_is_fitted(self)
        return np.asarray(validate_data(self, data, dtype=np.float64, reset=False))

    def _prepare(self, x: Floats, sample_weight: Any) -> tuple[Any, Floats | None]:
        """Set the seed and the scales of features; return rows that count, and their weights."""
        self.seed_ = int(check_random_state(self.random_state).randint(LARGEST_SEED))
        if sample_weight is None:
            self.features_ = Scaling.of(x)
            return np.arange(len(x)), None
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        rows = np.flatnonzero(weight > 0)
        if not len(rows):  # which newer versions of scikit-learn see
            raise ValueError("sample_weight has no non-zero number; there is nothing to learn from")
        self.features_ = Scaling.of(x[rows], weight[rows])
        return rows, weight[rows]

    def _new_likelihood(self, known: Any, default: str) -> Likelihood:
        """A copy that training may change: the parameter stays as it is."""
        value = default if self.likelihood is None else self.likelihood
        likelihood = settings.chosen("likelihood", value, known, tuple(known.values()))
        return copy.deepcopy(likelihood)

    def _description(self) -> dict[str, Any]:
        """All but tensors, for JSON."""
        names = getattr(self, "feature_names_in_", None)
        parameters = self.get_params(deep=False)
        del parameters["device"]
        if not isinstance(self.random_state, int | np.integer | None):
            parameters["random_state"] = None  # a generator's state; the seed is kept
        noise = parameters["input_noise"]
        parameters["input_noise"] = None if noise is None else np.asarray(noise).tolist()
        return {
            "parameters": settings.encode(parameters),
            "features": int(self.n_features_in_),
            "feature_names": None if names is None else [str(name) for name in names],
            "seed": self.seed_,
            "epochs": self.n_iter_,
            "targets": self._target_metadata(),
        }

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"network.{k}": v for k, v in self.network_.state_dict().items()}
        if isinstance(self.likelihood_, nn.Module):
            state = self.likelihood_.state_dict()
            tensors |= {f"likelihood.{k}": v for k, v in state.items()}
        for name in ("features", "targets"):
            scaling: Scaling = getattr(self, f"{name}_")
            tensors[f"{name}.mean"] = torch.as_tensor(scaling.mean)
            tensors[f"{name}.stddev"] = torch.as_tensor(scaling.stddev)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def _restore(self, described: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.n_features_in_ = int(described["features"])
        names = described["feature_names"]
        if names is not None:
            if len(names) != self.n_features_in_ or not all(isinstance(n, str) for n in names):
                raise ValueError("its names of features are not those of its features")
            self.feature_names_in_ = np.array(names, dtype=object)
        self.seed_, self.n_iter_ = int(described["seed"]), int(described["epochs"])
        if not 0 <= self.seed_ <= LARGEST_SEED:
            raise ValueError(f"{self.seed_} is no seed")
        for name, count in (("features", self.n_features_in_), ("targets", None)):
            mean, stddev = (tensors.pop(f"{name}.{k}").cpu().numpy() for k in ("mean", "stddev"))
            scaling = Scaling(mean, stddev)
            scaling.check(count)
            setattr(self, f"{name}_", scaling)
        self.history_ = History()
        self._restore_targets(described["targets"])
        layers = sum(name.endswith(".weight_mean") for name in tensors)
        if len(settings.hidden_sizes(self.hidden)) + 1 != layers:
            raise ValueError(f"{layers} layers of weights do not go with hidden={self.hidden}")
        model = self._network()
        settings.fill(model, "network.", tensors)
        if isinstance(self.likelihood_, nn.Module):
            settings.fill(self.likelihood_, "likelihood.", tensors)
        if tensors:
            raise ValueError(f"there is no place for {', '.join(sorted(tensors))}")
        self._inference()
        if self.input_noise is not None:
            settings.input_variance(self.input_noise, self.features_)
        self.network_ = model.to(self.device)
