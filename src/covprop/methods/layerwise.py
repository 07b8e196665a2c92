"""One pass from layer to layer, and methods that take each layer exactly, its input as Gaussian."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.activations.correlated import beyond_series, integrated, series_cross
from covprop.carriers import Full, Ledger, Planned, PlannedVariances, Variances
from covprop.covariance import Covariance, Dense
from covprop.covariance.base import Pairs
from covprop.covariance.planned import PlannedRows
from covprop.errors import UnsupportedOperation
from covprop.flow.carrier import Carrier
from covprop.flow.lineage import GeneratorDraws, Lineage, Replacements, Watcher
from covprop.flow.nests import leaves
from covprop.flow.table import TABLE, unsupported
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.methods.base import Gains, Method
from covprop.methods.call import Call, checked_result, finished, in_flight, without_random_draws
from covprop.methods.comparison.independent_maxima import (
    IndependentMaxima,
    PlannedIndependentMaxima,
)
from covprop.methods.plan import Plan
from covprop.methods.planning import check, planned
from covprop.methods.root import Root

CARRIED = 2**24
"""Numbers in columns of the root of an input that are carried to the outputs at a time."""

MEASURED = 5.0
"""Seconds, by typical rates, from which it is measured how fast a bar is to advance."""


class LayerwiseMethod(Method):
    """A method that goes through the network once and treats each nonlinearity in its own way."""

    needs_rules: ClassVar[bool] = True

    activations: Replacements
    """Activations to use in place of the declared ones, by torch function."""

    carries_pairs: ClassVar[bool] = True
    """Whether covariances between features are carried."""

    third_cumulants: ClassVar[bool] = False
    """Whether third cumulants are followed beside means and covariances."""

    compiled_gradients: ClassVar[bool] = False
    """Whether compiled kernels have the gradients of what it makes of an activation."""

    backward: ClassVar[bool] = False
    """Whether a backward pass from the outputs follows, so that all edges are kept."""

    generator: torch.Generator | None = None
    """What it draws from itself."""

    independent_maxima: bool = False
    """Whether the arguments of a maximum are taken as independent, for comparison."""

    def for_one_run(self) -> "LayerwiseMethod":
        """The method of one propagation: itself, or a copy with state of its own."""
        return self

    @property
    def first_order(self) -> bool:
        """Whether the covariances of activations with others end with the first order."""
        return False

    def carrier(self, x: Gaussian, lineage: Lineage) -> Carrier:
        """The carrier of an input."""
        kind = IndependentMaxima if self.independent_maxima else Full
        return kind(x.covariance, lineage, self)

    def planned_carrier(self, x: Gaussian, lineage: Lineage, ledger: Ledger) -> Planned:
        """The planned carrier of an input."""
        kind = PlannedIndependentMaxima if self.independent_maxima else Planned
        return kind(x.covariance.planned(), x.mean.detach(), lineage, ledger)

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Mean (*batch, n) and covariance of an element-wise function."""
        raise NotImplementedError

    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """Covariance of two activations of different tensors, given that of the tensors."""
        raise NotImplementedError

    def observed(self, activation: Activation, note: Callable[[int], None]) -> Activation:
        """An activation that notes the orders of the series that are made of it, 0 for none."""
        return activation.observed(note)

    def run(self, call: Call) -> Any:
        """The passes over the model, with errors that are estimated when they are asked for."""
        return call.with_errors(self.passes(call), self)

    def passes(self, call: Call) -> Any:
        """The result of one pass over the operations of the model."""
        return self.traverse(call, self.watcher(call))

    def plan(self, call: Call) -> Plan:
        """From the means alone."""
        return planned(call, self)

    def check_model(self, module: object) -> None:
        """Refuse activations of functions without a rule, and scripted models."""
        for function in self.activations:
            if function not in TABLE:
                raise ValueError(
                    f"{function!r} is no torch function with a rule, so no activation can replace "
                    "it; name the function, as in {torch.sigmoid: cp.DaunizeauSigmoid()}"
                )
        if isinstance(module, torch.jit.ScriptFunction):
            raise unsupported(module)

    def check_covariances(self, need: str) -> None:
        """Refuse if the method carries variances alone."""
        if not self.carries_pairs:
            raise UnsupportedOperation(
                f"{need}, and cp.{type(self).__name__}() has variances alone; use "
                "cp.GaussianLayers() or cp.Unscented()"
            )

    def watcher(self, call: Call, runs: int = 1) -> Watcher | None:
        """The bar of so many runs, if one is to be shown."""
        if call.progress is None:
            return None
        plan = self.plan(call)
        return call.progress.operations(plan.steps * runs, plan.rates_for(MEASURED))

    def traverse(
        self, call: Call, watcher: Watcher | None = None, observe: Callable[..., Any] | None = None
    ) -> Any:
        """One pass; watcher: sees every operation; observe: replaces activations."""

        def pass_once(drawn: GeneratorDraws, watched: bool) -> Any:
            lineage = self._lineage(call)
            if not watched:
                lineage.watcher, lineage.observe = watcher, observe
            return call.in_flight(lambda x: in_flight(x, lineage), drawn)

        with call.naming_broken_weights():
            result = without_random_draws(pass_once, call.means, self.generator)
            return finished(result, self.finish)

    def finish(self, y: GaussianTensor) -> Gaussian:
        """The Gaussian of an output, with its skewness where that is carried."""
        covariance = y.carrier.finish(y.loc)
        skewness = y.carrier.skewness() if self.third_cumulants else None
        skewness = None if skewness is None else skewness.reshape(y.loc.shape)
        notes = tuple(y.carrier.lineage.notes)
        return checked_result(y.loc, covariance, self, skewness=skewness, notes=notes)

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """Forward: the columns of the roots are pushed through the model."""
        del selected
        if not self.carries_pairs:
            return None

        def pass_once(drawn: GeneratorDraws, watched: bool) -> tuple[Any, list[GaussianTensor]]:
            del watched
            lineage, begun = self._lineage(call), list[GaussianTensor]()

            def begin(x: Gaussian) -> GaussianTensor:
                begun.append(in_flight(x, lineage))
                return begun[-1].alias()  # which the module may change in place

            return call.in_flight(begin, drawn), begun

        results, begun = without_random_draws(pass_once, call.means, self.generator)
        roots = [Root.of(x) for x in call.inputs]
        return {
            place: self.gains_of(y, begun, roots)
            for place, y in enumerate(leaves(results))
            if isinstance(y, GaussianTensor)
        }

    def gains_of(
        self, y: GaussianTensor, inputs: Sequence[GaussianTensor], roots: Sequence[Root]
    ) -> list[Tensor]:
        """E[J] L of one result, for each input in flight and its root."""
        return [_expected_jvp(y, x, root) for x, root in zip(inputs, roots, strict=True)]

    def _lineage(self, call: Call) -> Lineage:
        """A lineage that has the whole propagation planned before the first large covariance."""
        lineage = Lineage(self)
        method = lineage.method
        lineage.guard = lambda: check(planned(call, method), method)
        return lineage


