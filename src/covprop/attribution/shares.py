"""The shares of sets of inputs in the variance of an output, and their Shapley values.

That of a set S is v(S) = Var(E[y | x_S]) / Var(y), and Var(E[y | x_S]) = Cov(f(x), f(x')), where
x' has the x_S of x, and all else is drawn anew, given x_S (Sobol 1993). With s = E[x | x_S] and two
independent residuals r, r', x = s + r and x' = s + r'; one propagation of y + y' and y - y' has

    v(S) = (Var(y + y') - Var(y - y')) / (Var(y + y') + Var(y - y')).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from itertools import combinations
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from covprop.errors import UnsupportedOperation
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.kernels.normal import inverse_deviation
from covprop.methods import Method
from covprop.methods.call import Call
from covprop.methods.network import Network
from covprop.propagate import propagate_without_warnings

Part: TypeAlias = frozenset[int]
"""A set of groups, by their numbers."""
Weights: TypeAlias = dict[Part, float]
"""Of the shares of sets, in a sum."""
Estimate: TypeAlias = tuple[Tensor, Tensor]
"""A number and its estimated error, (*batch, *event)."""


@final
class Shares:
    """v(S) of sets of groups, as they are asked for."""

    def __init__(self, call: Call, method: Method, groups: Sequence[Sequence[Tensor]]) -> None:
        """groups: of each group the elements of the flattened event of each input."""
        self.inputs, self.method, self.groups = call.inputs, method, groups
        self.draws = Network(call.on_tensors, call.inputs).draws
        """Whether the model has noise of its own, which is another one in each evaluation."""
        self.twins = _Twins(call, copied=self.draws)
        self.varying = [group for group in range(len(groups)) if self._varies(group)]
        self._found: dict[Part, Estimate] = {}

    def _varies(self, group: int) -> bool:
        parts = zip(self.inputs, self.groups[group], strict=True)
        return any(bool((x.covariance.diagonal()[..., index] > 0).any()) for x, index in parts)

    def __getitem__(self, part: Part) -> Estimate | float:
        """That of a set; a number where it is known without looking."""
        if not part:
            return 0.0
        if len(part) == len(self.varying) and not self.draws:
            return 1.0
        if part not in self._found:
            self._found[part] = self._looked_for(part)
        return self._found[part]

    def lost(self) -> Tensor:
        """The part of the variance in which two evaluations at one input differ: 0, or an error.

        By a method that does not follow all of what two evaluations of a layer have in common.
        """
        if self.draws or not self.varying:
            return torch.zeros(())
        return (1 - self._looked_for(frozenset(self.varying))[0]).abs()

    def _looked_for(self, part: Part) -> Estimate:
        chosen = [self.groups[group] for group in sorted(part)]
        each = [torch.cat(indices) for indices in zip(*chosen, strict=True)]
        triples = [split(x, index) for x, index in zip(self.inputs, each, strict=True)]
        both = propagate_without_warnings(self.twins, (triples,), {}, self.method)
        (above, above_error), (below, below_error) = map(_variance, both)
        total = above + below
        share = torch.where(total > 0, (above - below) / torch.where(total > 0, total, 1), math.nan)
        # d v = 2 (b d a - a d b) / (a + b)^2, where d a is 2 a times the error of the deviation.
        error = (1 - share.square()) * (above_error + below_error)
        return share, torch.where(share.abs() == 1, 0.0, error)

    def combined(self, weights: Weights) -> Estimate:
        """The weighted sum of the shares of sets, and the error that it may have at most."""
        value = error = torch.zeros(())
        for part, weight in weights.items():
            found = self[part]
            if isinstance(found, float):
                value = value + weight * found
            else:
                value, error = value + weight * found[0], error + abs(weight) * found[1]
        return value, error


@final
class _Twins(nn.Module):
    """y + y' and y - y' of a model at s + r and s + r', given (s, r, r') for each input."""

    def __init__(self, call: Call, copied: bool) -> None:
        """copied: whether y' is of a copy of the model: two draws of the weights of a layer."""
        super().__init__()
        self.model, self._call, self._other = call.module, call, call
        if copied and isinstance(call.module, nn.Module):
            self._other = Call(deepcopy(call.module), call.arguments, call.named_arguments)

    def forward(self, triples: Any) -> Any:
        first = _one(self._call.on_tensors(*(shared + rest for shared, rest, _ in triples)))
        second = _one(self._other.on_tensors(*(shared + rest for shared, _, rest in triples)))
        return first + second, first - second


