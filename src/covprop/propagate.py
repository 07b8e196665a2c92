"""Run a network on a Gaussian."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from covprop.covariance import Dense
from covprop.dispatch import leaves
from covprop.eager import eager
from covprop.errors import RandomDraws, TooLarge, UnsupportedOperation
from covprop.gate import settled, warn_of_batch
from covprop.gaussian import Gaussian
from covprop.lineage import Lineage
from covprop.methods import (
    Exact,
    FunctionMethod,
    LayerwiseMethod,
    Method,
    Network,
    Propagation,
    Root,
    Sketched,
    WrappingMethod,
    linearize,
)
from covprop.methods.base import Advance, Estimate
from covprop.methods.draws import without_draws
from covprop.methods.outputs import check_outputs
from covprop.plan import Plan, Planner
from covprop.progress import PointBar, ProgressBar
from covprop.report.table import in_bytes
from covprop.retrace import averaged, budget, carried, expected_jacobians, fitted
from covprop.room import free_bytes, sharers
from covprop.rules.noise import warn_of_dropout
from covprop.running import broken_weights_named, finite, finite_gains, in_flight, run, unwrap, wrap
from covprop.sampling import SamplingError
from covprop.tensor import GaussianTensor

EXACT = Exact()
WORTH_A_PLAN = 2**20
"""Numbers in the tangents of the inputs from which memory is planned."""


def propagate(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    method: Method = EXACT,
    progress: bool = False,
    **named_inputs: Any,
) -> Any:
    """The mean and covariance of a network's output for Gaussian input.

    module: an nn.Module in evaluation mode, or any function of tensors; inputs: what to call it
    with, `Gaussian`s (independent of each other) and anything else; method: `cp.Exact()` by
    default, also as the last positional argument. The result is a `Gaussian`, or the nest of
    tuples, lists and dicts of them that the module returns, with the batch first wherever the
    module has put it. progress shows a bar. Raises `TooLarge`, with a plan, where memory would not
    suffice. Runs under the caller's autograd mode: wrap it in torch.no_grad() unless you
    want gradients.
    """
    inputs, method = settled(module, inputs, method, named_inputs)
    _doubt(module, inputs, named_inputs)
    return _propagated(module, inputs, named_inputs, method, progress)


def propagate_undoubted(
    module: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any], method: Method
) -> Any:
    """`propagate` for what has been warned of, or is meant: without a second look at the inputs."""
    inputs, method = settled(module, inputs, method, named_inputs)
    return _propagated(module, inputs, named_inputs, method, progress=False)


def _doubt(module: object, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
    """Warn of what is computed as it is given, and is rarely meant."""
    if not isinstance(module, nn.Module):
        return
    warn_of_dropout(module)
    bound = _Bound(module, inputs, named_inputs)
    if len(bound.inputs) == 1:
        warn_of_batch(bound.inputs[0], eager(bound.call))


def _propagated(
    module: Any,
    inputs: tuple[Any, ...],
    named_inputs: dict[str, Any],
    method: Method,
    progress: bool,
) -> Any:
    with ExitStack() as stack:
        if not isinstance(method, LayerwiseMethod):
            advance = stack.enter_context(PointBar()) if progress else _unseen
            bound = _Bound(module, inputs, named_inputs)
            if isinstance(method, WrappingMethod):
                stack.enter_context(broken_weights_named(module))
                return method.around(bound, advance)
            return _evaluate(bound, method, advance)
        one, runs = method, 1
        if isinstance(method, Sketched):
            one, runs = _fitting(module, inputs, named_inputs, method), method.replicates
        watcher = None
        if progress:
            steps = plan(module, *inputs, method=one, **named_inputs).steps
            watcher = stack.enter_context(ProgressBar(steps * runs))
        results = []
        for _ in range(runs):
            lineage = Lineage(one)
            lineage.watcher = watcher
            results.append(_along(lineage, module, inputs, named_inputs))
        return averaged(results, method) if isinstance(method, Sketched) else results[0]


def propagate_along(
    lineage: Lineage, module: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any]
) -> Any:
    """`propagate` with a lineage of one's own, which may have a watcher."""
    inputs, _ = settled(module, inputs, lineage.method, named_inputs)
    _doubt(module, inputs, named_inputs)
    return _along(lineage, module, inputs, named_inputs)


