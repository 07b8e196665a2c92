"""How far a result may be off: from the gap between orders, and from evaluations of the network.

`docs/trust-reference.md` has the reasons, the calibration and how well it holds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from covprop.error_estimate import ErrorEstimate
from covprop.errors import CovpropError, approximations_ignored
from covprop.flow.nests import leaves
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.kernels.normal import standard_deviation
from covprop.methods.base import LayerwiseMethod, Method
from covprop.methods.call import Call, planned
from covprop.methods.control import ControlVariate
from covprop.methods.cumulants import Cumulants
from covprop.methods.gaussian_layers import GaussianLayers
from covprop.methods.network import Network
from covprop.methods.quasi_monte_carlo import (
    REPLICATES,
    WIDENED_PAIRS,
    WIDENED_WIDTH,
    QuasiMonteCarlo,
    weighted_mean,
)
from covprop.methods.root import Root
from covprop.methods.sketched import Sketched
from covprop.modules import module_names, running_module

STUDENT = 2.4
"""Standard errors of eight sets of points within which 19 of 20 errors are."""
AGREEMENT = 1e-6
"""The gap between orders up to which layers count as exact, and points that differ are doubted."""
NEGLIGIBLE = 1e-6
"""The part of the largest standard deviation of a result that does not count."""
FEW_POINTS = 64
"""Those of a check where evaluations are expensive."""
ROUNDINGS = 4.0
"""Last bits by which evaluations of a network are off."""
LAYER_WORK, CHECK_WORK = 2.0**35, 2.0**32
"""Floating-point operations that a method may take which goes from layer to layer, and samples that
check it."""
LAYERS = 2.0
"""Gaps between them and third cumulants within which 84 % of the errors of Gaussian layers were."""
CUMULANTS, EXPANSION = 1.0, 10.0
"""84 % of errors of third cumulants were within the gap times (the first + the second gaps): an
expansion whose first term is large tells little."""


@final
@dataclass(frozen=True)
class Moments:
    """Means and standard deviations of an output, and how far they may be off by chance."""

    mean: Tensor
    stddev: Tensor
    mean_error: Tensor
    stddev_error: Tensor

    @classmethod
    def of(cls, y: Gaussian) -> "Moments":
        """Those of a result that was sampled, or of one without such errors."""
        mean, stddev = y.mean.detach().double(), y.stddev.detach().double()
        if y.sampling_error is None:
            return cls(mean, stddev, torch.zeros_like(mean), torch.zeros_like(mean))
        rounding = ROUNDINGS * torch.finfo(y.dtype).eps * mean.abs()
        variance = y.sampling_error.covariance.detach().double().diagonal(dim1=-2, dim2=-1)
        of_stddev = quotient(variance.reshape(mean.shape), 2 * stddev)
        of_mean = y.sampling_error.mean.detach().double()
        return cls(mean, stddev, STUDENT * of_mean + rounding, STUDENT * of_stddev + rounding)

    @classmethod
    def of_sets(
        cls, weights: Sequence[Tensor], values: Sequence[Tensor], shape: torch.Size,
        dtype: torch.dtype,
    ) -> "Moments":  # fmt: skip
        """From the values (count, *batch, m) of every set of points and their weights."""
        sets = list(zip(weights, values, strict=True))
        means = torch.stack([weighted_mean(value, w) for w, value in sets])
        mean = means.mean(0)
        squares = torch.stack(
            [torch.einsum("k,k...->...", w, (value - mean).square()) for w, value in sets]
        )
        stddev = squares.mean(0).sqrt()
        root = STUDENT / len(values) ** 0.5
        rounding = ROUNDINGS * torch.finfo(dtype).eps * mean.abs()
        found = (
            mean,
            stddev,
            means.std(0) * root + rounding,
            quotient(squares.std(0) * root, 2 * stddev) + rounding,
        )
        return cls(*(part.reshape(shape) for part in found))


def for_all(count: int) -> float:
    """By how much larger errors by chance are of which 19 of 20 times *all* of so many are within.

    Student's distribution with seven degrees of freedom falls as p = t^-7 in its tails; between
    count = 1 and a million, count^0.19 is its quantile to 10 %.
    """
    return max(1, count) ** 0.19


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 / 0 = 0, and infinite where something is divided by nothing."""
    safe = torch.where(denominator > 0, denominator, 1)
    nothing = torch.where(numerator > 0, torch.inf, 0.0).to(numerator)
    return torch.where(denominator > 0, numerator / safe, nothing)


def error_of_points(y: Gaussian, rounding: Tensor | None = None) -> ErrorEstimate:
    """That of evaluations at points, from the spread of the sets.

    An output that is the same at all points may vary beyond them: nothing is known of its error.
    rounding: that of evaluations, in the shape of the mean.
    """
    moments = Moments.of(y)
    if rounding is not None:
        more = (moments.mean_error + rounding, moments.stddev_error + rounding)
        moments = Moments(moments.mean, moments.stddev, *more)
    unknown = torch.where(moments.stddev > 0, 0.0, torch.inf)
    count = "" if y.samples is None else f"{y.samples:,} "
    return ErrorEstimate(
        quotient(moments.mean_error, moments.stddev) + unknown,
        quotient(moments.stddev_error, moments.stddev) + unknown,
        f"from the spread of {count}evaluations",
    )


