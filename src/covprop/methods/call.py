"""A model with its arguments, and its passes over Gaussians in flight."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from covprop.carriers import Work
from covprop.covariance import Covariance, Dense
from covprop.error_estimate import Deferred, ErrorEstimate, SamplingError
from covprop.errors import (
    ApproximationWarning,
    CovpropError,
    LostRank,
    MomentOverflow,
    TooLarge,
    UnsupportedOperation,
    warn_user,
)
from covprop.flow.lineage import (
    LARGE,
    CreatedTensors,
    GeneratorDraws,
    KeptGenerators,
    Lineage,
    Watcher,
    free_bytes,
    random_draws,
)
from covprop.flow.nests import PLAIN, leaves, map_leaves
from covprop.flow.table import unsupported_script
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.methods.plan import Step
from covprop.modules import COMPILER, EagerMode, eagerly, in_modes, path_of, raising_module
from covprop.text_table import in_bytes

Result = TypeVar("Result")

Advance: TypeAlias = Callable[[int, int], None]
"""Takes how many more evaluations of the model are done, and of how many in all."""

SCRIPTED = "in the TorchScript interpreter"
"""In what a scripted function says of its argument."""


class Progress(Protocol):
    """A bar that shows how far a propagation has come."""

    def operations(self, steps: Sequence[Step], rates: Work) -> Watcher:
        """Begin a bar of planned operations, which it watches; rates: seconds of their work."""

    def points(self, more: int, total: int) -> None:
        """Count evaluations of the model."""


class Estimator(Protocol):
    """Estimates the errors of the results of a call."""

    def errors(self, nest: Any, method: Any) -> tuple[ErrorEstimate, ...]:
        """The errors of every Gaussian in a result of this method."""


@final
@dataclass(frozen=True, eq=False)
class Call:
    """A model with its arguments, of which some are Gaussian: what a method runs."""

    module: Any
    arguments: tuple[Any, ...]
    named_arguments: dict[str, Any]
    progress: Progress | None = None
    estimator: Callable[["Call"], "Estimator"] | None = None
    """What estimates the errors of a result from layer to layer, where they are wanted."""

    @cached_property
    def inputs(self) -> tuple[Gaussian, ...]:
        """The Gaussians among the arguments."""
        given = leaves((self.arguments, self.named_arguments))
        return tuple(leaf for leaf in given if isinstance(leaf, Gaussian))

    @cached_property
    def layers(self) -> tuple[tuple[str, nn.Module], ...]:
        """The modules of the model with their paths, itself first; a function has none."""
        return tuple(self.module.named_modules()) if isinstance(self.module, nn.Module) else ()

    @property
    def means(self) -> list[Tensor]:
        """The means of the inputs."""
        return [x.mean for x in self.inputs]

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self.inputs[0].mean.device

    def on(self, inputs: Sequence[Gaussian]) -> "Call":
        """The same call on other Gaussians, without a bar."""
        rest = iter(inputs)
        both = _replaced((self.arguments, self.named_arguments), lambda _: next(rest))
        return Call(self.module, *both)

    def on_tensors(self, *tensors: Tensor) -> Any:
        """What the model returns for tensors in place of the Gaussians."""
        rest = iter(tensors)
        both = _replaced((self.arguments, self.named_arguments), lambda _: next(rest))
        return self.module(*both[0], **both[1])

    @property
    def empty(self) -> bool:
        """Whether the batch has no elements."""
        return any(not x.covariance.batch_shape.numel() for x in self.inputs)

    def of_no_elements(self, method: object) -> Any:
        """The result for a batch without elements, which has nothing but its shapes."""
        batch = self.inputs[0].batch_shape

        def of_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.numel() or not leaf.is_floating_point():
                return leaf
            if leaf.shape[: len(batch)] != batch:  # which the model has moved
                leaf = leaf.movedim(leaf.shape.index(0), 0)
            size = leaf.shape[len(batch) :].numel()
            return checked_result(leaf, Dense(leaf.new_zeros(*batch, size, size)), method)

        return map_leaves(self.on_tensors(*self.means), of_leaf)

    def in_flight(
        self, begin: Callable[[Gaussian], GaussianTensor], drawn: GeneratorDraws | None = None
    ) -> Any:
        """What the model returns for tensors in flight; an error names the module that raised.

        drawn: notes what the model draws from generators of its own.
        """
        try:
            # A name for the arguments would keep the inputs, and all that came of them, alive.
            given = [_replaced(self.arguments, begin), _replaced(self.named_arguments, begin)]
            compiles = COMPILER in sys.modules  # nothing has been compiled without it
            created = CreatedTensors(GaussianTensor, GeneratorDraws() if drawn is None else drawn)
            with eagerly() if compiles else nullcontext(), created:
                result = self.module(*given.pop(0), **given.pop())
            for leaf in leaves(result):
                if isinstance(leaf, GaussianTensor):
                    leaf.materialize()
            return result
        except CovpropError as error:
            if not isinstance(self.module, nn.Module) or isinstance(error, TooLarge | LostRank):
                raise
            layer = error.layer or raising_module(self.module, error.__traceback__)
            path = None if layer is None else path_of(layer, self.module)
            if path is None:
                raise
            raise type(error)(f"in {path}: {error}") from error
        except RuntimeError as error:
            if SCRIPTED not in str(error):
                raise
            raise unsupported_script() from error

    def with_errors(self, nest: Any, method: object) -> Any:
        """A result whose Gaussians estimate their errors when they are asked for, where wanted.

        With the model in the modes of now, as with its dropout on; where its weights have changed
        since, nothing is estimated.
        """
        if (make := self.estimator) is None:
            return nest
        weights = [
            (parameter, parameter._version)
            for _, layer in self.layers
            for parameter in layer._parameters.values()
            if parameter is not None
        ]
        modes = [(layer, layer.training) for _, layer in self.layers]
        shared: list[tuple[ErrorEstimate, ...]] = []

        def deferred(place: int) -> Deferred:
            def estimate() -> ErrorEstimate | None:
                if any(p._version != version for p, version in weights):
                    return None
                if not shared:
                    call = Call(self.module, self.arguments, self.named_arguments)
                    with in_modes(modes):
                        shared.append(make(call).errors(plain, method))
                return shared[0][place]

            return Deferred(estimate)

        plain = nest
        if torch.is_grad_enabled():  # an estimate, which may outlive it, does not hold the graph
            plain = _replaced(nest, lambda y: y.detach() if _has_graph(y) else y)
        places = itertools.count()
        return _replaced(nest, lambda y: y.with_error(deferred(next(places))))

    def advance(self, more: int, total: int) -> None:
        """Show that more evaluations of the model are done, of so many in all."""
        if self.progress is not None:
            self.progress.points(more, total)

    @contextmanager
    def naming_broken_weights(self) -> Iterator[None]:
        """Name the first weight that is not finite where moments are not."""
        try:
            yield
        except MomentOverflow as error:
            if not isinstance(self.module, nn.Module):
                raise
            weights = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
            broken = (name for name, tensor in weights if not bool(torch.isfinite(tensor).all()))
            if (name := next(broken, None)) is None:
                raise
            reason = f"{name} has NaN or infinite entries, so nothing can be computed; repair it"
            if str(error).startswith(reason):  # a run inside this one has said it
                raise
            raise type(error)(f"{reason} ({error})") from error


def _has_graph(y: Gaussian) -> bool:
    """Whether autograd follows a Gaussian."""
    parts = (y.mean, y.skewness, y.covariance.diagonal())
    return any(part is not None and part.requires_grad for part in parts)


def _replaced(nest: Any, value: Callable[[Gaussian], Any]) -> Any:
    """A nest with a value in place of each Gaussian."""
    return map_leaves(nest, lambda leaf: value(leaf) if isinstance(leaf, Gaussian) else leaf)


def in_flight(x: Gaussian, lineage: Lineage) -> GaussianTensor:
    """The in-flight tensor of a Gaussian."""
    return GaussianTensor(x.mean, lineage.method.carrier(x, lineage))


def finished(result: Any, finish: Callable[[GaussianTensor], Gaussian]) -> Any:
    """A nest with a Gaussian in place of each tensor in flight."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, GaussianTensor):
            leaf.check_current()
            return finish(leaf)
        check_returned(leaf)
        return leaf

    return map_leaves(result, of_leaf)