def _expected_jvp(y: GaussianTensor, x: GaussianTensor, root: Root) -> Tensor:
    """E[J] L (*batch, m, width) of a result and an input with the root L, forward."""
    parts = []
    for start in range(0, root.width, step := max(1, CARRIED // max(1, x.numel()))):
        columns = root.structure.columns(start, min(root.width, start + step))
        part = y.carrier.expected_jvp(x.carrier, columns)
        if part is None:  # they are independent
            break
        parts.append(part)
    if not parts:
        return x.loc.new_zeros(*x.batch_shape, y.event_shape.numel(), root.width)
    return torch.cat(parts, dim=-1)


@final
@dataclass(frozen=True)
class GaussianLayers(LayerwiseMethod):
    """Exact mean, variance and covariance of each layer, if its input is Gaussian.

    The output of an activation is not Gaussian. So networks with one layer of activations are
    exact, and deeper ones are as accurate as the inputs of their layers are Gaussian. `cp.Exact` is
    the same class.

    Args:
        activations: Replacements of registered activations, by torch function: an `Activation`, or
            a factory that takes the function's options.
        independent_maxima: Treat the arguments of a maximum as independent, as Gast & Roth (2018)
            do. This is for comparison (errors are in docs/operations.md).

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
        cp.propagate(torch.relu, x, cp.GaussianLayers())
    """

    compiled_gradients: ClassVar[bool] = True

    activations: Replacements = field(default_factory=dict, hash=False)
    independent_maxima: bool = False

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Closed forms, one-dimensional integrals and series whose bound is at rounding."""
        return exact_moments(activation, mean, covariance)

    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """By the pair function that both share; or by a series, and integrals where it is long."""
        return exact_cross(left, right, covariance)


Exact = GaussianLayers
"""The former name of `GaussianLayers`, and still the same class."""


@final
@dataclass(frozen=True)
class AssumedDensity(LayerwiseMethod):
    """Assumed density filtering (Gast & Roth 2018): means and variances only, in O(n).

    The moments of every nonlinearity are exact, but features and branches are treated as
    independent. This is for comparison only: on trained networks its standard deviations were 84 to
    97 % too small, because units that share inputs are correlated (docs/large.md). Where
    `GaussianLayers` does not fit, use `Sketched`.

    Args:
        activations: As for `GaussianLayers`.
        independent_maxima: Deprecated, without effect: maxima treat their arguments as independent
            in any case.

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
        cp.propagate(torch.relu, x, cp.AssumedDensity())
    """

    activations: Replacements = field(default_factory=dict, hash=False)
    independent_maxima: InitVar[bool] = True

    carries_pairs: ClassVar[bool] = False

    def __post_init__(self, independent_maxima: bool) -> None:
        """Take the former option, which never had an effect."""

    def carrier(self, x: Gaussian, lineage: Lineage) -> Variances:
        """Its variances."""
        return Variances(x.covariance.diagonal(), lineage)

    def planned_carrier(self, x: Gaussian, lineage: Lineage, ledger: Ledger) -> PlannedVariances:
        """One number for each feature."""
        rows = PlannedRows(x.batch_shape, x.covariance.size, x.mean.itemsize, width=1)
        return PlannedVariances(rows, x.mean.detach(), lineage, ledger)


def exact_moments(
    activation: Activation, mean: Tensor, covariance: Covariance
) -> tuple[Tensor, Covariance]:
    """Mean (*batch, n) and covariance of an activation of a Gaussian vector."""

    def by_torch(mean: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        result, made = _exact_moments(activation, mean, Dense(matrix))
        return result, made.matrix()

    whole = covariance.of_matrix(lambda matrix: activation.of_matrix(mean, matrix, by_torch))
    return _exact_moments(activation, mean, covariance) if whole is None else whole


def _exact_moments(
    activation: Activation, mean: Tensor, covariance: Covariance
) -> tuple[Tensor, Covariance]:
    """The same, step by step."""
    variance = covariance.diagonal().double()
    point = mean.double()
    if covariance.independent:
        result, output = activation.marginals(point, variance)
        return result.to(mean.dtype), covariance.pairwise(activation.pair, (), output)
    order = 0
    if activation.uses_series(covariance.size * variance.numel(), point, variance):
        largest = 1.0
        if not covariance.deferred:  # which would have to be computed for it
            largest = covariance.largest_correlation()
        order = activation.order(largest, mean.dtype)
    prepared = activation.prepare(point, variance, order, mean.dtype)
    pairs = Pairs(activation.pair, activation.pair_matrix)
    made = covariance.pairwise(pairs, prepared.elements, prepared.variance)
    return prepared.mean.to(mean.dtype), made


def exact_cross(left: Activated, right: Activated, covariance: Tensor) -> Tensor:
    """Cov(g(y_i), h(w_j)) of jointly Gaussian vectors, given Cov(y_i, w_j)."""
    first, second = left.activation, right.activation
    if type(first) is not type(second) or first.key != second.key:
        order, pairs = beyond_series(left, right, covariance)
        result = series_cross(left, right, covariance, order)
        if not len(pairs[0]):
            return result
        found = integrated(left, right, covariance, pairs)
        return result.index_put(pairs, found.to(result.dtype))
    rows = tuple(t[..., :, None] for t in left.elements(covariance.dtype))
    columns = tuple(t[..., None, :] for t in right.elements(covariance.dtype))
    return first.pair(rows, columns, covariance)
