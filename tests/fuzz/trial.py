"""A program with its input and method, and how far rounding on the way may move its result.

Tolerances are derived: an error is compared with what changes in the result when every value on the
way is changed by the accuracy of one operation (rounding, or the 1e-8 that quadrature promises).
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import covprop as cp
from covprop.activations.composite import closed_form
from covprop.activations.expression import Expression
from covprop.carriers import full
from covprop.carriers.cross_covariance import checked_sum
from covprop.methods import LayerwiseMethod
from tests.fuzz.outcomes import Refusal, Wrong, answer, compare
from tests.fuzz.programs import Input
from tests.fuzz.writing import Program
from tests.layers import propagate

SAFETY = 64.0
"""Roundings of one operation, and how far a random change may be from the worst one."""
STEP = 2.0**-22
"""Relative size of the changes that sensitivities are measured with, in float64."""
DRAWS = 2
CANCELLED = 4.0
"""Roundings of a function of torch that is a difference, relative to its terms."""
LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Trial:
    """A program, its input and a method."""

    program: Program
    input: Input
    method: Any
    random: Random

    def run(
        self,
        dtype: torch.dtype = torch.float64,
        noise: float | None = None,
        input: Input | None = None,
        watch: Callable[[Any], Any] | None = None,
        method: Any = None,
    ) -> Any:
        """A Gaussian, or a refusal."""
        function, _ = self.program.build(dtype, watch)
        x = (input or self.input).gaussian(dtype, noise)
        with torch.no_grad():
            return answer(lambda: propagate(function, x, method=method or self.method))

    def run_blurred(self, blurred: "Blurred", noise: float | None, input: Input) -> Any:
        """With changes to every value on the way."""
        function, _ = self.program.build(torch.float64, blurred.watch)
        x = input.gaussian(torch.float64, noise)
        call = blurred.around(function)
        with torch.no_grad():
            return answer(lambda: propagate(call, x, *blurred.extra, method=self.method))

    @cached_property
    def result(self) -> Any:
        return self.run()

    @property
    def rough(self) -> bool:
        """Whether covprop says that an approximation is rough for this input."""
        return bool(self.warned)

    @cached_property
    def warned(self) -> list[str]:
        """What covprop says of approximations that are rough for this input."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            function, _ = self.program.build(torch.float64)
            with torch.no_grad():
                propagate(function, self.input.gaussian(torch.float64), method=self.method)
        return [
            str(one.message) for one in told if issubclass(one.category, cp.ApproximationWarning)
        ]

    @property
    def first(self) -> Input:
        """The input, or the first of a batch of them as a batch of one."""
        return self.input.element(0, keep=True) if self.input.batch_dims else self.input

    def text(self) -> str:
        """A program that shows the result."""
        lines = [
            "import torch, covprop as cp; from torch import nn; import torch.nn.functional as F",
            "dtype = torch.float64", self.program.text(), self.input.text(),
            f"y = cp.propagate(build(dtype)[0], x, cp.{self.method!r})",
        ]  # fmt: skip
        return "\n".join(lines)


def perturbed(generator: torch.Generator, step: float = STEP) -> Callable[[Any], Any]:
    """Change every element of a value by a step of itself, at random."""

    def watch(value: Any) -> Any:
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return value * (1 + step * noise).to(value.dtype)

    return watch


def _unchanged(value: Any) -> Any:
    return value


