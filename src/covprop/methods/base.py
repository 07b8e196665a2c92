"""What a method of propagation is: it runs a call."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from covprop.errors import ApproximationWarning, RandomDraws, UnsupportedOperation, warn_user
from covprop.gaussian import Gaussian
from covprop.methods.call import (
    Advance,
    Call,
)
from covprop.methods.network import Estimate, Network, check_outputs
from covprop.methods.plan import Plan
from covprop.skewed import Skewed

SKEWED_RESULT = 0.5
"""The skewness of a result, as the input of another model, from which there is a warning.

At 0.5, a Gaussian is off by a quarter of a standard deviation in its 97.5 % quantile.
"""

Gains = dict[int, list[Tensor]]
"""E[J] L (*batch, m, width) for each output, by its place among all results, and each input."""


def check_generator(generator: object) -> None:
    """Refuse a seed, or anything else that is no `torch.Generator`."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            "generator is a torch.Generator, as torch.Generator().manual_seed(0) gives, not "
            f"{generator!r}"
        )


def is_skewed(x: Gaussian, beyond: float = 0.0) -> bool:
    """Whether an element has a known skewness whose size is above `beyond`."""
    return x.skewness is not None and bool((x.skewness.abs() > beyond).any())


class Method(ABC):
    """A way to find the mean and the covariance of a network's output."""

    uses_skewness: ClassVar[bool] = False
    """Whether the skewness of an input (`cp.Skewed`) has its part in the result."""

    needs_rules: ClassVar[bool] = False
    """Whether it needs a rule for every operation of the model."""

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
    """A method that runs another one, its base, on other inputs or beside samples."""

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
        """Run the base on a call."""
        with self._another_base(call):
            return self.base.run(call)

    @contextmanager
    def _another_base(self, call: Call) -> Iterator[None]:
        """Add to the error of a layerwise base that cp.Linearized() needs no rules."""
        try:
            yield
        except UnsupportedOperation as error:
            refused = isinstance(error, RandomDraws)  # by cp.Linearized as well
            if not self.base.needs_rules or refused or _draws(call):
                raise
            offer = "or give the method around it base=cp.Linearized(), which needs no rules"
            raise type(error)(f"{error}; {offer}") from error


def _draws(call: Call) -> bool:
    """Whether the model draws random numbers, as far as it runs on plain tensors."""
    try:
        return Network(call.on_tensors, call.inputs).draws
    except Exception:  # a module may raise anything
        return False
