"""What a network with random weights predicts, and where its uncertainty comes from."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from covprop.bayes.layers import BayesLayer, random_linear
from covprop.bayes.likelihoods import Likelihood, Prediction
from covprop.covariance.base import symmetric
from covprop.errors import UnsupportedOperation
from covprop.flow.table import UsedWeights
from covprop.gaussian import Gaussian
from covprop.methods import GaussianLayers, Method
from covprop.propagate import propagate_without_warnings

DEFAULT = GaussianLayers()
ROWS = 2048
"""Rows, of all members together, whose outputs are held at a time."""

Data = TypeVar("Data", bound=Tensor | Gaussian)


@final
@dataclass(frozen=True)
class LocalReparametrisation:
    """Inference by sampling the outputs of every layer (MCVI, Kingma et al. 2015).

    Args:
        samples: The number of draws for each element of the batch; training needs one, a prediction
            at least two.
        generator: A random generator for weights and inputs, by default torch's global one. Dropout
            always uses the global one.

    Example:
        y = bayes.predict(bayes.BayesLinear(3, 2), torch.ones(5, 3), bayes.LocalReparametrisation())
    """

    samples: int = 10
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.samples) is not int or self.samples < 1:
            raise ValueError(f"samples is a whole number from 1, not {self.samples!r}")

    def check_spread(self) -> None:
        """Refuse a single draw, which has no variance."""
        if self.samples < 2:  # noqa: PLR2004
            raise ValueError(
                "one draw has no variance; it is enough to train with, but predict with "
                "bayes.LocalReparametrisation(samples) of two or more"
            )

    def moments(self, values: Tensor, batch_dims: int) -> Gaussian:
        """Return mean and unbiased covariance of draws (samples, *batch, *event)."""
        self.check_spread()
        flat = (
            values.flatten(1 + batch_dims) if values.dim() > 1 + batch_dims else values[..., None]
        )
        mean = flat[0] + (flat - flat[0]).mean(0)  # of equal draws, their value to the last bit
        deviation = (flat - mean).movedim(0, -1)  # (*batch, m, samples)
        covariance = symmetric(deviation @ deviation.mT / (len(values) - 1))
        return Gaussian(
            mean.reshape(values.shape[1:]), covariance, validate_args=False, method=self
        )


Inference: TypeAlias = Method | LocalReparametrisation


class _Drawing(TorchFunctionMode):
    """Passes a generator to Bayesian layers, and refuses the second use of one."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.generator = generator
        self.entered = UsedWeights()

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not random_linear:
            return func(*args, **(kwargs or {}))
        self.entered.see(func, args)
        x, _, layer = args
        return layer.draw(x, self.generator)


