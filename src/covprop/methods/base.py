"""What a method of propagation is: it runs a call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.carriers import Full, Ledger, Planned
from covprop.covariance import Covariance
from covprop.errors import ApproximationWarning, RandomDraws, UnsupportedOperation, warn_user
from covprop.flow.carrier import Carrier
from covprop.flow.lineage import Lineage, Replacements, Watcher
from covprop.flow.nests import leaves
from covprop.flow.table import TABLE, unsupported
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.methods.call import (
    Advance,
    Call,
    finite,
    in_flight,
    unwrapped,
    without_draws,
)
from covprop.methods.comparison.independent_maxima import (
    IndependentMaxima,
    PlannedIndependentMaxima,
)
from covprop.methods.network import Estimate, Network, check_outputs
from covprop.methods.plan import Plan
from covprop.methods.planning import check, planned
from covprop.methods.root import Root
from covprop.skewed import Skewed

CARRIED = 2**24
"""Numbers in columns of the root of an input that are carried to the outputs at a time."""

MEASURED = 5.0
"""Seconds, by typical rates, from which it is measured how fast a bar is to advance."""

SKEWED_RESULT = 0.5
"""The skewness of a result, as the input of another model, from which there is a warning.

At 0.5, a Gaussian is off by a quarter of a standard deviation in its 97.5 % quantile.
"""

Gains = dict[int, list[Tensor]]
"""E[J] L (*batch, m, width) for each output, by its place among all results, and each input."""


def check_generator(generator: object) -> None:
    """Refuse what is no generator of random numbers, such as a seed."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            "generator is a torch.Generator, as torch.Generator().manual_seed(0) gives, not "
            f"{generator!r}"
        )


def is_skewed(x: Gaussian, beyond: float = 0.0) -> bool:
    """Whether a skewness is known of some element, and beyond so much."""
    return x.skewness is not None and bool((x.skewness.abs() > beyond).any())


class Method(ABC):
    """A way to find the mean and the covariance of a network's output."""

    uses_skewness: ClassVar[bool] = False
    """Whether the skewness of an input (`cp.Skewed`) has its part in the result."""

    def check_skewness(self, inputs: Sequence[Gaussian]) -> None:
        """Warn of inputs that are skewed, where that would be ignored without a word.

        That of a result, as `cp.Cumulants` gives it, is known element by element, and not how the
        elements are skewed together: no method uses it. Results that go from model to model, step
        by step, are nearly always skewed a little: the warning begins where it matters
        (`SKEWED_RESULT`).
        """
        skewed = [x for x in inputs if isinstance(x, Skewed) and is_skewed(x)]
        joint = [x for x in inputs if not isinstance(x, Skewed) and is_skewed(x, SKEWED_RESULT)]
        name = type(self).__name__
        if joint:
            warn_user(
                f"the input is skewed and its elements depend on each other, of which "
                f"cp.{name}() takes mean and covariance alone: if it is the result of another "
                "model, propagate both in one call, cp.propagate(lambda x: second(first(x)), x)",
                ApproximationWarning,
            )
        elif skewed and not self.uses_skewness:
            warn_user(
                f"cp.{name}() ignores the skewness of the input, of which it takes mean and "
                "variance alone; cp.Cumulants() and cp.MonteCarlo() use it",
                ApproximationWarning,
            )

    @property
    def stochastic(self) -> bool:
        """Whether two runs differ by chance."""
        return False

    def check_model(self, module: object) -> None:
        """Refuse a model that the method cannot run, as far as is known before it runs."""
        del module

    def check_covariances(self, need: str) -> None:
        """Refuse a method that has variances alone; need: what needs more, as a sentence."""
        del need

    @abstractmethod
    def run(self, call: Call) -> Any:
        """What the model returns, with a Gaussian in place of each output."""

    def plan(self, call: Call) -> Plan:
        """What a run takes: its operations, memory and work."""
        del call
        raise UnsupportedOperation(
            f"a plan lists the covariances on the way through a model, and cp."
            f"{type(self).__name__} has none: it evaluates the model on plain tensors"
        )

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """Expected Jacobians of the outputs times roots of the inputs, if the method knows them.

        J is the Jacobian, L L^T the covariance of the input (Stein: Cov(y, x) = E[J] S).
        selected: only of those elements of the outputs that the method is asked for.
        """
        del call, selected
        return None


def is_method(given: object) -> bool:
    """Whether it is a method, or by mistake the class of one."""
    return isinstance(given, Method) or (isinstance(given, type) and issubclass(given, Method))