class Blurred:
    """The same, and covariances too: independent noise is added that has STEP of the variance.

    Of a layer that is made of several operations, STEP of the largest variances that it adds up
    inside, as they may cancel. Never below the smallest variance of the dtype: where there is none,
    a mean behind a kink is off by its root; nor below the square of the rounding of its mean, in
    which an integral cannot see it. Not to what is composed into one function with what
    follows, which has no numbers of its own.
    """

    def __init__(self, trial: Trial, x: Input, noise: float | None, least: float) -> None:
        self.change, self.variances, self.least = _unchanged, [0.0], least
        shapes: list[tuple[torch.Size, torch.dtype]] = []
        trial.program.build(torch.float64, lambda t: (shapes.append((t.shape, t.dtype)), t)[1])[0](
            x.mean
        )
        self.extra = [
            cp.Gaussian.isotropic(
                torch.zeros(shape, dtype=dtype), stddev=STEP**0.5, batch_dims=x.batch_dims
            )
            for shape, dtype in shapes
        ]
        self.waiting: list[Any] = []
        layerwise = isinstance(trial.method, LayerwiseMethod)
        self.composed, self.inside = _numbers(trial, x, noise) if layerwise else ([], [])

    def watch(self, value: Any) -> Any:
        place = -len(self.waiting)
        composed, inside = self.composed[place], self.inside[place]
        noise = self.waiting.pop(0)
        value = self.change(value)
        if isinstance(value, cp.GaussianTensor):
            if composed:
                return value
            value.materialize()
            variance = value.covariance.diagonal().clamp(min=0).reshape(value.shape)
            self.variances.append(float(variance.max()))
            lost = (torch.finfo(torch.float64).eps * value.shown.detach()) ** 2
            added = inside + (self.least + lost) / STEP
            value = value + noise * (variance + (variance > 0) * added).sqrt()
        return value

    def around(self, function: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(x: Any, *extra: Any) -> Any:
            self.waiting = list(extra)
            return function(x)

        return call


def _numbers(trial: Trial, x: Input, noise: float | None) -> tuple[list[bool], list[float]]:
    """Whether each value is part of one function with what follows; and what layers add up."""
    pending: list[Any] = []
    inside: list[float] = []
    layers, added = cycle(trial.program.layers), [0.0]  # a sketch runs the program twice

    def spy(operation: Any, matrix: Tensor, size: Tensor, edges: Any) -> Any:
        added.append(float(size.max()))
        return checked_sum(operation, matrix, size, edges)

    def watch(value: Any) -> Any:
        waits = isinstance(value, cp.GaussianTensor) and value.is_pending
        pending.append(value.pending if waits else None)
        inside.append(max(added) if next(layers) else 0.0)
        added[:] = [0.0]
        return value

    with patch.object(full, "checked_sum", spy):
        trial.run(noise=noise, input=x, watch=watch)
    whole = [
        one.expression for one in pending
        if one is not None and one.evaluated is not None
        and not (one.expression.stepwise and closed_form(one.expression) is None)
    ]  # fmt: skip
    inner = {id(part) for one in whole for part in _parts(one)}
    composed = [
        one is not None and not one.expression.affine
        and (one.evaluated is None or id(one.expression) in inner)
        for one in pending
    ]  # fmt: skip
    return composed, inside


def _parts(expression: Expression) -> Iterator[Expression]:
    """All that an expression is composed of."""
    for one in expression.inner:
        yield one
        yield from _parts(one)


def deviations(y: cp.Gaussian) -> Tensor:
    """Standard deviations (*batch, n), of the flattened event."""
    return y.covariance.diagonal().detach().double().clamp(min=0).sqrt()


def flat_mean(y: cp.Gaussian) -> Tensor:
    return y.mean.detach().double().reshape(*y.batch_shape, y.event_shape.numel())


def rounding(
    trial: Trial,
    y: cp.Gaussian,
    part: float,
    noise: float | None = None,
    input: Input | None = None,
) -> tuple[Tensor, Tensor]:
    """How much mean (*batch, n) and covariance may change by errors of this part on the way."""
    s = deviations(y)
    mean_change, change = torch.zeros_like(s), torch.zeros(*s.shape, s.shape[-1]).double()
    x = input or trial.input
    single = torch.finfo(torch.float32)
    smallest = single.tiny if part >= single.eps else torch.finfo(torch.float64).tiny
    blurred = Blurred(trial, x, noise, smallest)
    layerwise = isinstance(trial.method, LayerwiseMethod)
    # Two opposite changes: what is rounding alone is then on both sides of a kink at zero.
    for step in (STEP, -STEP):
        blurred.change = perturbed(torch.Generator().manual_seed(7), step)
        if layerwise:
            z = trial.run_blurred(blurred, noise, x)
        else:
            z = trial.run(noise=noise, input=x, watch=blurred.change)
        if isinstance(z, Refusal):  # at the edge of what has an answer
            return torch.full_like(s, torch.inf), torch.full_like(change, torch.inf)
        mean_change = torch.maximum(mean_change, (flat_mean(z) - flat_mean(y)).abs())
        difference = z.covariance_matrix.double() - y.covariance_matrix.double()
        change = torch.maximum(change, difference.abs())
    factor = SAFETY * part / STEP
    own = SAFETY * part
    # A derivative of torch that is a difference is wrong by roundings of its terms, which are 1;
    # so is that of a norm, which is zero in the direction of its input.
    terms = float(trial.program.normalizes) if layerwise else CANCELLED
    slope = part * terms * _widest(trial, x, noise) if terms else 0.0
    mean_allowed = factor * mean_change.amax(-1, keepdim=True) + own * (flat_mean(y).abs() + s)
    # float32 has no numbers below LEAST; a derivative that cancels has an error of its own
    least = LEAST + part**2 * max(blurred.variances)
    rest = own * s[..., :, None] * s[..., None, :] + least
    rest = rest + slope * (s[..., :, None] + s[..., None, :]) + slope**2
    return mean_allowed + LEAST, factor * worst_of_rows(change, s) + rest


def _widest(trial: Trial, x: Input, noise: float | None) -> float:
    """The largest standard deviation of a value on the way, by Gaussian layers."""
    widest = [0.0]

    def watch(value: Any) -> Any:
        if isinstance(value, cp.GaussianTensor):
            known = value.alias()
            known.evaluate()
            widest.append(float(known.variances.clamp(min=0).max()) ** 0.5)
        return value

    trial.run(noise=noise, input=x, watch=watch, method=cp.GaussianLayers())
    return max(widest)


def worst_of_rows(change: Tensor, s: Tensor) -> Tensor:
    """Changes of a covariance, each as large as the worst of its row or column, in deviations s."""
    unit = torch.where(s > 0, s, 1.0)
    each = (change / unit[..., None, :]).amax(-1)
    sides = each[..., :, None] * unit[..., None, :], each[..., None, :] * unit[..., :, None]
    return torch.maximum(*sides)


def near(trial: Trial, what: str, y: cp.Gaussian, z: cp.Gaussian, part: float, **run: Any) -> None:
    """Two results are equal up to errors of this part in every operation; z is in float64."""
    s = deviations(z)
    own = SAFETY * part
    simple = own * (flat_mean(z).abs() + s), own * s[..., :, None] * s[..., None, :]
    try:
        compare(f"mean {what}", flat_mean(y), flat_mean(z), simple[0])
        compare(f"covariance {what}", y.covariance_matrix, z.covariance_matrix, simple[1])
    except Wrong:
        mean, matrix = rounding(trial, z, part, **run)
        compare(f"mean {what}", flat_mean(y), flat_mean(z), mean)
        compare(f"covariance {what}", y.covariance_matrix, z.covariance_matrix, matrix)
