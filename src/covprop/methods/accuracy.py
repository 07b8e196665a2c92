"""How far a result may be off: from the gap between orders, and from evaluations of the network.

`docs/trust-reference.md` has the reasons, the calibration and how well it holds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from covprop.carriers.third_cumulant import EXPANDED, PARTLY
from covprop.error_estimate import ROUNDINGS, STANDARD_ERRORS, ErrorEstimate, quotient
from covprop.errors import CovpropError, approximations_ignored
from covprop.flow.lineage import Lineage
from covprop.flow.nests import leaves
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.kernels.normal import standard_deviation
from covprop.methods.base import Method
from covprop.methods.call import Call
from covprop.methods.control import ControlVariate
from covprop.methods.cumulants import Cumulants
from covprop.methods.layerwise import GaussianLayers, LayerwiseMethod
from covprop.methods.network import Network
from covprop.methods.quasi_monte_carlo import (
    REPLICATES,
    WIDENED_PAIRS,
    WIDENED_WIDTH,
    QuasiMonteCarlo,
    heavy_tailed,
    largest_terms,
    weighted_mean,
)
from covprop.methods.root import Root
from covprop.methods.sketched import Sketched
from covprop.modules import module_names, running_module

AGREEMENT = 1e-6
"""The gap between orders up to which layers count as exact, so that points that differ are not."""
NEGLIGIBLE = 1e-6
"""The part of the largest standard deviation of a result that does not count."""
SURELY = 1.5
"""By how much larger than likely a difference by chance is that refutes an expected error: 2.4 by
1.5 standard errors have a probability of 1 %."""
CHECK_POINTS, FEW_POINTS = 8192, 64
"""Those of a check, and where evaluations are expensive."""
OVERHEAD = 2.0**28
"""Floating-point operations in the time that the calls of torch take in a small network."""
HELD = 2**22
"""Numbers of the outputs at all points of a check."""
LAYER_WORK, CHECK_WORK = 2.0**35, 2.0**32
"""Floating-point operations that a method may take which goes from layer to layer, and samples that
check it."""
LAYERS = 2.0
"""Gaps between them and third cumulants within which 84 % of the errors of Gaussian layers were."""
CUMULANTS, EXPANSION = 1.0, 10.0
"""84 % of errors of third cumulants were within the gap times (the first + the second gaps): an
expansion whose first term is large is not accurate."""


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
        return cls(mean, stddev, *y.sampling_error.likely(y.mean, stddev))

    @classmethod
    def of_sets(
        cls, weights: Tensor, values: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> "Moments":
        """Of values (sets, count, *batch, m) at sets of points with weights (sets, count)."""
        means = weighted_mean(values, weights)
        mean = means.mean(0)
        parts = torch.einsum("sk,sk...->sk...", weights, (values - mean).square())
        squares = parts.sum(1)
        stddev = squares.mean(0).sqrt()
        tails = heavy_tailed(largest_terms(parts), squares.sum(0), weights.numel())
        root = STANDARD_ERRORS / len(weights) ** 0.5
        rounding = ROUNDINGS * torch.finfo(dtype).eps * mean.abs()
        found = (
            mean,
            stddev,
            means.std(0) * root + rounding,
            torch.where(tails, torch.inf, quotient(squares.std(0) * root, 2 * stddev) + rounding),
        )
        return cls(*(part.reshape(shape) for part in found))


def for_all(count: int) -> float:
    """By how much larger errors by chance are of which 19 of 20 times *all* of so many are within.

    Student's distribution with seven degrees of freedom falls as p = t^-7 in its tails; between
    1 and a million, count^0.19 is its quantile to 10 %.
    """
    return max(1, count) ** 0.19


def cross_checked(
    points: ErrorEstimate, y: Gaussian, layers: Gaussian, expected: ErrorEstimate
) -> ErrorEstimate:
    """The error of points, given a result from layer to layer and its error by the gap of orders.

    Where the orders agree, so that layers are exact, points that differ have missed something, as
    events rarer than they are, or have lost it by rounding: the difference adds to their error.
    What is constant at all points and hardly varies by layers is known well enough.
    """
    own, other = Moments.of(y), Moments.of(layers)
    if not own.mean.numel():
        return points

    def largest(values: Tensor) -> Tensor:  # of one output, a gap may be small by chance
        found = values.double().reshape(*y.batch_shape, y.event_shape.numel()).amax(-1)
        return found.reshape((*y.batch_shape, *(1 for _ in y.event_shape)))

    exact = largest(torch.maximum(expected.mean, expected.stddev)) <= AGREEMENT
    constant = (own.stddev == 0) & (other.stddev <= NEGLIGIBLE * largest(other.stddev))

    def corrected(error: Tensor, difference: Tensor) -> Tensor:
        difference = quotient(difference.abs(), torch.minimum(own.stddev, other.stddev))
        error = torch.where(exact, error.double() + difference, error.double())
        return torch.where(constant, 0.0, error).to(y.dtype)

    return ErrorEstimate(
        corrected(points.mean, own.mean - other.mean),
        corrected(points.stddev, own.stddev - other.stddev),
        points.basis,
    )


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
        """Errors of a result by the gap between orders alone, where no operation fell back."""
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
        roots = map(Root.of_full_rank, self.call.inputs) if not self.network else self.network.roots
        return sum(root.width for root in roots)

    @property
    def matched_points(self) -> int:
        """So many points that each set can have the covariance of the input, and tails if few."""
        pairs = WIDENED_PAIRS if self.directions <= WIDENED_WIDTH else 2
        return 2 * REPLICATES * pairs * self.directions

    def errors(
        self, nest: Any, method: Method, work: float = 0.0, points: Any = None
    ) -> tuple[ErrorEstimate, ...]:
        """Of the Gaussians in a result.

        work: what it took, which a check may take as well; points: evaluations, for the check.
        """
        found = gaussians(nest)
        other, other_work = self._other_order(method)
        checked: list[Moments] | None = [Moments.of(y) for y in gaussians(points)]
        if len(checked or ()) != len(found):
            checked = self._controlled_check(method, len(found)) if other is None else None
            checked = checked or self._check(len(found), max(work, other_work))
        if other and not self.fell_back:
            pairs = zip(found, other, strict=True)
            self.expected = [_combined(y, method, second, None) for y, second in pairs]
        errors = [
            _combined(y, method, other[i] if other else None, checked[i] if checked else None)
            for i, y in enumerate(found)
        ]
        return tuple(
            replace(error, mean=error.mean + floor.mean)
            for error, floor in zip(errors, self.by_rounding(found), strict=True)
        )

    def by_rounding(self, found: Sequence[Gaussian]) -> list[ErrorEstimate]:
        """What of errors is rounding, which no order and no more points make smaller.

        That of evaluations, where it is known; layers take as many steps. Constants have no error.
        """
        network = self.network
        known = network is not None and len(network.outputs) == len(found)
        floors = []
        for place, y in enumerate(found):
            bits = network.rounding_of(place, y) if network is not None and known else 0.0
            own = ROUNDINGS * torch.finfo(y.dtype).eps * y.mean.detach().double().abs()
            stddev = y.stddev.detach().double()
            floor = quotient(torch.where(stddev > 0, own + bits, 0), stddev).to(y.dtype)
            floors.append(ErrorEstimate(floor, floor, "from rounding"))
        return floors

    @torch.no_grad()
    def _other_order(self, method: Method) -> tuple[list[Gaussian] | None, float]:
        """The result with third cumulants, or, if it is that one, without; and what it took."""
        if not isinstance(method, LayerwiseMethod) or isinstance(method, Sketched):
            return None, 0.0
        second = GaussianLayers(method.activations) if method.third_cumulants else Cumulants()
        if (work := self.work(second)) > LAYER_WORK:
            return None, 0.0
        with approximations_ignored() as texts:
            try:
                found = gaussians(second.passes(self.call))
            except CovpropError:
                return None, 0.0
        self.fell_back |= bool(texts) or any(PARTLY in y.notes for y in found)
        return found, work

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
        gaussian, skewed = (one.passes or [{}] for one in seen)
        for path, first in gaussian[0].items():
            second = skewed[0].get(path, first)
            if first[0].shape != second[0].shape or not first[0].numel():
                continue  # a layer that one takes as a whole, the other in operations
            difference = [(a - b).abs() for a, b in zip(first, second, strict=True)]
            if any(float(quotient(one, second[1]).max()) > limit for one in difference):
                return path
        # A second pass, without third cumulants, follows one that could not go on.
        return next(reversed(skewed[0])) if len(skewed) > 1 else None

    def _check(self, outputs: int, work: float) -> list[Moments] | None:
        """Moments at points: as many as take no more time than layers do, else a few dozen."""
        network = self.network
        if network is None or len(network.outputs) != outputs:
            return None
        if not self.directions and not network.draws:  # every point would give the same
            return None
        count, held = FEW_POINTS, sum(output.shape.numel() for output in network.outputs)
        if network.vectorised and held:
            count = int(min(CHECK_POINTS, max(work, OVERHEAD) / network.work, HELD // held))
        method = QuasiMonteCarlo(count if count >= self.matched_points else FEW_POINTS, self.seed)
        try:
            blocks = list(method.blocks(network, self.call.advance))
        except Exception:  # whatever a model has against points that are not the mean
            return None
        weights = torch.cat([weights for weights, _ in blocks])
        return [
            Moments.of_sets(
                weights,
                torch.cat([values[i] for _, values in blocks]),
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
            plan = method.plan(self.call)
        except CovpropError:
            return 0.0  # it says what is wrong when it runs
        return plan.work if plan.fits else math.inf


def _combined(
    y: Gaussian, method: Method, second: Gaussian | None, check: Moments | None
) -> ErrorEstimate:
    """What follows from the gap between orders, within what the check leaves possible."""
    own = Moments.of(y)
    mean = stddev = None
    bases = []
    blind = check is None or not bool(check.stddev.isfinite().all())
    if blind and second is not None and EXPANDED in (*y.notes, *second.notes):
        second = check = None  # both orders have the same expansion
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
        bases.append("two orders of approximation")
    if check is not None and check.mean.shape == y.mean.shape:
        mean = _within(mean, (own.mean - check.mean).abs(), check.mean_error, check.stddev)
        gap = (own.stddev - check.stddev).abs()
        stddev = _within(stddev, gap, check.stddev_error, check.stddev)
        bases.append("evaluations of the model")
    if mean is None or stddev is None:
        unknown = torch.full_like(own.mean, torch.nan)
        return ErrorEstimate(unknown, unknown, "nothing to compare with")
    if y.sampling_error is not None:
        mean = mean + quotient(own.mean_error, own.stddev)
        stddev = stddev + quotient(own.stddev_error, own.stddev)
    return ErrorEstimate(mean.to(y.dtype), stddev.to(y.dtype), "from " + " and ".join(bases))


def _within(expected: Tensor | None, difference: Tensor, chance: Tensor, stddev: Tensor) -> Tensor:
    """The expected error, as far as a check allows it.

    difference: by how much the check differs; chance: by how much it may differ by chance. Where it
    differs by more than the expected error and chance explain, that is refuted. Where the check
    does not vary, the output may do so beyond its points, and the check says nothing.
    """
    difference, chance = quotient(difference, stddev), quotient(chance, stddev)
    if expected is None:
        return difference + chance
    refuted = difference - SURELY * for_all(difference.numel()) * chance > expected
    possible = torch.where(
        refuted, difference + chance, torch.minimum(expected, difference + chance)
    )
    return torch.where(stddev > 0, possible, expected)


class _Seen:
    """Watches propagations: means and standard deviations where a module is left.

    Not behind every operation: a method may take many in one step, as those of a recurrent layer.
    """

    def __init__(self, module: object) -> None:
        self._names = module_names(module)
        self._lineage: Lineage | None = None
        self.passes: list[dict[str, tuple[Tensor, Tensor]]] = []

    def run(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        proceed: Callable[[], Any],
    ) -> Any:  # fmt: skip
        """One operation; functions that are pending are seen behind the next one."""
        del function, args, kwargs
        result = proceed()
        for leaf in leaves(result):
            if isinstance(leaf, GaussianTensor) and not leaf.is_pending:
                if leaf.lineage is not self._lineage:
                    self._lineage = leaf.lineage
                    self.passes.append({})
                path, seen = running_module(self._names), self.passes[-1]
                seen.pop(path, None)  # in the order in which modules are left
                seen[path] = (leaf.flat, standard_deviation(leaf.variances))
        return result

    def advance(self, share: float) -> None:
        """Nothing is noted inside of an operation."""
