"""How often each class wins, by whichever way a method has gone.

Results of evaluations at points (`cp.QuasiMonteCarlo`, as `cp.Auto` takes it where inputs are few)
are counted: nothing is assumed of the logits. Methods that go from layer to layer propagate the
differences of every two logits beside the logits themselves, so that the skewness and the errors of
these are known where the method knows any.
"""

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from covprop.errors import CovpropError, approximations_ignored
from covprop.gaussian import Gaussian
from covprop.kernels.normal import inverse_deviation
from covprop.kernels.rounding import LOGITS
from covprop.methods import Auto, LayerwiseMethod, Method, Network
from covprop.methods.accuracy import Estimator
from covprop.methods.choice import FEW_DIRECTIONS, POINT_WORK
from covprop.methods.quasi_monte_carlo import QuasiMonteCarlo
from covprop.propagate import checked_call, propagate
from covprop.robustness.classifier import Model
from covprop.robustness.estimates import Probabilities
from covprop.robustness.logits import (
    Logits,
    Randomisation,
    class_numbers,
    softmax_of,
)
from covprop.robustness.pairs import PairError
from covprop.robustness.probabilities import classes_of, misclassification

PAIRED = 24
"""Classes up to which differences of every two are propagated."""
CHECKED, STEP = 1024, 64
"""Points at which the shape of logits is checked, and how many of them at a time."""
COUNTED = 2**14
"""Points that are counted at every step of a search."""
REGRESSED = 64
"""Elements of an input up to which an affine function of it is a control variate."""


@final
@dataclass(frozen=True)
class Decisions:
    """Which class has the largest logit, and the output that tells it.

    logits: their moments. If decisions were counted, shares are those of every set of points,
    (sets, *batch, classes), less those of a control variate whose probabilities are known; and
    softmaxes the average softmax of every set.
    """

    output: Gaussian
    logits: Logits
    points: Randomisation
    shares: Tensor | None = None
    softmaxes: Tensor | None = None
    known: Probabilities | None = None
    evaluations: int = 0
    """Of the network, 0 where it is affine and nothing is left to count."""

    @property
    def counted(self) -> bool:
        """Whether decisions were counted, so that nothing is assumed of the logits."""
        return self.shares is not None

    def classes(self) -> Probabilities:
        """P(class has the largest logit), (*batch, classes)."""
        if self.shares is None:
            return classes_of(self.logits, self.points)
        return self._averaged(self.shares, self.known)

    def misclassification(self, label: int | Tensor) -> Probabilities:
        """P(another class than the label), (*batch,)."""
        if self.shares is None:
            return misclassification(self.logits, label, self.points)
        shape, classes = self.output.batch_shape, self.shares.shape[-1]
        labels = class_numbers(label, shape, classes, self.output.device)[..., None]
        index = labels.expand(len(self.shares), *labels.shape)
        known = self.known and self.known.map(lambda part: part.scatter(-1, labels, 0.0).sum(-1))
        return self._averaged(self.shares.scatter(-1, index, 0.0).sum(-1), known)

    def softmax(self) -> Probabilities:
        """E[softmax(y)], (*batch, classes)."""
        if self.softmaxes is None:
            return softmax_of(self.logits, self.points)
        return self._averaged(self.softmaxes, None)

    def _averaged(self, sets: Tensor, known: Probabilities | None) -> Probabilities:
        """With the standard error of the sets; no number of points makes a share certain."""
        value, stderr = sets.mean(0), sets.std(0) / len(sets) ** 0.5
        if self.evaluations:
            stderr = stderr.clamp(min=1 / (self.evaluations + 2))
        if known is not None:
            value = (value + known.probability).clamp(0, 1)
            stderr = torch.hypot(stderr, known.stderr.double())
        found = Probabilities(value, stderr, torch.zeros_like(stderr))
        return found.map(lambda tensor: tensor.to(self.output.dtype))


@torch.no_grad()
def decide(
    model: Model, x: Gaussian, method: Method, points: Randomisation, with_error: bool = False
) -> Decisions:
    """Propagate, and find which class wins; with_error: estimate its error if that is not known."""
    output = propagate(model, x, method=method)
    logits = Logits.of(output)
    used = _counting(model, x, method) or output.method
    if isinstance(used, QuasiMonteCarlo):
        return _counted(model, x, output, used, points)
    if with_error and output.mixture is None:
        output.error  # noqa: B018  (it is made when it is asked for)
        logits = Logits.of(output)
    if isinstance(used, LayerwiseMethod) and logits.classes <= PAIRED:
        if output.event_shape.numel() > 1:  # else the logit itself is the difference
            logits = _paired(model, x, used, logits, with_error)
        if logits.error is not None:
            logits = replace(logits, error=_with_shape(model, x, logits, logits.error))
    return Decisions(output, logits, points)