class LayerwiseMethod(Method):
    """A method that goes through the network once and treats each nonlinearity in its own way."""

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

    independent_maxima: bool = False
    """Whether the arguments of a maximum are taken as independent, for comparison."""

    def for_one_run(self) -> "LayerwiseMethod":
        """The method of one propagation: itself, or a copy with what that has to remember."""
        return self

    @property
    def first_order(self) -> bool:
        """Whether the covariances of activations with others end with the first order."""
        return False

    def carrier(self, x: Gaussian, lineage: Lineage) -> Carrier:
        """What an input carries."""
        kind = IndependentMaxima if self.independent_maxima else Full
        return kind(x.covariance, lineage, self)

    def planned_carrier(self, x: Gaussian, lineage: Lineage, ledger: Ledger) -> Planned:
        """What a plan carries in its place."""
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
        """Activations of functions with a rule, and a model whose operations are seen."""
        for function in self.activations:
            if function not in TABLE:
                raise ValueError(
                    f"{function!r} is no torch function with a rule, so no activation can replace "
                    "it; name the function, as in {torch.sigmoid: cp.DaunizeauSigmoid()}"
                )
        if isinstance(module, torch.jit.ScriptFunction):
            raise unsupported(module)

    def check_covariances(self, need: str) -> None:
        """As it carries them or not."""
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
        lineage = self._lineage(call)
        lineage.watcher, lineage.observe = watcher, observe

        def pass_once() -> Any:
            return call.in_flight(lambda x: in_flight(x, lineage))

        with call.naming_broken_weights():
            return unwrapped(without_draws(pass_once, call.means), self.finish)

    def finish(self, y: GaussianTensor) -> Gaussian:
        """The Gaussian of an output, with its skewness where that is carried."""
        covariance, skewness = y.carrier.finish(y.loc), y.carrier.skewness()
        skewness = None if skewness is None else skewness.reshape(y.loc.shape)
        notes = tuple(y.carrier.lineage.notes)
        return finite(y.loc, covariance, self, skewness=skewness, notes=notes)

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """By carrying the columns of the roots on."""
        del selected
        if not self.carries_pairs:
            return None
        lineage, begun = self._lineage(call), list[GaussianTensor]()

        def begin(x: Gaussian) -> GaussianTensor:
            begun.append(in_flight(x, lineage))
            return begun[-1].alias()  # which the module may change in place

        def pass_once() -> Any:
            begun.clear()
            return call.in_flight(begin)

        results = without_draws(pass_once, call.means)
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
        return [_carried(y, x, root) for x, root in zip(inputs, roots, strict=True)]

    def _lineage(self, call: Call) -> Lineage:
        """A lineage that has the whole propagation planned before the first large covariance."""
        lineage = Lineage(self)
        method = lineage.method
        lineage.guard = lambda: check(planned(call, method), method)
        return lineage


def _carried(y: GaussianTensor, x: GaussianTensor, root: Root) -> Tensor:
    """E[J] L (*batch, m, width) of a result and an input with the root L, forward."""
    parts = []
    for start in range(0, root.width, step := max(1, CARRIED // max(1, x.numel()))):
        columns = root.structure.columns(start, min(root.width, start + step))
        part = y.carrier.carried(x.carrier, columns)
        if part is None:  # they are independent
            break
        parts.append(part)
    if not parts:
        return x.loc.new_zeros(*x.batch_shape, y.event_shape.numel(), root.width)
    return torch.cat(parts, dim=-1)


class FunctionMethod(Method):
    """A method that evaluates the network on plain tensors, whatever operations it is made of."""

    averages_draws: ClassVar[bool] = False
    """Whether a network that draws random numbers is evaluated often enough to average them."""

    def run(self, call: Call) -> Any:
        """Estimate the moments of every output of the model as a function."""
        return self.run_on(Network(call.on_tensors, call.inputs), call)

    def run_on(self, network: Network, call: Call) -> Any:
        """The same, given the model of the call as a function."""
        if network.draws and not self.averages_draws:
            raise RandomDraws(
                f"the model draws random numbers, as dropout and Bayesian layers do, and "
                f"cp.{type(self).__name__} takes it as a function; use cp.MonteCarlo(), for such "
                "layers also cp.GaussianLayers(), or for dropout call model.eval()"
            )
        check_outputs(network, self.entry_bytes)
        with call.naming_broken_weights():
            estimates = self.estimate(network, call.advance) if network.outputs else []
            return network.gaussians(estimates, self)

    @abstractmethod
    def entry_bytes(self, dtype: torch.dtype) -> int:
        """Bytes held at a time for each entry of the covariance of an output of this dtype."""

    @abstractmethod
    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """Mean and covariance of every output of the network."""


class WrappingMethod(Method):
    """A method that has another one, its base, do the work, on other inputs or beside samples."""

    base: Method

    def check_model(self, module: object) -> None:
        """As its base."""
        self.base.check_model(module)

    def check_covariances(self, need: str) -> None:
        """As its base."""
        self.base.check_covariances(need)

    def run(self, call: Call) -> Any:
        """As `around` says."""
        with call.naming_broken_weights():
            return self.around(call)

    @abstractmethod
    def around(self, call: Call) -> Any:
        """What the model returns, with a Gaussian in place of each output."""

    @property
    def stochastic(self) -> bool:
        """As its base."""
        return self.base.stochastic

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """Those of the base."""
        with self._another_base(call):
            return self.base.gains(call, selected)

    def run_base(self, call: Call) -> Any:
        """What the base makes of a call."""
        with self._another_base(call):
            return self.base.run(call)

    @contextmanager
    def _another_base(self, call: Call) -> Iterator[None]:
        """Where a base that goes from layer to layer fails, offer one that needs no rules."""
        try:
            yield
        except UnsupportedOperation as error:
            refused = isinstance(error, RandomDraws)  # by cp.Linearized as well
            if not isinstance(self.base, LayerwiseMethod) or refused or _draws(call):
                raise
            offer = "or give the method around it base=cp.Linearized(), which needs no rules"
            raise type(error)(f"{error}; {offer}") from error


def _draws(call: Call) -> bool:
    """Whether the model draws random numbers, as far as it runs on plain tensors."""
    try:
        return Network(call.on_tensors, call.inputs).draws
    except Exception:  # a module may raise anything
        return False