def cross_checked(
    points: ErrorEstimate, y: Gaussian, layers: Gaussian, expected: ErrorEstimate
) -> ErrorEstimate:
    """The error of points, given a result from layer to layer and its error by the gap of orders.

    Where the orders agree, so that layers are exact, points that differ have missed something, as
    events rarer than they are, or have lost it by rounding: the difference is their error. What is
    constant at all points and hardly varies by layers is known well enough.
    """
    own, other = Moments.of(y), Moments.of(layers)
    if not own.mean.numel():
        return points

    def largest(values: Tensor) -> Tensor:  # of one output, a gap may be small by chance
        found = values.double().flatten(len(y.batch_shape)).amax(-1)
        return found.reshape(*y.batch_shape, *(1 for _ in y.event_shape))

    exact = largest(torch.maximum(expected.mean, expected.stddev)) <= AGREEMENT
    constant = (own.stddev == 0) & (other.stddev <= NEGLIGIBLE * largest(other.stddev))

    def doubted(error: Tensor, apart: Tensor) -> Tensor:
        apart = quotient(apart.abs(), torch.minimum(own.stddev, other.stddev))
        error = torch.where(exact, torch.maximum(error.double(), apart), error)
        return torch.where(constant, 0.0, error).to(y.dtype)

    means, stddevs = own.mean - other.mean, own.stddev - other.stddev
    return ErrorEstimate(doubted(points.mean, means), doubted(points.stddev, stddevs), points.basis)


def gaussians(nest: Any) -> list[Gaussian]:
    """The Gaussians in a nest, in order."""
    return [leaf for leaf in leaves(nest) if isinstance(leaf, Gaussian)]


class Estimator:
    """One call, and what other methods and evaluations of the network say of its result."""

    def __init__(self, call: Call, seed: int = 0) -> None:
        """Nothing is evaluated yet."""
        self.call, self.seed = call.on(call.inputs), seed
        self.fell_back = False
        """Whether an operation had to take its input as Gaussian, or warned of something else."""
        self.expected: list[ErrorEstimate] = []
        """Errors of a result by the gap between orders alone, where that tells something."""
        self.controlled: Any = None
        """The result of samples with a method as control variate, where they were its check."""

    @cached_property
    def network(self) -> Network | None:
        """The model as a function of tensors, None where it is none."""
        if any(x.covariance.distributed for x in self.call.inputs):
            return None
        try:
            network = Network(self.call.on_tensors, self.call.inputs)
        except Exception:  # a module may raise anything
            return None
        return network if network.outputs else None

    @cached_property
    def directions(self) -> int:
        """Independent directions of the noise of the inputs."""
        return sum(Root.of_full_rank(x).width for x in self.call.inputs)

    @property
    def matched_points(self) -> int:
        """So many points that each set can have the covariance of the input, and tails if few."""
        pairs = WIDENED_PAIRS if self.directions <= WIDENED_WIDTH else 2
        return 2 * REPLICATES * pairs * self.directions

    def errors(
        self, nest: Any, method: Method, work: float = 0.0, points: Any = None
    ) -> tuple[ErrorEstimate, ...]:
        """Of the Gaussians in a result.

        work: what it took, which a check may take as well; points: the result of evaluations, if
        there is one, which is the check then.
        """
        found = gaussians(nest)
        other = self._other_order(method)
        checked: list[Moments] | None = [Moments.of(y) for y in gaussians(points)]
        if len(checked or ()) != len(found):
            checked = self._controlled_check(method, len(found)) if other is None else None
            checked = checked or self._check(len(found), work)
        if other and not self.fell_back:
            self.expected = [
                _combined(y, method, second, None) for y, second in zip(found, other, strict=True)
            ]
        return tuple(
            _combined(y, method, other[i] if other else None, checked[i] if checked else None)
            for i, y in enumerate(found)
        )

    @torch.no_grad()
    def _other_order(self, method: Method) -> list[Gaussian] | None:
        """The result with third cumulants, or, if that is the one in question, without."""
        if not isinstance(method, LayerwiseMethod) or isinstance(method, Sketched):
            return None
        second = GaussianLayers(method.activations) if method.third_cumulants else Cumulants()
        if self.work(second) > LAYER_WORK:
            return None
        with approximations_ignored() as texts:
            try:
                found = gaussians(second.run(self.call))
            except CovpropError:
                return None
        self.fell_back |= bool(texts)
        return found

    @torch.no_grad()
    def rough_module(self, limit: float) -> str | None:
        """The first module behind which the gap between orders is beyond a limit."""
        if not isinstance(self.call.module, nn.Module):
            return None
        methods, seen = (GaussianLayers(), Cumulants()), []
        if any(self.work(method) > LAYER_WORK for method in methods):
            return None
        for method in methods:
            seen.append(_Seen(self.call.module))
            with approximations_ignored():
                try:
                    method.traverse(self.call, seen[-1])
                except CovpropError:
                    return None
        for (path, *first), (_, *second) in zip(*(one.found for one in seen), strict=False):
            apart = [(a - b).abs() for a, b in zip(first, second, strict=True)]
            gaps = [quotient(one, second[1]) for one in apart if one.numel()]
            if any(float(gap.max()) > limit for gap in gaps):
                return path
        return None

    def _check(self, outputs: int, work: float) -> list[Moments] | None:
        """Moments at points: many where the work allows it, else a few dozen."""
        network = self.network
        if network is None or not self.directions or len(network.outputs) != outputs:
            return None
        matched = self.matched_points
        cheap = network.vectorised and matched * network.work <= max(work, 2.0**26)
        method = QuasiMonteCarlo(matched if cheap else FEW_POINTS, self.seed)
        try:
            sets = list(method.values(network, self.call.advance))
        except Exception:  # whatever a model has against points that are not the mean
            return None
        weights = [weights for weights, _ in sets]
        return [
            Moments.of_sets(
                weights,
                [values[i] for _, values in sets],
                torch.Size((*network.batch_shape, *output.event_shape)),
                output.dtype,
            )
            for i, output in enumerate(network.outputs)
        ]

    def _controlled_check(self, method: Method, outputs: int) -> list[Moments] | None:
        """Samples with the method itself as control variate, which has no order beside it."""
        if self.network is None or self.network.draws or not isinstance(method, LayerwiseMethod):
            return None
        samples = int(min(2048, max(256, CHECK_WORK / self.network.work)))
        samples = samples if self.network.vectorised else 256
        generator = torch.Generator(self.call.device).manual_seed(self.seed)
        try:
            self.controlled = ControlVariate(samples, method, generator).run(self.call)
        except CovpropError:
            return None
        sampled = gaussians(self.controlled)
        return [Moments.of(y) for y in sampled] if len(sampled) == outputs else None

    def work(self, method: LayerwiseMethod) -> float:
        """What a method takes by its plan, infinite where memory does not suffice."""
        try:
            plan = planned(self.call, method)
        except CovpropError:
            return 0.0  # it says what is wrong when it runs
        return plan.work if plan.fits else math.inf