def _one(y: Any) -> Any:
    if not isinstance(y, GaussianTensor | Tensor):
        raise UnsupportedOperation(
            f"an uncertainty budget is of a model that returns one tensor, and this one returns a "
            f"{type(y).__name__}; wrap it in a function that picks one"
        )
    return y


def _variance(y: Gaussian | Tensor) -> Estimate:
    """A variance and the relative error of its root, in float64; a constant has none."""
    if not isinstance(y, Gaussian):
        return torch.zeros_like(y).double(), torch.zeros_like(y).double()
    variance = y.variance.double()
    unknown = torch.full_like(variance, math.nan)
    return variance, unknown if y.error is None else y.error.stddev.double()


def split(x: Gaussian, index: Tensor) -> tuple[Gaussian, Gaussian, Gaussian]:
    """E[x | x_S] and two independent residuals of mean zero; index: of the elements in S."""
    size = x.event_shape.numel()
    seen = torch.zeros(size, dtype=torch.bool, device=x.device)
    seen[index] = True
    if x.covariance.independent:  # this keeps a skewness, too
        kept, centred = seen.reshape(x.event_shape).to(x.dtype), x - x.mean
        return centred * kept + x.mean, centred * (1 - kept), centred * (1 - kept)
    hidden = (~seen).nonzero()[:, 0]
    # Of standardised elements: units do not count for what is singular.
    scale = x.stddev.double().reshape(*x.batch_shape, size)
    unit = x.to(torch.float64).covariance.scale(inverse_deviation(scale.square()))
    gain, left = unit.conditioned(index, hidden, None)
    rows = scale.new_zeros(*x.batch_shape, size, len(index))
    rows[..., index, :] = torch.eye(len(index), dtype=rows.dtype, device=x.device)
    rows[..., hidden, :] = gain
    shared, rest = unit.take(index).quadratic(rows), torch.zeros_like(unit.matrix())
    rest[..., hidden[:, None], hidden] = left if isinstance(left, Tensor) else left.matrix()
    products, zero = scale[..., :, None] * scale[..., None, :], torch.zeros_like(x.mean)
    moments = ((x.mean, shared), (zero, rest), (zero, rest))
    first, second, third = (
        Gaussian(mean, (matrix * products).to(x.dtype), validate_args=False)
        for mean, matrix in moments
    )
    return first, second, third


def of_all_sets(groups: Sequence[int]) -> dict[int, Weights]:
    """The weights of all sets in the Shapley value of each group."""
    count = len(groups)
    values: dict[int, Weights] = {}
    for i in groups:
        others, weights = [j for j in groups if j != i], defaultdict[Part, float](float)
        for size in range(count):
            weight = 1 / (count * math.comb(count - 1, size))
            for chosen in combinations(others, size):
                weights[frozenset({*chosen, i})] += weight
                weights[frozenset(chosen)] -= weight
        values[i] = weights
    return values


def of_an_order(groups: Sequence[int], generator: torch.Generator) -> dict[int, Weights]:
    """The same in a random order and its reverse.

    With both, main effects and interactions of two are exact where inputs are independent.
    """
    order = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    values: dict[int, Weights] = {i: defaultdict(float) for i in groups}
    for one in (order, order[::-1]):
        for place, i in enumerate(one):
            values[i][frozenset(one[: place + 1])] += 1 / 2
            values[i][frozenset(one[:place])] -= 1 / 2
    return values
