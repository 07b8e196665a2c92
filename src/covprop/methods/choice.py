"""How `cp.Auto` chooses: answers by layers and by points, until one is good enough."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch

from covprop.carriers.third_cumulant import PARTLY
from covprop.covariance import Dense
from covprop.error_estimate import ErrorEstimate, in_deviations, in_percent
from covprop.errors import (
    ApproximationWarning,
    CovpropError,
    InconsistentBranches,
    MomentOverflow,
    QuadratureError,
    TooLarge,
    UnsupportedOperation,
    approximations_ignored,
    warn_user,
)
from covprop.flow.nests import leaves, map_leaves
from covprop.gaussian import Gaussian
from covprop.methods.accuracy import LAYER_WORK, OVERHEAD, Estimator, cross_checked, gaussians
from covprop.methods.call import Call, random_state_kept
from covprop.methods.cumulants import Cumulants
from covprop.methods.layerwise import GaussianLayers, LayerwiseMethod
from covprop.methods.network import NotVectorised
from covprop.methods.quasi_monte_carlo import QuasiMonteCarlo
from covprop.methods.sketched import Sketched

FEW_DIRECTIONS = 8
"""Independent directions of noise up to which points are taken first."""
GOOD, FAIR, ROUGH = 0.005, 0.02, 0.05
"""Estimated errors: below the first, points are enough; below the second, an answer from layer to
layer is; above the third there is a warning."""
PREFERENCE = 0.8
HALF, MOST = 0.5, 0.9
"""Parts of a batch whose errors are to be good and fair, where there is no tolerance."""
FIRST_POINTS, MOST_POINTS, MOST_SHARES = 4096, 2**20, 16
POINT_WORK, TOLERANCE_WORK = 2.0**32, 2.0**37
"""Floating-point operations that evaluations may take, without and with a tolerance."""
FAILURES = (UnsupportedOperation, QuadratureError, TooLarge, InconsistentBranches)
"""What a way from layer to layer may raise where evaluations may still do."""
HELD = 2**20
"""Entries of the covariances of outputs up to which points are an answer, not a check alone."""


@final
@dataclass(frozen=True)
class Answer:
    """What the model returns, the errors of the Gaussians in it, and why it was looked for."""

    nest: Any
    errors: tuple[ErrorEstimate, ...]
    reason: str
    texts: tuple[str, ...] = ()
    """Warnings that it would have given by itself."""

    @property
    def rows(self) -> int:
        """Gaussians in the batch."""
        return next((y.batch_shape.numel() for y in gaussians(self.nest)), 1)

    @cached_property
    def error(self) -> float:
        """The largest of all, infinite where one is not known."""
        largest = [error.largest for error in self.errors]
        return max((math.inf if math.isnan(one) else one for one in largest), default=0.0)

    def error_of(self, share: float) -> float:
        """The same of such a part of the batch."""
        if self.rows <= 1:
            return self.error
        errors = [part for one in self.errors for part in (one.mean, one.stddev)]
        flat = [part.reshape(self.rows, -1).double() for part in errors]
        if not (worst := torch.cat(flat, -1)).shape[-1]:
            return 0.0
        worst = worst.nan_to_num(math.inf, math.inf).amax(-1)
        return float(worst.sort().values[math.ceil(share * (self.rows - 1))])


class Choice:
    """One call of `cp.Auto`."""

    def __init__(self, call: Call, tolerance: float | None, seed: int) -> None:
        """tolerance, seed: those of `cp.Auto`."""
        self.call, self.tolerance, self.seed = call, tolerance, seed
        self.estimator = Estimator(call, seed)
        self.target = GOOD if tolerance is None else tolerance
        self.layered: list[Gaussian] = []
        """The result from layer to layer, once there is one."""
        self.failure: CovpropError | None = None
        """What the way from layer to layer has raised."""
        self.notes: list[str] = []
        """What could not be done."""

    def made(self) -> Any:
        """Look for answers until one is good enough, and give the best."""
        few, points = self.estimator.directions <= FEW_DIRECTIONS, None
        if self.tolerance is not None:
            points = self.points_within_tolerance(few)
            if points is not None and points.error <= self.tolerance:
                return self.finished(points, None)
        elif few and self.most_points:
            points = self.points(FIRST_POINTS, FIRST_POINTS, self.few_directions())
        layers = self.layers(points is not None or self.most_points > 0, points)
        points = None if points is None else self.cross_checked(points)
        answers = [answer for answer in (layers, points) if answer is not None]
        enough = self.target if few or self.tolerance is not None else FAIR
        worth = self.most_points and (points is None or self.tolerance is None)
        if worth and all(self.error_of(answer, enough) > enough for answer in answers):
            reason = self.reason_for_points(layers)
            if (more := self.points(FIRST_POINTS, self.most_points, reason)) is not None:
                answers.append(more)
        if (controlled := self.estimator.controlled) is not None:
            reason = f"samples with cp.{_name(layers)} as control variate are better than it is"
            answers.append(Answer(controlled, _errors(controlled), reason))
        if not answers and self.failure is not None:
            raise self.failure
        # Layers are preferred where points are hardly better.
        best = min(
            answers, key=lambda one: self.error_of(one) * (PREFERENCE if one is layers else 1.0)
        )
        return self.finished(best, layers)

    def error_of(self, answer: Answer, target: float | None = None) -> float:
        """What is to be within the target, that of the call or another one.

        With a tolerance the largest error of all; else that of half of the batch, where nine of ten
        are fair.
        """
        if self.tolerance is not None:
            return answer.error
        target = target or self.target
        return max(answer.error_of(HALF), answer.error_of(MOST) * target / max(target, FAIR))

    def few_directions(self) -> str:
        """Why the network is evaluated at points whatever layers say."""
        count = self.estimator.directions
        what = "one direction" if count == 1 else f"{count} directions"
        return f"the noise has {what}, few enough for evaluations at fixed points"

    def points_within_tolerance(self, few: bool) -> Answer | None:
        """Points, as many as needed for few directions, else if they are the cheapest way."""
        first = self.estimator.matched_points
        reason = (
            self.few_directions() if few
            else "evaluations at fixed points are the cheapest way to this tolerance"
        )  # fmt: skip
        found = self.first_points(first, reason)
        if found is None or found.error <= self.target:
            return found
        most, network = self.most_points, self.estimator.network
        if network is None or not most:
            return found
        if few:
            return self.points(self.grown(found, first), most, reason) or found
        if (needed := 1.2 * first * (found.error / self.target) ** 2) > most:
            return None
        if (work := needed * network.work) > OVERHEAD and work > self.estimator.work(Cumulants()):
            return None
        return self.points(math.ceil(needed), most, reason)

    def first_points(self, count: int, reason: str) -> Answer | None:
        """So many points, without a look at the work of the network where it is surely small."""
        network = self.estimator.network
        if network is None or not self.estimator.directions or self.entries > HELD:
            return None
        if count * network.most_work > POINT_WORK and not self.most_points:
            return None
        network.at_once_only = True
        try:
            return self.points(count, count, reason)
        except NotVectorised:
            return None
        finally:
            network.at_once_only = False

    def reason_for_points(self, layers: Answer | None) -> str:
        """Why the way from layer to layer is not enough."""
        if layers is None:
            return "there is no other way than evaluations at fixed points"
        return (
            f"cp.{_name(layers)} has an estimated error of {in_percent(layers.error)}, so the "
            "network is evaluated at fixed points"
        )

    @property
    def entries(self) -> int:
        """Those of the covariances of all outputs."""
        assert self.estimator.network is not None
        outputs = self.estimator.network.outputs
        each = sum(output.event_shape.numel() ** 2 for output in outputs)
        return each * self.estimator.network.batch_shape.numel()

    @cached_property
    def most_points(self) -> int:
        """Evaluations that the work allows, 0 where they are no way to an answer."""
        network = self.estimator.network
        if network is None or not self.estimator.directions or not network.vectorised:
            return 0
        if self.entries > HELD:
            return 0
        # Each Gaussian of a batch may take as much, up to a limit.
        work = POINT_WORK * min(MOST_SHARES, max(1, network.batch_shape.numel()))
        work = max(work, 0.0 if self.tolerance is None else TOLERANCE_WORK)
        if MOST_POINTS * (network.most_work + 2.0 * self.entries) <= work:
            return MOST_POINTS
        most = int(min(MOST_POINTS, work / (network.work + 2.0 * self.entries)))
        return most if most >= max(FIRST_POINTS, self.estimator.matched_points) else 0

    def points(self, count: int, most: int, reason: str) -> Answer | None:
        """More and more points until the error is small enough, None where numbers overflow."""
        network = self.estimator.network
        assert network is not None
        count = max(count, self.estimator.matched_points)
        while True:
            try:
                nest = QuasiMonteCarlo(count, self.seed).run_on(network, self.call)
            except MomentOverflow:
                self.notes.append(
                    "at some of the points the output is not finite: they do not count"
                )
                self.most_points = 0
                return None
            answer = self.cross_checked(Answer(nest, _errors(nest), reason))
            if self.error_of(answer) <= self.target or count >= most:
                return answer
            floors = tuple(self.estimator.by_rounding(gaussians(nest)))
            if self.error_of(replace(answer, errors=floors)) > self.target:  # of any points
                return answer
            count = min(most, self.grown(answer, count))

    def grown(self, answer: Answer, count: int) -> int:
        """How many points may be enough, where so many were not.

        Errors of points fall as their number in few dimensions, as its root in many. Four times as
        many take little more time where they are few.
        """
        more = min(32.0, 1.2 * (self.error_of(answer) / self.target) ** 1.5)
        least = 4.0 if count <= FIRST_POINTS / 4 else 2.0
        return int(2 ** math.ceil(math.log2(max(least, more) * count)))

    def cross_checked(self, points: Answer) -> Answer:
        """An answer by points, with larger errors where layers that are exact contradict it."""
        expected = self.estimator.expected
        if not len(points.errors) == len(self.layered) == len(expected):
            return points
        found = zip(points.errors, gaussians(points.nest), self.layered, expected, strict=True)
        return replace(points, errors=tuple(cross_checked(*one) for one in found))

    @cached_property
    def layerwise(self) -> tuple[LayerwiseMethod, float]:
        """The most accurate method whose plan is bearable, and what it takes."""
        for method in (Cumulants(), GaussianLayers()):
            if (work := self.estimator.work(method)) <= LAYER_WORK:
                return method, work
        generator = torch.Generator(self.call.device).manual_seed(self.seed)
        return Sketched(generator=generator), LAYER_WORK

    def layers(self, other: bool, points: Answer | None = None) -> Answer | None:
        """From layer to layer; None where that fails and there is another way.

        points: an answer by evaluations, to check this one with.
        """
        first, work = self.layerwise
        for method in (first, GaussianLayers()) if first.third_cumulants else (first,):
            with approximations_ignored() as texts:
                try:
                    nest = method.passes(self.call)
                except FAILURES as error:
                    self.failure = error
                    continue
                partly = any(PARTLY in y.notes for y in gaussians(nest))
                self.estimator.fell_back = bool(texts) or partly
                errors = self.estimator.errors(nest, method, work, points and points.nest)
            break
        else:
            assert self.failure is not None
            if not other:
                raise self.failure
            self.notes.append(f"there is no answer from layer to layer: {self.failure}")
            return None
        if self.failure is not None:
            self.notes.append(f"third cumulants cannot be followed: {self.failure}")
        self.layered = gaussians(nest)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves(nest)):  # without an estimate
            for text in dict.fromkeys(texts):
                warn_user(text, ApproximationWarning, every_time=True)
        reason = {
            Cumulants: "third cumulants are followed from layer to layer",
            GaussianLayers: "covariances are followed from layer to layer, as third cumulants fail"
            if self.failure is not None
            else "third cumulants would take too much time or memory",
            Sketched: "covariances of all layers would take too much time or memory",
        }[type(method)]
        return Answer(nest, errors, reason, tuple(dict.fromkeys(texts)))

    def finished(self, best: Answer, layers: Answer | None) -> Any:
        """The answer with its errors, its reasons and gradients."""
        limit = ROUGH if self.tolerance is None else self.tolerance
        if not best.error <= limit:
            self.warn(best, limit)
        if layers is None:
            self.notes.append(self.reach(best))
        errors, notes = iter(best.errors), (*best.texts, best.reason, *self.notes)
        nest = map_leaves(
            best.nest,
            lambda leaf: (
                leaf.with_error(next(errors), [text for text in notes if text not in leaf.notes])
                if isinstance(leaf, Gaussian) else leaf
            ),
        )  # fmt: skip
        if best is layers or not self.gradients_wanted():
            return nest
        if layers is None and (layers := self.layers(other=True, points=best)) is None:
            return nest
        if layers.error > ROUGH:
            warn_user(
                f"the gradients of this result come from cp.{_name(layers)}, whose estimated error "
                f"is {in_percent(layers.error)}; its values are more accurate. If you need no "
                "gradients, call propagate under torch.no_grad()",
                ApproximationWarning,
                every_time=True,
            )
        followed = iter(gaussians(layers.nest))
        return map_leaves(
            nest,
            lambda leaf: _followed(leaf, next(followed)) if isinstance(leaf, Gaussian) else leaf,
        )

    def reach(self, points: Answer) -> str:
        """What evaluations without a check cannot see."""
        method = next(y.method for y in gaussians(points.nest))
        assert isinstance(method, QuasiMonteCarlo)
        furthest = method.furthest(self.estimator.directions)
        return (
            "evaluations alone, which no other way has checked: what happens further than "
            f"{furthest:.1f} standard deviations from the mean is not seen"
        )

    def warn(self, best: Answer, limit: float) -> None:
        """Say how far the answer may be off, where it comes from, and what to do."""
        means = max(error.largest_mean for error in best.errors)
        stddevs = max(error.largest_stddev for error in best.errors)
        path = self.estimator.rough_module(limit)
        place = "" if path is None else f", from {f'module {path}' if path else 'the model'} on"
        if any(
            y.sampling_error.heavy_tailed.any()
            for y in gaussians(best.nest)
            if y.sampling_error is not None and y.sampling_error.heavy_tailed is not None
        ):
            advice = (
                "a few evaluations have most of a variance, which may even be infinite: bound what "
                "the model divides by or takes the exponential of, or use smaller noise"
            )
        elif self.tolerance is None and self.most_points:
            advice = f"cp.Auto(tolerance={ROUGH}) takes as many evaluations as that needs"
        else:
            advice = "compare with cp.MonteCarlo(), or use smaller noise"
        result = f"the result of cp.{_name(best)}"
        off = (
            f"{result} may be off: its means by {in_deviations(means)}, its standard deviations "
            f"by {in_percent(stddevs)}, which is more than {in_percent(limit)}"
        )
        off = f"how far {result} is off is not known" if math.isnan(means + stddevs) else off
        warn_user(f"{off}{place}; {advice}", ApproximationWarning, every_time=True)

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


def _errors(nest: Any) -> tuple[ErrorEstimate, ...]:
    """Those of Gaussians that come from samples."""
    return tuple(y.error for y in gaussians(nest) if y.error is not None)


def _name(answer: Answer | None) -> str:
    found = () if answer is None else gaussians(answer.nest)
    return next((type(y.method).__name__ for y in found), "Auto")


def _followed(y: Gaussian, layers: Gaussian) -> Gaussian:
    """The values of one result with the gradients of another."""
    matrix = layers.covariance_matrix
    shift = (y.covariance_matrix - matrix).detach()
    mean = layers.mean + (y.mean - layers.mean).detach()
    return y.with_moments(mean, Dense(matrix + shift)).with_error(y.error)