def _counting(model: Model, x: Gaussian, method: Method) -> QuasiMonteCarlo | None:
    """Points for `cp.Auto` where the noise has few directions and evaluations are cheap.

    Decisions need more than moments, which layers may give exactly.
    """
    if not isinstance(method, Auto):
        return None
    call, _ = checked_call(model, (x,), method, {})
    estimator = Estimator(call, method.seed)
    if estimator.network is None or not 0 < estimator.directions <= FEW_DIRECTIONS:
        return None
    points = QuasiMonteCarlo(seed=method.seed)
    return points if points.points * estimator.network.work <= POINT_WORK else None


@torch.no_grad()
def method_at(model: Model, x: Gaussian, method: Method) -> Method:
    """The method that `cp.Auto` takes for an input, with fewer points where it takes many."""
    used = _counting(model, x, method) or propagate(model, x, method=method).method
    if isinstance(used, QuasiMonteCarlo):
        return replace(used, points=min(used.points, COUNTED))
    return used if isinstance(used, Method) else method


def _counted(
    model: Model, x: Gaussian, output: Gaussian, method: QuasiMonteCarlo, points: Randomisation
) -> Decisions:
    """The share of every class at the points of a result.

    Of inputs with few elements, with the nearest affine function of the input as control variate
    where that helps: its probabilities are known, and counted is where the network decides
    otherwise.
    """
    rows, small = x.batch_shape.numel(), x.event_shape.numel() <= REGRESSED
    network = Network(_WithInput(model) if small else model, [x])
    sets = [
        (weights, _compared(logits.reshape(len(logits), rows, -1)), rest)
        for weights, (logits, *rest) in method.values(network, lambda *_: None)
    ]
    shares = [_average(weights, _winners(logits)) for weights, logits, _ in sets]
    softmaxes = [_average(weights, logits.softmax(-1)) for weights, logits, _ in sets]
    found, known, rounding = torch.stack(shares), None, 0.0
    if small:
        inputs = [(weights, logits, rest[0].reshape(len(logits), rows, -1))
                  for weights, logits, rest in sets]  # fmt: skip
        affine = _Affine.fitted(x, inputs)
        at_points = [(weights, affine(own)) for weights, _, own in inputs]
        other = found - torch.stack([_average(weights, _winners(y)) for weights, y in at_points])
        helps = other.var(0).sum(-1, keepdim=True) < found.var(0).sum(-1, keepdim=True)
        helps |= (other == 0).all(0).all(-1, keepdim=True)
        found = torch.where(helps, other, found)
        known = classes_of(affine.logits(output), points)
        known = known.map(lambda part: torch.where(helps.reshape(*x.batch_shape, 1), part, 0))
        largest = max(float(logits.abs().max()) for _, logits, _ in sets)
        rounding = LOGITS * torch.finfo(output.dtype).eps * largest
        difference = max(
            float((y - logits).abs().max())
            for (_, y), (_, logits, _) in zip(at_points, sets, strict=True)
        )
    shape = (len(found), *x.batch_shape, -1)
    return Decisions(
        output, Logits.of(output), points, found.reshape(shape),
        torch.stack(softmaxes).reshape(shape), known,
        0 if known is not None and difference <= rounding else method.evaluations,
    )  # fmt: skip


def _compared(logits: Tensor) -> Tensor:
    """A single logit is compared with 0."""
    return functional.pad(logits, (1, 0)) if logits.shape[-1] == 1 else logits


def _winners(logits: Tensor) -> Tensor:
    """1 for the largest, or equal parts for those that tie."""
    best = (logits == logits.amax(-1, keepdim=True)).double()
    return best / best.sum(-1, keepdim=True)


def _average(weights: Tensor, values: Tensor) -> Tensor:
    return torch.einsum("k,k...->...", weights, values)


