"""Gradients of moments: finite, and along a line as differences say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import covprop as cp
from tests.fuzz.outcomes import Refusal, Wrong, answer
from tests.fuzz.programs import JUMPS
from tests.fuzz.trial import SAFETY, Trial
from tests.layers import propagate

STEP = 2.0**-12
"""Relative change of inputs and weights for differences."""
TOLERANCE = 1e-5
"""Of the sizes of the terms of a derivative, what it may be off."""
KINK = 0.75
"""The part of the difference of one-sided slopes that is left over half the step at a kink."""
FOLLOWED = 0.4
"""The part of cases in which differences are taken."""


@dataclass(frozen=True)
class Line:
    """Inputs and weights that all move in a direction of their own.

    The covariance is (1 + t d) S (1 + t d) with d diagonal, which is one for every t.
    """

    trial: Trial
    directions: list[Tensor]
    turn: Tensor

    @classmethod
    def random(cls, trial: Trial) -> "Line":
        generator = torch.Generator().manual_seed(trial.random.randrange(2**31))

        def normal(shape: torch.Size) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        _, parameters = trial.program.build(torch.float64)
        x = trial.input.gaussian(torch.float64)
        return cls(
            trial,
            [trial.input.noise * normal(x.mean.shape), *(normal(p.shape) / 8 for p in parameters)],
            normal(x.covariance.diagonal().shape),
        )

    def at(
        self, t: float, watch: Callable[[Any], Any] | None = None
    ) -> tuple[Tensor | Refusal, list[Tensor]]:
        """A number that weighs all moments, and the mean, covariance and weights it is of."""
        function, parameters = self.trial.program.build(torch.float64, watch)
        x = self.trial.input.gaussian(torch.float64)
        scale = 1 + t * self.turn
        mean = (x.mean + t * self.directions[0]).requires_grad_()
        matrix = scale[..., :, None] * x.covariance_matrix * scale[..., None, :]
        matrix = matrix.requires_grad_()
        for parameter, direction in zip(parameters, self.directions[1:], strict=True):
            with torch.no_grad():
                parameter += t * direction
            parameter.requires_grad_()
        method = self.trial.method
        y = answer(lambda: propagate(function, cp.Gaussian(mean, matrix), method=method))
        if isinstance(y, Refusal):
            return y, []
        return _weighed(y.mean) + _weighed(y.covariance_matrix), [mean, matrix, *parameters]

    def rounding(self) -> float:
        """What the backward pass rounds: SAFETY epsilons of every value times its derivative.

        Large where a variance that is nearly zero has a root, as of the maximum of two copies: the
        derivatives of its terms are far larger than what they add up to. A value that is zero
        because what it is made of cancels, as 2 * (x - x / 2) - x before a norm, has derivatives
        that cancel likewise: what is left of each is an epsilon of it, times the input's move.
        """
        sizes = [0.0]

        def follow(tensor: Tensor, moves: float) -> None:
            def rounded(gradient: Tensor) -> None:
                values = float((gradient * tensor).abs().sum())
                sizes.append(values + float(gradient.abs().max()) * moves)

            if tensor.requires_grad and tensor.numel():
                tensor.register_hook(rounded)

        of_mean, of_covariance = (float(move.abs().sum()) for move in self.moves()[:2])

        def watch(value: Any) -> Any:
            if isinstance(value, cp.GaussianTensor) and not value.is_pending:
                follow(value.loc, of_mean)
                if isinstance(value.covariance, cp.covariance.Dense):
                    follow(value.covariance.values, of_covariance)
            return value

        loss, leaves = self.at(0.0, watch)
        assert isinstance(loss, Tensor)
        torch.autograd.grad(loss, leaves, allow_unused=True)
        return SAFETY * torch.finfo(torch.float64).eps * sum(sizes)

    def moves(self) -> list[Tensor]:
        """Derivatives of the mean, the covariance and the weights along the line."""
        matrix = self.trial.input.gaussian(torch.float64).covariance_matrix
        moved = self.turn[..., :, None] * matrix + matrix * self.turn[..., None, :]
        return [self.directions[0], moved, *self.directions[1:]]

    def along(self, gradients: list[Tensor | None]) -> tuple[float, float]:
        """The derivative at zero, and the size of what it is the sum of, rounding included."""
        moves = self.moves()
        terms = [
            float((gradient * move).sum())
            for gradient, move in zip(gradients, moves, strict=True)
            if gradient is not None
        ]
        # A gradient that is zero because paths cancel is the rounding of each of them.
        rounding = torch.finfo(torch.float64).eps * sum(float(move.abs().sum()) for move in moves)
        return sum(terms), sum(map(abs, terms)) + rounding / TOLERANCE


def _weighed(tensor: Tensor) -> Tensor:
    return (tensor * torch.cos(torch.arange(tensor.numel())).reshape(tensor.shape)).sum()


def gradients(trial: Trial) -> None:
    """With respect to mean, covariance and weights."""
    if isinstance(trial.method, cp.Sketched | cp.Split) or isinstance(trial.result, Refusal):
        return
    line = Line.random(trial)
    loss, leaves = line.at(0.0)
    if isinstance(loss, Refusal) or not loss.requires_grad:
        return
    try:
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    except RuntimeError as error:
        if "is not implemented" not in str(error):  # torch has no second derivative of some
            raise
        return
    names = ["mean", "covariance", *["weight"] * (len(leaves) - 2)]
    for name, gradient in zip(names, found, strict=True):
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            if isinstance(trial.method, cp.Linearized) and not _has_second_derivatives(trial):
                return
            raise Wrong(f"the gradient with respect to the {name} is not finite")
    if trial.random.random() < FOLLOWED and not JUMPS & set(trial.program.operations):
        differences(line, list(found))


def _has_second_derivatives(trial: Trial) -> bool:
    """Whether those of torch, which gradients of a Jacobian are, are finite at the mean.

    By the mean and by the weights; they are not those of a norm at zero.
    """
    function, parameters = trial.program.build(torch.float64)
    leaves = [trial.input.mean.clone(), *parameters]
    for leaf in leaves:
        leaf.requires_grad_()
    jacobian = torch.autograd.functional.jacobian(function, leaves[0], create_graph=True)
    if not jacobian.requires_grad:
        return True
    second = torch.autograd.grad(_weighed(jacobian), leaves, allow_unused=True)
    return all(one is None or bool(torch.isfinite(one).all()) for one in second)


def differences(line: Line, found: list[Tensor | None]) -> None:
    """Central differences of two steps; how far they differ is how far they may be off."""
    slope, size = line.along(found)
    slopes, kinks = [], []
    here = line.at(0.0)[0]
    assert not isinstance(here, Refusal)
    here = here.detach()
    for step in (STEP, 2 * STEP):
        # With autograd: what it follows is not composed.
        up, down = line.at(step)[0], line.at(-step)[0]
        if isinstance(up, Refusal) or isinstance(down, Refusal):
            return
        up, down = up.detach(), down.detach()
        slopes.append(float(up - down) / (2 * step))
        kinks.append(abs(float(up - 2 * here + down)) / step)
        level = float(up.abs() + down.abs())
    # One-sided slopes of a smooth function differ half as much over half the step; those at a kink,
    # as where a constant is zero before a ReLU, as much.
    kink = kinks[0] if kinks[0] > KINK * kinks[1] else 0.0
    allowed = kink + 4 * abs(slopes[1] - slopes[0]) + TOLERANCE * size + 1e-8 * level / STEP
    if not abs(slope - slopes[0]) <= allowed:
        allowed += line.rounding()
    if not abs(slope - slopes[0]) <= allowed:
        raise Wrong(
            f"the derivative along a line is {slope!r}, differences give {slopes[0]!r}, off by "
            f"{abs(slope - slopes[0]):.2e} where {allowed:.2e} is allowed"
        )