def _along(
    lineage: Lineage, module: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any]
) -> Any:
    means = [x.mean for x in leaves((inputs, named_inputs)) if isinstance(x, Gaussian)]
    if isinstance(lineage.method, Sketched):
        lineage.method = lineage.method.seeded(means[0].device)
    _guard(lineage, module, inputs, named_inputs)
    method = lineage.method
    with ExitStack() as stack:
        stack.enter_context(broken_weights_named(module))
        if method.returns:
            _without_autograd(stack)

        def pass_through() -> Any:
            return run(module, inputs, named_inputs, lambda x: in_flight(x, lineage))

        return unwrap(without_draws(pass_through, means), method)


def _guard(
    lineage: Lineage, module: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any]
) -> None:
    """Have the whole propagation planned before the first large covariance."""
    method = lineage.method
    lineage.guard = lambda: _check_memory(plan(module, *inputs, method=method, **named_inputs))


def _without_autograd(stack: ExitStack) -> None:
    """It is for the way back, operation by operation."""
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())


def _fitting(
    module: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any], method: Sketched
) -> Sketched:
    """One of the runs of a sketch, with as many tangents remembered as there is room for."""
    one = method.replicate()
    given = [leaf for leaf in leaves((inputs, named_inputs)) if isinstance(leaf, Gaussian)]
    numbers = sum(x.mean.numel() for x in given) * one.tangents
    if method.memory is None and numbers < WORTH_A_PLAN:
        return one
    planned = plan(module, *inputs, method=one, **named_inputs)
    return fitted(method, planned.peak_bytes, budget(method, given[0].device) // 2)


def plan(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    method: Method = EXACT,
    **named_inputs: Any,
) -> Plan:
    """What `propagate` would take with the same arguments: shapes, memory and work, step by step.

    Runs the means through the module, and nothing of the covariances.
    """
    inputs, method = settled(module, inputs, method, named_inputs)
    if not isinstance(method, LayerwiseMethod):
        raise UnsupportedOperation(
            f"a plan lists the covariances on the way through a model, and cp."
            f"{type(method).__name__} has none: it evaluates the model on plain tensors"
        )
    lineage = Lineage(method)
    planner = Planner(module, follows=torch.is_grad_enabled() and not method.returns)
    lineage.watcher = planner
    given = [leaf for leaf in leaves((inputs, named_inputs)) if isinstance(leaf, Gaussian)]
    with torch.no_grad():
        planner.end(run(module, inputs, named_inputs, lambda x: planner.wrap(x, lineage)))
    free = free_bytes(given[0].device) // sharers(given[0].covariance)
    return Plan(tuple(planner.steps), free)


@final
class _Bound(Propagation):
    """A module and its arguments."""

    def __init__(
        self, module: Any, arguments: tuple[Any, ...], named_arguments: dict[str, Any]
    ) -> None:
        self.module, self.arguments, self.named_arguments = module, arguments, named_arguments
        given = leaves((arguments, named_arguments))
        self.inputs = tuple(leaf for leaf in given if isinstance(leaf, Gaussian))

    def run(self, inputs: Sequence[Gaussian], method: Method) -> Any:
        arguments, named = self._with(inputs)
        with self._another_base(method):
            return propagate_undoubted(self.module, arguments, named, method)

    def call(self, *tensors: Tensor) -> Any:
        """The module, with tensors in place of the Gaussians."""
        arguments, named = self._with(tensors)
        return self.module(*arguments, **named)

    def network(self) -> Network:
        return Network(self.call, self.inputs)

    def gains(self, method: Method, wanted: bool = False) -> dict[int, list[Tensor]]:
        while isinstance(method, WrappingMethod):
            method = method.base
        roots = [Root.of(x) for x in self.inputs]
        if isinstance(method, LayerwiseMethod) and not method.variances_only:
            return finite_gains(self._expected_gains(method, roots, wanted))
        network = self.network()
        jacobians = linearize(network)[1] if network.outputs else []
        gains = {
            output.leaf: [root.after(one) for root, one in zip(roots, jacobian, strict=True)]
            for output, jacobian in zip(network.outputs, jacobians, strict=True)
        }
        return finite_gains(gains)

    def _expected_gains(
        self, method: LayerwiseMethod, roots: Sequence[Root], wanted: bool
    ) -> dict[int, list[Tensor]]:
        """By the way back of a sketch, or by carrying the columns of the roots on."""
        if isinstance(method, Sketched):
            method = method.brief() if wanted else replace(method.brief(), outputs=None)
            method = method.seeded(roots[0].x.device)
        lineage, begun = Lineage(method), list[GaussianTensor]()
        _guard(lineage, self.module, self.arguments, self.named_arguments)

        def begin(x: Gaussian) -> GaussianTensor:
            begun.append(in_flight(x, lineage))
            return begun[-1].clone()  # which the module may change in place

        with ExitStack() as stack:
            stack.enter_context(self._another_base(method))
            if method.returns:
                _without_autograd(stack)
            found: dict[int, list[Tensor]] = {}

            def pass_through() -> Any:
                begun.clear()
                return run(self.module, self.arguments, self.named_arguments, begin)

            means = [root.x.mean for root in roots]
            for at, y in enumerate(leaves(without_draws(pass_through, means))):
                if not isinstance(y, GaussianTensor):
                    continue
                if isinstance(method, Sketched):
                    rows = expected_jacobians(y, begun, method)
                    found[at] = [root.after(one) for root, one in zip(roots, rows, strict=True)]
                else:
                    both = zip(roots, begun, strict=True)
                    found[at] = [carried(y, x, root) for root, x in both]
        return found

    @contextmanager
    def _another_base(self, method: Method) -> Iterator[None]:
        """Where a method that goes from layer to layer works for another, offer one in turn."""
        try:
            yield
        except UnsupportedOperation as error:
            refused = isinstance(error, RandomDraws)  # by cp.Linearized as well
            if not isinstance(method, LayerwiseMethod) or refused or self._draws():
                raise
            offer = "or give the method around it base=cp.Linearized(), which needs no rules"
            raise type(error)(f"{error}; {offer}") from error

    def _draws(self) -> bool:
        """Whether the model draws random numbers, as far as it runs on plain tensors."""
        try:
            return self.network().draws
        except Exception:  # a module may raise anything
            return False

    def nest(self, network: Network, estimates: Sequence[Estimate], method: Method) -> Any:
        results = []
        for output, (mean, covariance, error) in zip(network.outputs, estimates, strict=True):
            shape = (*network.batch_shape, *output.event_shape)
            if error is not None:
                error = SamplingError(error.samples, error.mean.reshape(shape), error.covariance)
            results.append(finite(mean.reshape(shape), Dense(covariance), method, error))
        return network.nest(results)

    def _with(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these in place of the Gaussians."""
        waiting = iter(inputs)
        return (
            wrap(self.arguments, lambda _: next(waiting)),
            wrap(self.named_arguments, lambda _: next(waiting)),
        )


def _evaluate(bound: _Bound, method: FunctionMethod, advance: Advance) -> Any:
    """The result of a method that wants a function of plain tensors."""
    network = bound.network()
    if network.draws and not method.random:
        raise RandomDraws(
            f"the model draws random numbers, as dropout and Bayesian layers do, and "
            f"cp.{type(method).__name__} takes it as a function; use cp.MonteCarlo(), for such "
            "layers also cp.Exact(), or for dropout call model.eval()"
        )
    check_outputs(network, method.entry_bytes)
    with broken_weights_named(bound.module):
        estimates = method.estimate(network, advance) if network.outputs else []
        return bound.nest(network, estimates, method)


def _unseen(more: int, total: int) -> None:
    """No bar."""


def _check_memory(planned: Plan) -> None:
    if planned.fits:
        return
    largest = max(planned.steps, key=lambda step: step.peak_bytes)
    raise TooLarge(
        f"the covariances would need {in_bytes(planned.peak_bytes)} at {largest.operation} "
        f"({largest.module or 'the function'}, {largest.features:,} features), and "
        f"{in_bytes(planned.free_bytes)} are free. A batch of inputs needs batch_dims=1, and "
        "may be propagated in parts; float32 takes half of float64; wide layers between narrower "
        "ones are streamed; else take cp.Sketched(), which has no covariances on the way, or "
        "sample: cp.MonteCarlo(). The plan:\n"
        f"{planned}"
    )