def _combined(
    y: Gaussian, method: Method, second: Gaussian | None, check: Moments | None
) -> ErrorEstimate:
    """What the gap between orders tells, within what the check leaves possible."""
    own = Moments.of(y)
    mean = stddev = None
    bases = []
    if second is not None and second.mean.shape == y.mean.shape:
        other = Moments.of(second)
        third = isinstance(method, LayerwiseMethod) and method.third_cumulants
        better = own if third else other
        mean = quotient((own.mean - other.mean).abs(), better.stddev)
        stddev = quotient((own.stddev - other.stddev).abs(), better.stddev)
        if third:
            mean, stddev = (gap * (CUMULANTS + EXPANSION * gap) for gap in (mean, stddev))
        else:
            mean, stddev = LAYERS * mean, LAYERS * stddev
        bases.append("the gap between orders")
    if check is not None and check.mean.shape == y.mean.shape:
        mean = _within(mean, (own.mean - check.mean).abs(), check.mean_error, check.stddev)
        stddev = _within(
            stddev, (own.stddev - check.stddev).abs(), check.stddev_error, check.stddev
        )
        bases.append("a check at points")
    if mean is None or stddev is None:
        unknown = torch.full_like(own.mean, torch.nan)
        return ErrorEstimate(unknown, unknown, "nothing to compare with")
    if y.sampling_error is not None:
        mean = mean + quotient(own.mean_error, own.stddev)
        stddev = stddev + quotient(own.stddev_error, own.stddev)
    return ErrorEstimate(mean.to(y.dtype), stddev.to(y.dtype), "from " + " and ".join(bases))


def _within(expected: Tensor | None, apart: Tensor, chance: Tensor, stddev: Tensor) -> Tensor:
    """An expected error, as far as a check allows it that is so far apart, and by chance so far.

    Where the check does not vary, the output may do so beyond its points, and nothing is known.
    """
    apart, chance = quotient(apart, stddev), quotient(chance, stddev)
    if expected is None:
        return apart + chance
    least = apart - for_all(apart.numel()) * chance
    possible = torch.maximum(torch.minimum(expected, apart + chance), least)
    return torch.where(stddev > 0, possible, expected)


class _Seen:
    """Watches a propagation, and notes means and standard deviations behind every operation."""

    def __init__(self, module: object) -> None:
        self._names = module_names(module)
        self.found: list[tuple[str, Tensor, Tensor]] = []

    def run(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        proceed: Callable[[], Any],
    ) -> Any:  # fmt: skip
        """One operation; functions that are pending are seen behind the next one."""
        del function, args, kwargs
        result = proceed()
        for leaf in leaves(result):
            if isinstance(leaf, GaussianTensor) and not leaf.is_pending:
                stddev = standard_deviation(leaf.variances)
                self.found.append((running_module(self._names), leaf.flat, stddev))
        return result