def check_returned(leaf: Any) -> None:
    """Refuse a leaf that is no tensor, number, string or None."""
    if not isinstance(leaf, PLAIN):
        raise UnsupportedOperation(
            f"the model returns a {type(leaf).__name__}; covprop unwraps tensors, tuples, lists, "
            "dicts and dataclasses"
        )


def checked_result(
    mean: Tensor,
    covariance: Covariance,
    method: object,
    error: SamplingError | None = None,
    *,
    skewness: Tensor | None = None,
    notes: Sequence[str] = (),
) -> Gaussian:
    """The Gaussian of a result, after checks for overflow, underflow and shapes."""
    largest = float(mean.detach().abs().max()) if mean.numel() else 0.0
    if not (math.isfinite(largest) and covariance.finite()):
        raise MomentOverflow(
            f"the output's moments are not finite in {mean.dtype}; look for NaN or infinity "
            "in the model's weights and constants, or convert model and Gaussian to float64"
        )
    _warn_of_underflow(largest, covariance)
    count, batch = len(covariance.batch_shape), covariance.batch_shape
    fits = mean.shape[:count] == batch and mean.shape[count:].numel() == covariance.size
    if not fits or mean.dtype is not covariance.dtype or covariance.shape_flaw() is not None:
        Gaussian(mean, covariance, validate_args=False)  # whose check says what does not fit
    return Gaussian.unchecked(
        mean, covariance, method=method, sampling=error, skewness=skewness, notes=notes
    )