def draws(
    model: nn.Module, x: Tensor | Gaussian, samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw outputs (samples, *batch, *event), with new weights and inputs for each.

    Differentiable with respect to all parameters, and to x.

    Args:
        model: A network with Bayesian layers.
        x: A tensor (batch, ...), or (members, batch, ...) where layers have members, or a Gaussian
            of such a batch.
        samples: The number of draws of each output.
        generator: A random generator, by default torch's global one.

    Example:
        values = bayes.draws(bayes.BayesLinear(3, 2), torch.ones(5, 3), 100)  # (100, 5, 2)
    """
    dims = batch_dims(model, x)
    gaussian = x if isinstance(x, Gaussian) else Gaussian.constant(x, dims)
    # Samples are more of the batch; members stay in front.
    inputs = gaussian.rsample(samples, generator).movedim(0, dims - 1).flatten(dims - 1, dims)
    with _Drawing(generator):
        result = model(inputs)
    if not isinstance(result, Tensor):
        raise UnsupportedOperation(
            f"draws are those of one tensor, and the model returns a {type(result).__name__}"
        )
    return result.unflatten(dims - 1, (samples, -1)).movedim(dims - 1, 0)


def predict(model: nn.Module, x: Tensor | Gaussian, method: Inference = DEFAULT) -> Gaussian:
    """Return the mean and covariance of a network's output, for random weights and any input.

    Args:
        model: A network that returns one tensor.
        x: A known tensor (batch, ...), or a Gaussian of batch shape (batch,). If the model has
            members, their dimension comes first.
        method: `cp.GaussianLayers()`, `cp.Series()`, `cp.Wu2019()` (DVI), `cp.AssumedDensity()`
            (dDVI), `bayes.LocalReparametrisation()` (MCVI), or any other.

    Example:
        y = bayes.predict(bayes.BayesLinear(3, 2), torch.ones(5, 3))
        y.mean, y.stddev
    """
    dims = batch_dims(model, x)
    if isinstance(method, LocalReparametrisation):
        return method.moments(draws(model, x, method.samples, method.generator), dims)
    gaussian = x if isinstance(x, Gaussian) else Gaussian.constant(x, dims)
    result = propagate_without_warnings(
        model, (gaussian,), {}, method
    )  # training may mean its dropout
    if not isinstance(result, Gaussian):
        raise UnsupportedOperation(
            f"predict is for models that return one tensor, and this one returns a "
            f"{type(result).__name__}; use cp.propagate"
        )
    return result


def kl(model: nn.Module) -> Tensor:
    """Return the divergence of all weights from their priors: one number, or (members,).

    Args:
        model: A network with at least one Bayesian layer.

    Example:
        bayes.kl(bayes.BayesLinear(3, 2))
    """
    parts = [layer.divergence() for layer in model.modules() if isinstance(layer, BayesLayer)]
    if not parts:
        raise ValueError(
            "the model has no Bayesian layers, so there is no divergence; make some with "
            "bayes.to_bayesian(model)"
        )
    return sum(parts[1:], start=parts[0])


@torch.no_grad()
def log_predictive(
    model: nn.Module, likelihood: Likelihood, x: Tensor | Gaussian, target: Tensor,
    method: Inference = DEFAULT,
) -> Tensor:  # fmt: skip
    """Return log E[p(t | f)] of every datum, (*members, data), from moments or from draws.

    Args:
        model: The network.
        likelihood: The distribution of the target given the outputs f.
        x: Inputs, as in `predict`.
        target: (data, ...) for all members, or (members, data, ...) for each.
        method: As in `predict`.

    Example:
        model, x = bayes.BayesLinear(3, 1), torch.ones(5, 3)
        bayes.log_predictive(model, bayes.HomoskedasticGaussian(), x, torch.zeros(5))
    """
    dims = batch_dims(model, x)
    target_dims = dims if target.shape[:dims] == lead_shape(x, dims) else 1
    parts = []
    for rows, inputs in chunks(x, dims):
        t = take(target, rows, target_dims)
        if isinstance(method, LocalReparametrisation):
            values = draws(model, inputs, method.samples, method.generator)
            parts.append(likelihood.log_predictive_draws(values, t))
        else:
            parts.append(likelihood.log_predictive(predict(model, inputs, method), t))
    return torch.cat(parts, -1)


@torch.no_grad()
def predict_target(
    model: nn.Module, likelihood: Likelihood, x: Tensor | Gaussian, method: Inference = DEFAULT
) -> Prediction:
    """Return mean and variances of the target of every datum, (*members, data, k).

    Args:
        model: The network.
        likelihood: The distribution of the target given the outputs.
        x: Inputs, as in `predict`.
        method: As in `predict`.

    Example:
        model, noise = bayes.BayesLinear(3, 1), bayes.HomoskedasticGaussian(0.1)
        bayes.predict_target(model, noise, torch.ones(5, 3)).stddev
    """
    dims = batch_dims(model, x)
    parts = [_predict_rows(model, likelihood, rows, method) for _, rows in chunks(x, dims)]
    return Prediction.cat(parts, dims - 1)


def _predict_rows(
    model: nn.Module, likelihood: Likelihood, x: Tensor | Gaussian, method: Inference
) -> Prediction:
    if isinstance(method, LocalReparametrisation):
        method.check_spread()
        return likelihood.predict_draws(draws(model, x, method.samples, method.generator))
    return likelihood.predict(predict(model, x, method))


@final
@dataclass(frozen=True)
class Decomposition:
    """Variances of the target, in its shape; their sum is the variance of the prediction.

    Args:
        aleatoric: The noise of the likelihood.
        epistemic: The effect of random weights at the mean of the input.
        input: What the uncertainty of the input adds, on its own and together with the weights. It
            is zero for a known input, and negative where the network is much steeper at the mean of
            the input than around it.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(5, 3), stddev=0.1, batch_dims=1)
        bayes.decompose(bayes.BayesLinear(3, 1), x).epistemic
    """

    aleatoric: Tensor
    epistemic: Tensor
    input: Tensor

    @classmethod
    def of(cls, whole: Prediction, known: Prediction) -> "Decomposition":
        """Compare the prediction with that for the input at its mean."""
        added = whole.epistemic - known.epistemic
        added = torch.where(whole.epistemic == known.epistemic, 0, added)  # also where infinite
        return cls(whole.aleatoric, known.epistemic, added)

    @property
    def total(self) -> Tensor:
        """The variance of the prediction."""
        return self.aleatoric + self.epistemic + self.input


def decompose(
    model: nn.Module, x: Tensor | Gaussian, likelihood: Likelihood | None = None,
    method: Inference = DEFAULT,
) -> Decomposition:  # fmt: skip
    """Split the variance of a prediction by its origin: noise, weights, input.

    Let T be the variance of the target's expectation given the outputs (without a likelihood, the
    variance of the network's output), and E the same for the input at its mean. Then epistemic = E
    and input = T - E. The noise is the expected noise of the likelihood, zero without one. With
    draws, T and E are separate estimates, so a small input part needs many draws.

    Args:
        model: The network.
        x: Inputs, as in `predict`.
        likelihood: The distribution of the target given the outputs.
        method: As in `predict`.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(5, 3), stddev=0.1, batch_dims=1)
        parts = bayes.decompose(bayes.BayesLinear(3, 1), x, bayes.HomoskedasticGaussian())
    """
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"likelihood is an object such as bayes.Poisson(), not {likelihood!r}; a method is "
            "given by name, method=..."
        )

    def prediction(inputs: Tensor | Gaussian) -> Prediction:
        if likelihood is not None:
            return _predict_rows(model, likelihood, inputs, method)
        output = predict(model, inputs, method)
        return Prediction(output.mean, torch.zeros_like(output.mean), output.variance)

    whole = prediction(x)
    return Decomposition.of(whole, prediction(x.mean) if isinstance(x, Gaussian) else whole)


def batch_dims(model: nn.Module, x: Tensor | Gaussian) -> int:
    """Count the dimensions before the event: the batch, and the members before it."""
    members = {layer.members for layer in model.modules() if isinstance(layer, BayesLayer)}
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


def lead_shape(x: Tensor | Gaussian, dims: int) -> torch.Size:
    """(data,), or (members, data)."""
    return x.batch_shape if isinstance(x, Gaussian) else x.shape[:dims]


def take(data: Data, rows: Tensor | slice, dims: int) -> Data:
    """Select data by a slice of all members, or by an index (rows,), or (members, rows)."""
    index: Any = rows
    if dims > 1 and isinstance(rows, slice):
        index = (slice(None), rows)
    elif dims > 1 and isinstance(rows, Tensor):
        index = (torch.arange(len(rows), device=rows.device)[:, None], rows)
    return cast(Data, data[index])


def chunks(x: Data, dims: int) -> Iterator[tuple[slice, Data]]:
    """Iterate over slices of rows whose outputs are held together, and their data."""
    lead = lead_shape(x, dims)
    step = max(1, ROWS // (lead[0] if dims > 1 else 1))
    for start in range(0, lead[-1], step):
        rows = slice(start, start + step)
        yield rows, take(x, rows, dims)
