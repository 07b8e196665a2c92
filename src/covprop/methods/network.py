"""A network as a function of plain tensors, one for each of its Gaussian inputs.

It is run twice before anything else: at the means, where `Dependence` sees which of the results
depend on the inputs and how large tensors get on the way; and with the first Gaussian of the batch
moved, which shows where in each result the batch is, and that its elements are independent of each
other. Where these two leave it open, there are more probes (`methods/probes.py`).
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from covprop.covariance import Dense
from covprop.error_estimate import Deferred, SamplingError
from covprop.errors import UnsupportedOperation
from covprop.flow.lineage import GeneratorDraws
from covprop.flow.nests import leaves, map_leaves
from covprop.gaussian import Gaussian
from covprop.kernels.gradients import quiet
from covprop.methods.call import (
    check_memory,
    check_returned,
    checked_result,
    random_state,
    random_state_kept,
)
from covprop.methods.plan import WorkCounter
from covprop.methods.probes import Dependence, Probes
from covprop.methods.root import Root
from covprop.modules import eager
from covprop.validation import SUPPORTED

HELD = 2**20
"""Entries of the largest tensor on the way through the network that are held at a time."""


class Estimate(NamedTuple):
    """Mean (*batch, m) and covariance (*batch, m, m) of an output, and what more is known."""

    mean: Tensor
    covariance: Tensor
    error: SamplingError | None = None
    skewness: Tensor | None = None


class NotVectorised(Exception):
    """Raised where many points at once are wanted, and vmap does not support the model."""


class Output(NamedTuple):
    """A result that depends on the inputs: which leaf, where its batch is, its shape without."""

    leaf: int
    shape: torch.Size
    batch_at: int
    event_shape: torch.Size
    dtype: torch.dtype


class Network:
    """A function of tensors whose results are nests, seen as a function to vectors."""

    def __init__(self, call: Callable[..., Any], inputs: Sequence[Gaussian]) -> None:
        """Run it once at the means; call takes a tensor for each of the inputs."""
        self.call, self.inputs = eager(call), tuple(inputs)
        self.batch_shape = inputs[0].batch_shape
        self._vectorised: bool | None = None  # not known
        self._many = self._mapped
        self.at_once_only = False
        """Whether points that cannot be evaluated at once are refused (`NotVectorised`)."""
        self.rounding: tuple[Tensor, ...] | None = None
        """How far evaluations are off by rounding, about, for every output (*batch, m), if known.

        By how much last bits of the inputs change them: where large numbers cancel on the way, much
        more than last bits of the outputs.
        """
        probes = Probes(self.call, inputs)
        with torch.no_grad(), random_state_kept(probes.means):
            state = random_state(probes.means)
            with Dependence(copies := [mean.clone() for mean in probes.means]) as dependence:
                self.result = self.call(*copies)
            self.draws = not torch.equal(random_state(probes.means), state)
            """Whether it takes random numbers."""
            self._constants = False
            """Whether it draws the same numbers in every call."""
            if dependence.drawn:
                self._see_constants(dependence.drawn)
            self.largest, self.most_work = dependence.largest, dependence.most_work
            before = list(leaves(self.result))
            for leaf in before:
                check_returned(leaf)
            marked = [isinstance(leaf, Tensor) and dependence.depends(leaf) for leaf in before]
            before = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in before]
        self._spread = tuple(zip(probes.means, probes.deviations, strict=True))
        probes.before, after = before, probes.after_a_deviation()
        _check_same(before, after)
        found = [
            (i, old, new)
            for i, (old, new) in enumerate(zip(before, after, strict=True))
            if isinstance(old, Tensor) and (marked[i] or probes.depends(i))
        ]
        self.visible = all(marked[i] for i, _, _ in found)
        """Whether torch showed how the outputs depend on the inputs; of scripts it does not."""
        self.outputs = tuple(_output(probes, i, old, new) for i, old, new in found)

    def _see_constants(self, drawn: GeneratorDraws) -> None:
        """Call it once more, and see which of its own draws are the same in every call.

        vmap draws either all numbers once or all for each point.
        """
        with Dependence([]) as again:
            self.call(*(mean.clone() for mean in self.means))
        constant = drawn.constant_in(again.drawn)
        self.draws |= not all(constant)
        self._constants = any(constant)
        if self.draws and self._constants:
            self._vectorised = False

    @property
    def means(self) -> tuple[Tensor, ...]:
        """The means of the inputs, to evaluate at."""
        return tuple(x.mean for x in self.inputs)

    @cached_property
    def roots(self) -> tuple[Root, ...]:
        """Roots of the covariances of the inputs, with as few columns as their ranks."""
        return tuple(map(Root.of_full_rank, self.inputs))

    @cached_property
    def work(self) -> float:
        """Floating-point operations of an evaluation, about, for all of the batch."""
        with torch.no_grad(), random_state_kept(self.means), WorkCounter() as work:
            self(*self.means)
        return work.total

    @property
    def vectorised(self) -> bool:
        """Whether many points are evaluated at once, and not one after another in Python."""
        if self._vectorised is None:
            with torch.no_grad(), random_state_kept(self.means):
                try:
                    self.at([mean[None] for mean in self.means], measure_rounding=True)
                except Exception:  # whatever a model has against it
                    self._vectorised = False
        return self._vectorised is True

    @property
    def step(self) -> int:
        """How many points may be evaluated at a time."""
        return max(1, HELD // self.largest)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Every output (*batch, m) at one tensor (*batch, *event) for each input."""
        result = list(leaves(self.call(*(tensor.clone() for tensor in tensors))))
        return tuple(self._flat(result[output.leaf], output) for output in self.outputs)

    def at(self, points: Sequence[Tensor], measure_rounding: bool = False) -> tuple[Tensor, ...]:
        """Every output (count, *batch, m) at points (count, *batch, *event) of each input.

        measure_rounding: whether to find `rounding` on the way, in the same evaluation.
        """
        if measure_rounding and self.rounding is None and self._vectorised is not False:
            near = [_last_bits_moved(*both) for both in self._spread]
            values = self.at([torch.cat(both) for both in zip(near, points, strict=True)])
            first = (part[: len(near[0])].double() for part in values)
            self.rounding = tuple((part[1:] - part[0]).abs().amax(0) for part in first)
            return tuple(part[len(near[0]) :] for part in values)
        if self._vectorised is None and self._takes_larger_batches():
            self._many = self._in_one_batch
        if self._vectorised is not False:
            try:
                with quiet():
                    found = self._many(points)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                # vmap cannot do all that models do; a mistake of the model shows up once more.
                self._vectorised = False
                if self.at_once_only:
                    raise NotVectorised from error
            else:
                self._vectorised = True
                return found
        rows = [self(*point) for point in zip(*points, strict=True)]
        return tuple(torch.stack(part) for part in zip(*rows, strict=True))

    def _mapped(self, points: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Every output at many points by vmap."""
        randomness = "same" if self._constants else "different"
        found: tuple[Tensor, ...] = vmap(self, randomness=randomness)(*points)
        return found

    def _in_one_batch(self, points: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Every output at many points by a larger batch, where vmap fails or loops.

        Such as recurrent layers, and the fused layers of transformers.
        """
        count, batch = len(points[0]), self.batch_shape[0]
        result = list(leaves(self.call(*(part.flatten(0, 1) for part in points))))
        values = []
        for output in self.outputs:
            shape = list(output.shape)
            shape[output.batch_at] = count * batch
            _check_shape(torch.Size(shape), result[output.leaf].shape)
            rows = result[output.leaf].movedim(output.batch_at, 0)
            values.append(rows.reshape(count, batch, output.event_shape.numel()))
        return tuple(values)

    @torch.no_grad()
    def _takes_larger_batches(self) -> bool:
        """Whether the model takes a larger batch, with the same results as one by one."""
        if len(self.batch_shape) != 1 or self.draws:
            return False
        two = [torch.stack([x.mean, x.mean + x.stddev]) for x in self.inputs]
        try:
            found = self._in_one_batch(two)
            rows = zip(*(self(*point) for point in zip(*two, strict=True)), strict=True)
        except Exception:  # whatever a model has against another batch
            return False
        return all(
            torch.allclose(values, torch.stack(row), rtol=0, atol=_rounding(values))
            for values, row in zip(found, rows, strict=True)
        )

    def gaussians(self, estimates: Sequence[Estimate], method: object) -> Any:
        """What the model returns, with a Gaussian in place of each output."""
        results: dict[int, Gaussian] = {}
        for place, (output, found) in enumerate(zip(self.outputs, estimates, strict=True)):
            shape = (*self.batch_shape, *output.event_shape)
            mean, skewness, sampling = found.mean.reshape(shape), found.skewness, found.error
            if sampling is not None:
                tails = sampling.heavy_tailed
                sampling = SamplingError(
                    sampling.samples,
                    sampling.mean.reshape(shape),
                    sampling.covariance,
                    None if tails is None else tails.reshape(shape),
                )
            skewness = None if skewness is None else skewness.reshape(shape)
            y = checked_result(mean, Dense(found.covariance), method, sampling, skewness=skewness)
            if sampling is not None:
                estimate = partial(sampling.estimate, y.mean, y.stddev, self.rounding_of(place, y))
                y = y.with_error(Deferred(estimate, needs_model=False))
            results[output.leaf] = y
        numbers = count()
        return map_leaves(self.result, lambda leaf: results.get(next(numbers), leaf))

    def rounding_of(self, place: int, y: Gaussian) -> Tensor | float:
        """`rounding` of an output in the shape of its Gaussian, 0 where it is not known."""
        if self.rounding is None or self.draws:
            return 0.0
        return self.rounding[place].reshape(y.mean.shape)

    def _flat(self, result: Tensor, output: Output) -> Tensor:
        _check_shape(output.shape, result.shape)
        if self.batch_shape:
            result = result.movedim(output.batch_at, 0)
        return result.reshape(*self.batch_shape, output.event_shape.numel())


def _last_bits_moved(mean: Tensor, stddev: Tensor) -> Tensor:
    """The mean of an input, and two copies with the last bits of its elements moved."""
    moves = torch.finfo(mean.dtype).eps * (mean.abs() + stddev).contiguous()
    moves.view(-1)[1::2].neg_()
    return torch.stack([mean, mean + moves, mean - moves])


def _output(probes: Probes, leaf: int, old: Tensor, new: Tensor) -> Output:
    if old.dtype not in SUPPORTED:
        raise UnsupportedOperation(
            f"the model returns {old.dtype} numbers, which have no Gaussian; return the "
            "float32 or float64 tensor that they come from"
        )
    _check_shape(old.shape, new.shape)
    at = probes.batch_at(leaf) if probes.batch_shape else 0
    event = list(old.shape)
    del event[at : at + len(probes.batch_shape)]
    return Output(leaf, old.shape, at, torch.Size(event), old.dtype)


def _rounding(values: Tensor) -> float:
    """By how much the rounding of whole networks may move values, at the most."""
    finite = values[values.isfinite()].abs()
    return float(finite.max()) * torch.finfo(values.dtype).eps ** 0.5 if finite.numel() else 0.0


def _check_shape(expected: torch.Size, found: torch.Size) -> None:
    if expected != found:
        raise UnsupportedOperation(
            f"the shape of the model's result depends on its input: {tuple(expected)} at the mean "
            f"and {tuple(found)} elsewhere"
        )


def _check_same(before: list[Any], after: list[Any]) -> None:
    if [type(leaf) for leaf in after] != [type(leaf) for leaf in before]:
        raise UnsupportedOperation("the model returns another nest for another input")
    for old, new in zip(before, after, strict=True):
        if not isinstance(old, Tensor) and old != new:
            raise UnsupportedOperation(
                f"the model returns the number {old} at the mean and {new} elsewhere; return it as "
                "a tensor"
            )


def check_outputs(
    network: Network, entry_bytes: Callable[[torch.dtype], int], beside: int = 0
) -> None:
    """Raise if what a method holds for the covariances of the outputs would not fit.

    entry_bytes: for each entry of the covariance of an output of this dtype; beside: float64
    numbers for each output that are held, too.
    """
    needed, outputs = 0, 0
    for output in network.outputs:
        size = output.event_shape.numel()
        outputs += size
        needed += entry_bytes(output.dtype) * size**2 + torch.float64.itemsize * beside * size
    check_memory(outputs, needed * network.batch_shape.numel(), network.means[0].device)