def check_memory(outputs: int, needed: int, device: torch.device) -> None:
    """Raise if so many bytes for the covariances of so many outputs are not free."""
    if needed > LARGE and needed > (free := free_bytes(device)):
        raise TooLarge(
            f"the covariances of {outputs:,} outputs would need {in_bytes(needed)}, and "
            f"{in_bytes(free)} are free; return fewer outputs, or propagate parts of the batch"
        )


def _warn_of_underflow(largest: float, covariance: Covariance) -> None:
    """Warn where the whole output is so small that squares of its size are no numbers."""
    least = torch.finfo(covariance.dtype).tiny
    if 0 < largest < least**0.5 and not bool((covariance.diagonal() > least).any()):
        warn_user(
            f"the output is at most {largest:.1g}, and variances of that size are below the "
            f"smallest numbers of {covariance.dtype}: they come out as zero, or too small; convert "
            "model and Gaussian to float64, or scale the output up",
            ApproximationWarning,
        )


@contextmanager
def random_state_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the state of the random generators afterwards, also of those of the model.

    tensors: those of the model, on whose devices torch's generators are.
    """
    with torch.random.fork_rng(_cuda(tensors)), KeptGenerators():
        yield


def random_state(tensors: Sequence[Tensor]) -> Tensor:
    """The state of the generators that a model of these tensors may draw from."""
    state, others = torch.get_rng_state(), _cuda(tensors)
    if not others:
        return state
    return torch.cat([state, *(torch.cuda.get_rng_state(device) for device in others)])


def _cuda(tensors: Sequence[Tensor]) -> list[int]:
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})


def without_random_draws(
    call: Callable[[GeneratorDraws, bool], Result],
    tensors: Sequence[Tensor],
    own: torch.Generator | None = None,
) -> Result:
    """Return what a call returns, and refuse a call that draws random numbers.

    One pass would take what a model draws itself as constants. Rules have no part in it: dropout of
    a Gaussian and Bayesian layers have moments, and draw nothing. Where the state of torch's
    generators has changed, the call is made again and watched: another thread may have drawn, and
    if not, the error names the function. So is a call that draws from generators of its own, which
    may begin anew each time.

    call: takes what notes these, and whether it is watched, for nothing else; own: the generator of
    the method, whose numbers it leaves to the next call.
    """
    before = random_state(tensors)
    result = call(drawn := GeneratorDraws(), False)
    changed = not torch.equal(random_state(tensors), before)
    if drawn or changed:
        state = None if own is None else own.get_state()
        try:
            with _Watch(tensors) if changed else nullcontext():
                call(GeneratorDraws(drawn), True)
        finally:
            drawn.rewind()
            if own is not None and state is not None:
                own.set_state(state)
    return result


class _Watch(TorchFunctionMode):
    """A mode that refuses the first function that draws; torch's modes are of one thread."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        with _Draws(self._tensors) as draws:
            result = func(*args, **(kwargs or {}))
        if draws.seen:
            raise random_draws(func)
        return result


class _Draws(EagerMode):
    """A mode that sees whether an operator has drawn random numbers."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.seen, self._tensors = False, tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = random_state(self._tensors)
        result = func(*args, **(kwargs or {}))
        self.seen |= not torch.equal(random_state(self._tensors), before)
        return result