class _WithInput(nn.Module):
    """A classifier that returns its input beside its output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x.clone()), x


@final
@dataclass(frozen=True)
class _Affine:
    """m + B (x - mu): of all affine functions that nearest to the logits, for each of the rows."""

    centre: Tensor
    mean: Tensor
    slope: Tensor
    covariance: Tensor

    @classmethod
    def fitted(cls, x: Gaussian, sets: list[tuple[Tensor, Tensor, Tensor]]) -> "_Affine":
        """B = Cov[y, x] Cov[x]^+ over the points, whose moments are those of the input."""
        rows, size = x.batch_shape.numel(), x.event_shape.numel()
        centre = x.mean.double().reshape(rows, size)
        mean = torch.stack([_average(weights, y) for weights, y, _ in sets]).mean(0)
        cross = sum(
            torch.einsum("k,kri,krj->rij", weights, y - mean, own - centre)
            for weights, y, own in sets
        )
        matrix = x.covariance_matrix.double().reshape(rows, size, size)
        slope = (cross / len(sets)) @ torch.linalg.pinv(matrix, hermitian=True)
        return cls(centre, mean, slope, slope @ matrix @ slope.mT)

    def __call__(self, points: Tensor) -> Tensor:
        """Values (count, rows, classes) at points (count, rows, n)."""
        return self.mean + torch.einsum("rij,krj->kri", self.slope, points - self.centre)

    def logits(self, output: Gaussian) -> Logits:
        """Their moments, which are exact."""
        return Logits(self.mean, self.covariance, output.batch_shape, output.dtype)


def _with_shape(model: Model, x: Gaussian, logits: Logits, error: PairError) -> PairError:
    """The error with what evaluations at points say of the third and fourth cumulants of pairs."""
    network = Network(model, [x])
    if not len(network.outputs) or not bool((x.covariance.diagonal() > 0).any()):
        return error
    method = QuasiMonteCarlo(CHECKED)
    mean = logits.mean[:, :, None] - logits.mean[:, None, :]
    variance = logits.covariance.diagonal(dim1=-2, dim2=-1)
    between = variance[:, :, None] + variance[:, None, :] - 2 * logits.covariance
    inverse = inverse_deviation(between)
    third, fourth = torch.zeros_like(mean), torch.zeros_like(mean)
    sets = 0
    for weights, (values, *_) in method.values(network, lambda *_: None):
        own = functional.pad(values, (1, 0)) if values.shape[-1] == 1 else values
        own = own.reshape(len(own), *logits.mean.shape)
        for weight, part in zip(weights.split(STEP), own.split(STEP), strict=True):
            z = (part[..., :, None] - part[..., None, :] - mean) * inverse
            third += torch.einsum("k,k...->...", weight, z**3)
            fourth += torch.einsum("k,k...->...", weight, z**4)
        sets += 1
    varies = inverse > 0
    third, fourth = third / sets, torch.where(varies, fourth / sets - 3, 0)
    if logits.skewness is None:
        return replace(error, skewness=third.abs(), kurtosis=fourth.abs())
    chance = 2 * (6 / method.evaluations) ** 0.5
    skewness = ((third - logits.skewness).abs() - chance).clamp(min=0)
    kurtosis = (fourth - 1.5 * logits.skewness.square()).abs()
    return replace(error, skewness=torch.where(varies, skewness, 0), kurtosis=kurtosis)


class _WithDifferences(nn.Module):
    """A classifier whose output has the differences of every two logits beside the logits."""

    def __init__(self, model: Any, matrix: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("matrix", matrix)

    def forward(self, x: Any) -> Any:
        return functional.linear(self.model(x), self.matrix)  # type: ignore[arg-type]


def _paired(
    model: Model, x: Gaussian, method: LayerwiseMethod, logits: Logits, with_error: bool
) -> Logits:
    """Skewness and error of differences from a propagation of them, if there are any."""
    if not method.uses_skewness and not with_error:
        return logits
    classes, rows = logits.classes, len(logits.mean)
    identity = torch.eye(classes, dtype=x.dtype, device=x.device)
    first, second = torch.triu_indices(classes, classes, 1, device=x.device)
    matrix = torch.cat([identity, identity[first] - identity[second]])
    try:
        with approximations_ignored():
            call, _ = checked_call(_WithDifferences(model, matrix), (x,), method, {}, errors=True)
            found = method.run(call)
    except CovpropError:  # too large, or the classes are not in its last dimension
        return logits

    def pairs(values: Tensor, sign: float) -> Tensor:
        own = values.detach().double().reshape(rows, -1)[:, classes:]
        full = own.new_zeros(rows, classes, classes)
        full[:, first, second], full[:, second, first] = own, sign * own
        return full

    if found.skewness is not None:
        logits = replace(logits, skewness=pairs(found.skewness, -1.0))
    if with_error and (error := found.error) is not None:
        parts = (pairs(part, 1.0).nan_to_num(torch.inf) for part in (error.mean, error.stddev))
        logits = replace(logits, error=PairError(*parts))
    return logits
