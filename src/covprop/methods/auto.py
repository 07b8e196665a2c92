"""The default: chooses a method, and says how far its answer may be off."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, final

import torch

from covprop.covariance import Dense
from covprop.error_estimate import ErrorEstimate, in_deviations, in_percent
from covprop.errors import (
    ApproximationWarning,
    UnsupportedOperation,
    approximations_ignored,
    warn_user,
)
from covprop.flow.nests import leaves, map_leaves
from covprop.gaussian import Gaussian
from covprop.methods.accuracy import (
    LAYER_WORK,
    Estimator,
    cross_checked,
    error_of_points,
    gaussians,
)
from covprop.methods.base import Gains, LayerwiseMethod, Method
from covprop.methods.call import Call, random_state_kept
from covprop.methods.cumulants import Cumulants
from covprop.methods.gaussian_layers import GaussianLayers
from covprop.methods.quasi_monte_carlo import QuasiMonteCarlo
from covprop.methods.sketched import Sketched

FEW = 8
"""Independent directions of noise up to which points are taken first."""
GOOD, FAIR, ROUGH = 0.005, 0.02, 0.05
"""Estimated errors: below the first, points are enough; below the second, an answer from layer to
layer is; above the third there is a warning."""
PREFERENCE = 0.8
FIRST_POINTS, MOST_POINTS, MOST_SHARES = 4096, 2**20, 16
POINT_WORK, TOLERANCE_WORK = 2.0**32, 2.0**37
"""Floating-point operations that evaluations may take, without and with a tolerance."""
OVERHEAD = 2.0**28
"""Those that could be done in the time that the calls of torch take in a small network."""
SPREAD = (
    "the covariance is spread over processes, which carry it from layer to layer as Gaussian: the "
    "error of this is not estimated"
)
HELD = 2**20
"""Entries of the covariances of outputs up to which points are an answer, not a check alone."""


@final
@dataclass(frozen=True)
class Auto(Method):
    """The best way for this network and its noise, with an estimate of the error of its answer.

    Third cumulants are followed from layer to layer (`cp.Cumulants`); where a plan says that this
    takes too much, Gaussian layers (`cp.GaussianLayers`) or sketches (`cp.Sketched`). With noise in
    one to eight independent directions the network is evaluated at fixed points as well
    (`cp.QuasiMonteCarlo`), with more where the estimated error of the layers is large. The answer
    is the one with the smaller estimated error.

    `y.error` is the estimate, `y.method` the method that was used, `y.notes` say why. Where an
    error above 5 % is estimated and nothing better was found, there is a warning. The choice is one
    for all Gaussians of a batch. Deterministic. Gradients are those of the way from layer to layer.

    Args:
        tolerance: The largest error that is wanted, of means in standard deviations and of
            standard deviations relatively: 0.01 is 1 %. The first way that is estimated to be
            within it is taken, cheap ones first; where none is found there is a warning. None for a
            good answer at moderate cost.
        seed: Of the points.

    Example:
        y = cp.propagate(model, x, cp.Auto(tolerance=0.01))
        print(y.error, y.method, y.notes)
    """

    tolerance: float | None = None
    seed: int = 0

    uses_skewness: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is a share between 0 and 1, not {self.tolerance!r}")

    def run(self, call: Call) -> Any:
        """The best of the answers that there is reason to look for."""
        if not any(x.covariance.distributed for x in call.inputs):
            return _Choice(self, call).made()
        result = GaussianLayers().run(call)
        return map_leaves(
            result,
            lambda leaf: leaf.with_error(None, [SPREAD]) if isinstance(leaf, Gaussian) else leaf,
        )

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """Those of the first method that can."""
        return self.layerwise(call).gains(call, selected)

    def layerwise(self, call: Call) -> LayerwiseMethod:
        """The method that goes from layer to layer which it would take."""
        return _Choice(self, call).layerwise[0]


@final
@dataclass(frozen=True)
class _Answer:
    """What the model returns, the errors of the Gaussians in it, and why it was looked for."""

    nest: Any
    errors: tuple[ErrorEstimate, ...]
    reason: str
    texts: tuple[str, ...] = ()
    """Warnings that it would have given by itself."""

    @property
    def error(self) -> float:
        """The largest of all, infinite where one is not known."""
        largest = [error.largest for error in self.errors]
        return max((math.inf if math.isnan(one) else one for one in largest), default=0.0)


class _Choice:
    """One call of `Auto`."""

    def __init__(self, method: Auto, call: Call) -> None:
        self.method, self.call = method, call
        self.estimator = Estimator(call, method.seed)
        self.refusal = "no rule"
        self.layered: list[Gaussian] = []
        """The result from layer to layer, once there is one."""
        self.target = GOOD if method.tolerance is None else method.tolerance

    def made(self) -> Any:
        """Look for answers until one is good enough, and give the best."""
        most, tolerance = self.most_points(), self.method.tolerance
        few, points = self.estimator.directions <= FEW, None
        if most and few:
            points = self.few_points(most)
        elif most and tolerance is not None:
            points = self.cheap_points(most)
        if points is not None and tolerance is not None and points.error <= tolerance:
            return self.finished(points, None)
        layers = self.layers(most > 0, points)
        points = None if points is None else self.cross_checked(points)
        answers = [answer for answer in (layers, points) if answer is not None]
        enough = self.target if few or tolerance is not None else FAIR
        worth = most and (points is None or tolerance is None)
        if worth and all(answer.error > enough for answer in answers):
            answers.append(self.points(FIRST_POINTS, most, self.reason_for_points(layers)))
        if (controlled := self.estimator.controlled) is not None:
            errors = tuple(error_of_points(y) for y in gaussians(controlled))
            reason = f"samples with cp.{_name(layers)} as control variate are better than it is"
            answers.append(_Answer(controlled, errors, reason))
        # Layers are preferred where points are hardly better.
        best = min(answers, key=lambda one: one.error * (PREFERENCE if one is layers else 1.0))
        return self.finished(best, layers)

    def few_points(self, most: int) -> _Answer:
        """Points for few directions of noise: up to the tolerance, or a first number of them."""
        directions = self.estimator.directions
        what = "one direction" if directions == 1 else f"{directions} directions"
        reason = f"the noise has {what}, few enough for evaluations at fixed points"
        if self.method.tolerance is None:
            return self.points(FIRST_POINTS, FIRST_POINTS, reason)
        return self.points(self.estimator.matched_points, most, reason)

    def reason_for_points(self, layers: _Answer | None) -> str:
        """Why the way from layer to layer is not enough."""
        if layers is None:
            return f"there is no other way than evaluations at fixed points: {self.refusal}"
        return (
            f"cp.{_name(layers)} has an estimated error of {in_percent(layers.error)}, so the "
            "network is evaluated at fixed points"
        )

    def most_points(self) -> int:
        """Evaluations that the work allows, 0 where they are no way to an answer."""
        network = self.estimator.network
        if network is None or not self.estimator.directions or not network.vectorised:
            return 0
        entries = sum(output.event_shape.numel() ** 2 for output in network.outputs)
        if entries * network.batch_shape.numel() > HELD:
            return 0
        # Each Gaussian of a batch may take as much, up to a limit.
        work = POINT_WORK * min(MOST_SHARES, max(1, network.batch_shape.numel()))
        work = work if self.method.tolerance is None else max(work, TOLERANCE_WORK)
        each = network.work + 2.0 * entries * network.batch_shape.numel()  # moments
        most = int(min(MOST_POINTS, work / each))
        return most if most >= max(FIRST_POINTS, self.estimator.matched_points) else 0

    def points(self, count: int, most: int, reason: str) -> _Answer:
        """More and more points until the error is small enough."""
        count = max(count, self.estimator.matched_points)
        while True:
            assert self.estimator.network is not None
            method = QuasiMonteCarlo(count, self.method.seed)
            nest = method.run_on(self.estimator.network, self.call)
            found = gaussians(nest)
            rounding = self.estimator.network.rounding if not self.estimator.network.draws else ()
            errors = tuple(
                error_of_points(y, rounding[i].reshape(y.mean.shape) if rounding else None)
                for i, y in enumerate(found)
            )
            answer = self.cross_checked(_Answer(nest, errors, reason))
            if answer.error <= self.target or count >= most:
                return answer
            # Errors of points fall as their number in few dimensions, as its root in many.
            more = min(32.0, 1.2 * (answer.error / self.target) ** 1.5)
            count = min(most, 2 ** math.ceil(math.log2(max(2.0, more) * count)))

    def cross_checked(self, points: _Answer) -> _Answer:
        """An answer by points, doubted where layers, if they were tried, do not bear it out."""
        expected = self.estimator.expected
        if not len(points.errors) == len(self.layered) == len(expected):
            return points
        found = zip(points.errors, gaussians(points.nest), self.layered, expected, strict=True)
        return replace(points, errors=tuple(cross_checked(*one) for one in found))

    def cheap_points(self, most: int) -> _Answer | None:
        """Points within the tolerance, if they take no more than third cumulants would."""
        reason = "evaluations at fixed points are the cheapest way to this tolerance"
        first = self.estimator.matched_points
        found = self.points(first, first, reason)
        if found.error <= self.target:
            return found
        needed = 1.2 * first * (found.error / self.target) ** 2
        work = max(self.estimator.work(Cumulants()), OVERHEAD)
        assert self.estimator.network is not None
        if needed > most or needed * self.estimator.network.work > work:
            return None
        return self.points(math.ceil(needed), most, reason)

    @cached_property
    def layerwise(self) -> tuple[LayerwiseMethod, float]:
        """The most accurate method whose plan is bearable, and what it takes."""
        for method in (Cumulants(), GaussianLayers()):
            if (work := self.estimator.work(method)) <= LAYER_WORK:
                return method, work
        generator = torch.Generator(self.call.device).manual_seed(self.method.seed)
        return Sketched(generator=generator), LAYER_WORK

    def layers(self, other: bool, points: _Answer | None = None) -> _Answer | None:
        """From layer to layer; None where a rule is missing and there is another way.

        points: an answer by evaluations, to check this one with.
        """
        method, work = self.layerwise
        with approximations_ignored() as texts:
            try:
                nest = method.run(self.call)
            except UnsupportedOperation as error:
                if not other:
                    raise
                self.refusal = str(error)
                return None
            self.estimator.fell_back = bool(texts)
            errors = self.estimator.errors(nest, method, work, points and points.nest)
        self.layered = gaussians(nest)
        reason = {
            Cumulants: "third cumulants are followed from layer to layer",
            GaussianLayers: "third cumulants would take too much time or memory",
            Sketched: "covariances of all layers would take too much time or memory",
        }[type(method)]
        return _Answer(nest, errors, reason, tuple(dict.fromkeys(texts)))

    def finished(self, best: _Answer, layers: _Answer | None) -> Any:
        """The answer with its errors, its reasons and gradients."""
        limit = ROUGH if self.method.tolerance is None else self.method.tolerance
        if not best.error <= limit:
            self.warn(best, limit)
        errors = iter(best.errors)
        nest = map_leaves(
            best.nest,
            lambda leaf: (
                leaf.with_error(next(errors), _new((*best.texts, best.reason), leaf.notes))
                if isinstance(leaf, Gaussian) else leaf
            ),
        )  # fmt: skip
        if best is layers or not self.gradients_wanted():
            return nest
        if layers is None and (layers := self.layers(other=True, points=best)) is None:
            return nest
        if layers.error > ROUGH:
            warn_user(
                f"gradients of this result are those of cp.{_name(layers)}, whose estimated error "
                f"is {in_percent(layers.error)}; its values are not; call it under torch.no_grad() "
                "if you want no gradients",
                ApproximationWarning,
                every_time=True,
            )
        followed = iter(gaussians(layers.nest))
        return map_leaves(
            nest,
            lambda leaf: _followed(leaf, next(followed)) if isinstance(leaf, Gaussian) else leaf,
        )

    def warn(self, best: _Answer, limit: float) -> None:
        """Say how far the answer may be off, where it comes from, and what to do."""
        means = max(error.largest_mean for error in best.errors)
        stddevs = max(error.largest_stddev for error in best.errors)
        path = self.estimator.rough_module(limit)
        place = "" if path is None else f", from {f'module {path}' if path else 'the model'} on"
        advice = (
            f"cp.Auto(tolerance={ROUGH}) takes as many evaluations as that needs"
            if self.method.tolerance is None and self.most_points()
            else "compare with cp.MonteCarlo(), or use smaller noise"
        )
        warn_user(
            f"the result of cp.{_name(best)} may be off: its means by {in_deviations(means)}, its "
            f"standard deviations by {in_percent(stddevs)}, which is more than {in_percent(limit)}"
            f"{place}; {advice}",
            ApproximationWarning,
            every_time=True,
        )

    def gradients_wanted(self) -> bool:
        """Whether autograd records anything that the result depends on."""
        if not torch.is_grad_enabled():
            return False
        tensors = [t for x in self.call.inputs for t in (x.mean, x.covariance.diagonal())]
        if any(tensor.requires_grad for tensor in tensors):
            return True
        with random_state_kept(self.call.means):
            result = leaves(self.call.on_tensors(*self.call.means))
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in result)


def _name(answer: _Answer | None) -> str:
    found = [] if answer is None else gaussians(answer.nest)
    return next((type(y.method).__name__ for y in found), "Auto")


def _new(texts: Sequence[str], known: Sequence[str]) -> list[str]:
    return [text for text in texts if text not in known]


def _followed(y: Gaussian, layers: Gaussian) -> Gaussian:
    """The values of one result with the gradients of another."""
    matrix = layers.covariance_matrix
    shift = (y.covariance_matrix - matrix).detach()
    mean = layers.mean + (y.mean - layers.mean).detach()
    return y.with_moments(mean, Dense(matrix + shift)).with_error(y.error)
