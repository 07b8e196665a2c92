"""Methods that look at a network near the mean of its input: its tangent, or a few points."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.func import vjp, vmap

from covprop.covariance.base import is_finite, symmetric
from covprop.errors import ApproximationWarning, MomentOverflow, UnsupportedOperation, warn_user
from covprop.gaussian import Gaussian
from covprop.kernels.gradients import jvp, quiet
from covprop.kernels.rounding import CHANGED, UNCHANGED, rounding
from covprop.methods.base import FunctionMethod, Gains, Method
from covprop.methods.call import Advance, Call
from covprop.methods.network import Estimate, Network
from covprop.methods.root import Root

Jacobians = list[list[Tensor]]
"""For every output, its Jacobian (*batch, m, n) with respect to every input."""
NEAR = 0.01
"""Standard deviations from the mean at which slopes are compared with derivatives."""
STRAIGHT = 0.02
"""Relative difference of slopes on both sides, and at half the distance, of a straight line."""
OFF = 0.2
"""Relative difference of a slope and of a derivative that is another one's."""


@final
@dataclass(frozen=True)
class Linearized(FunctionMethod):
    """Linearisation at the mean, J S J^T, as in an extended Kalman filter.

    The mean of the output is the output at the mean. The result is right where the network is
    nearly linear over the spread of its input; bias and saturation are not seen. An output that
    varies although its derivatives are all zero is refused. Differentiable.

    Example:
        y = cp.propagate(model, x, cp.Linearized())
    """

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """A product, and its symmetric part."""
        return 2 * dtype.itemsize

    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """Jacobians by torch.func."""
        values, jacobians = linearize(network)
        check_varies(network, values, jacobians)
        advance(1, 1)
        return [
            Estimate(value, pushed(jacobian, network.inputs).to(value.dtype))
            for value, jacobian in zip(values, jacobians, strict=True)
        ]


@final
@dataclass(frozen=True)
class Unscented(FunctionMethod):
    """The unscented transform (Julier & Uhlmann; Wan & van der Merwe, scaled): 2 n + 1 points.

    The points are the mean, and the mean +- sqrt(alpha^2 (n + kappa)) times each column of a square
    root of the covariance; n is the number of elements of all inputs. The mean is exact for
    quadratic functions.

    By default the points are as far out as a sample is likely to be, and all weights are at least
    zero, so that the covariance is positive semi-definite: the cubature rule. A small alpha makes
    large weights of opposite signs, which lose accuracy in float32 and may make variances negative.

    Args:
        alpha: How far out the points are.
        beta: Added to the weight of the central point in the covariance (2 is Wan & van der
            Merwe's choice).
        kappa: A second number for the distance of the points (3 - n is Julier's choice).

    Example:
        y = cp.propagate(model, x, cp.Unscented())
    """

    alpha: float = 1.0
    beta: float = 0.0
    kappa: float = 0.0

    def __post_init__(self) -> None:
        """Refuse points that are nowhere."""
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha is a positive number, not {self.alpha}")
        if not (math.isfinite(self.beta) and math.isfinite(self.kappa)):
            raise ValueError(f"beta and kappa are numbers, not {self.beta} and {self.kappa}")

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """The sum, what it is scaled and shifted by, and the symmetric part."""
        return 5 * dtype.itemsize

    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """Weighted moments of the outputs about the output at the mean, some points at a time."""
        roots = [Root.of(x) for x in network.inputs]
        size = sum(root.width for root in roots)
        if size + self.kappa <= 0:
            raise UnsupportedOperation(
                f"n + kappa must be positive, and the input has n = {size}; kappa is {self.kappa}"
            )
        reach = self.alpha**2 * (size + self.kappa)  # squared, and n + lambda
        centre = network(*network.means)
        sums = [_Sums(value) for value in centre]
        advance(1, 2 * size + 1)
        for i, root in enumerate(roots):
            count = root.width
            for start in range(0, count, network.step):
                stop = min(count, start + network.step)
                offset = math.sqrt(reach) * root.columns(start, stop)
                for sign in (1, -1):
                    points = [mean.expand(stop - start, *mean.shape) for mean in network.means]
                    points[i] = points[i] + sign * offset
                    for total, values in zip(sums, network.at(points), strict=True):
                        total.add(values)
                advance(2 * (stop - start), 2 * size + 1)
        # The central point has d = 0. Its weight 1 - n / reach + 1 - alpha^2 + beta, and the -2 of
        # centring the others at s, leave this much of s s^T.
        return [Estimate(*total.moments(reach, self.beta - self.alpha**2)) for total in sums]


class _Sums:
    """Sums of d = y - y_0 and of d d^T."""

    def __init__(self, centre: Tensor) -> None:
        self.centre = centre
        self.first = torch.zeros_like(centre)
        self.second = centre.new_zeros(*centre.shape, centre.shape[-1])

    def add(self, values: Tensor) -> None:
        deviation = (values - self.centre).movedim(0, -2)  # (*batch, count, m)
        self.first = self.first + deviation.sum(-2)
        self.second = self.second + deviation.mT @ deviation

    def moments(self, reach: float, extra: float) -> tuple[Tensor, Tensor]:
        """Mean y_0 + s, s = sum d / (2 reach); covariance sum d d^T / (2 reach) + extra s s^T."""
        shift = self.first / (2 * reach)
        outer = shift[..., :, None] * shift[..., None, :]
        return self.centre + shift, symmetric(self.second / (2 * reach) + extra * outer)


def linearize(network: Network) -> tuple[tuple[Tensor, ...], Jacobians]:
    """The outputs (*batch, m) at the means of the inputs, and their Jacobians there.

    Elements of a batch do not mix, so that one direction for all of them tells a column (or row) of
    the Jacobian of each. Columns by forward mode or rows by reverse mode, of which there are fewer;
    the other where torch has no formula for one, or where the model cuts it off: reverse mode does
    not see through torch.no_grad(). Where the result is to be differentiated, rows come first:
    torch's derivative of the forward mode of norms is wrong (2.13).
    """
    rows = sum(output.event_shape.numel() for output in network.outputs)
    columns = sum(x.event_shape.numel() for x in network.inputs)
    followed = torch.is_grad_enabled() and any(
        value.requires_grad for value in network(*network.means)
    )
    by_rows = followed or rows < columns
    ways = [_by_rows, _by_columns] if by_rows else [_by_columns, _by_rows]
    first: Exception | None = None
    cut = False
    for way in ways:
        try:
            with quiet():
                found = way(network)
        except (RuntimeError, NotImplementedError) as error:
            first = first or error
            continue
        if network.draws or not is_cut(network, *found):  # draws are no function to compare
            return found
        cut = True
    if cut:
        raise UnsupportedOperation(
            "the derivatives that torch has of this model are not those of its values: something "
            "in it, such as .detach() or torch.no_grad(), cuts them off; use cp.GaussianLayers(), "
            "cp.MonteCarlo() or cp.Unscented(), which need none"
        )
    raise UnsupportedOperation(
        f"torch cannot differentiate this model ({str(first).splitlines()[0]}); use "
        "cp.MonteCarlo() or cp.Unscented(), which need no derivatives"
    ) from first


@torch.no_grad()
def is_cut(network: Network, values: Sequence[Tensor], jacobians: Jacobians) -> bool:
    """Whether outputs move along a line, near the mean, and by another slope than the Jacobian's.

    A straight line, by its points on both sides and half way: kinks at the mean are none, and there
    the derivative is a choice.
    """
    steps = _deviations(network)
    near = [_moved(network, k * NEAR, steps) for k in (1.0, -1.0, 0.5, -0.5)]
    for value, rows, *points in zip(values, jacobians, *near, strict=True):
        slope = _along(rows, steps)
        up, down, half, back = (point.double() - value.double() for point in points)
        line = (up - down) / 2
        resolved = rounding(CHANGED, value.dtype) * value.abs().double()
        straight = (up + down).abs() <= STRAIGHT * line.abs()
        straight &= ((half - back) - line).abs() <= STRAIGHT * line.abs()
        off = (NEAR * slope.double() - line).abs() > OFF * line.abs()
        if bool((straight & off & (line.abs() > resolved)).any()):
            return True
    return False


@torch.no_grad()
def check_varies(network: Network, values: Sequence[Tensor], jacobians: Jacobians) -> None:
    """Refuse an output whose derivatives are all zero and which has another value a deviation away.

    Warn of one that has such elements beside others.
    """
    steps = _deviations(network)
    moved = [_moved(network, k, steps) for k in (1.0, -1.0)]
    sizes = [(x.mean.abs() + x.stddev).amax() for x in network.inputs if x.mean.numel()]
    scale = max(map(float, sizes), default=0.0)
    for value, rows, *points in zip(values, jacobians, *moved, strict=True):
        zero = torch.stack([(one == 0).all(-1) for one in rows]).all(0)
        jitter = rounding(UNCHANGED, value.dtype) * (value.abs() + scale)
        changed = torch.stack([(point - value).abs() > jitter for point in points]).any(0)
        if bool((zero.all(-1) & changed.any(-1)).any()):
            raise UnsupportedOperation(
                "all derivatives of an output are zero at the mean, as of rounding, comparisons "
                "and integers, and a standard deviation away it has another value: "
                "cp.Linearized() would take it as constant; use cp.MonteCarlo() or cp.Unscented()"
            )
        if count := int((zero & changed).sum()):
            warn_user(
                f"cp.Linearized() takes {count} of {zero.numel()} output elements as constant, "
                "because their derivatives are zero at the mean, and a standard deviation away "
                "they have other values; use cp.GaussianLayers() or cp.MonteCarlo()",
                ApproximationWarning,
            )


def _deviations(network: Network) -> list[Tensor]:
    """A standard deviation of every element of every input, of either sign."""
    coins = torch.Generator().manual_seed(0)
    return [
        x.stddev.detach() * (2 * torch.randint(2, x.mean.shape, generator=coins) - 1).to(x.mean)
        for x in network.inputs
    ]


def _along(rows: Sequence[Tensor], steps: Sequence[Tensor]) -> Tensor:
    """J d (*batch, m), summed over inputs."""
    both = zip(rows, steps, strict=True)
    parts = [one @ d.to(one).reshape(*one.shape[:-2], one.shape[-1], 1) for one, d in both]
    return torch.stack(parts).sum(0)[..., 0]


def _moved(network: Network, factor: float, steps: Sequence[Tensor]) -> list[Tensor]:
    """Every output (*batch, m) with the means moved by a multiple of steps."""
    points = [m[None] + factor * d for m, d in zip(network.means, steps, strict=True)]
    return [value[0] for value in network.at(points)]


def pushed(jacobians: Sequence[Tensor], inputs: Sequence[Gaussian]) -> Tensor:
    """The sum of J S J^T over independent inputs, (*batch, m, m), in the wider dtype of both."""
    total: Tensor | None = None
    for jacobian, x in zip(jacobians, inputs, strict=True):
        dtype = torch.promote_types(jacobian.dtype, x.dtype)
        part = x.to(dtype).covariance.quadratic(jacobian.to(dtype))
        total = part if total is None else total + part
    assert total is not None
    return total


def _by_columns(network: Network) -> tuple[tuple[Tensor, ...], Jacobians]:
    result = network(*network.means)
    jacobians: Jacobians = [[] for _ in result]
    for i, mean in enumerate(network.means):

        def along(direction: Tensor, i: int = i, mean: Tensor = mean) -> tuple[Tensor, ...]:
            others = network.means

            def of_one(tensor: Tensor) -> tuple[Tensor, ...]:
                return network(*others[:i], tensor, *others[i + 1 :])

            tangents: tuple[Tensor, ...] = jvp(of_one, mean, direction.reshape(mean.shape))
            return tangents

        size = network.inputs[i].event_shape.numel()
        parts = _bundles(network, along, mean, size)
        for jacobian, columns in zip(jacobians, parts, strict=True):
            jacobian.append(columns.movedim(0, -1))  # (*batch, m, n)
    return result, jacobians


def _by_rows(network: Network) -> tuple[tuple[Tensor, ...], Jacobians]:
    made = vjp(network, *network.means)
    result, pull = made[0], made[1]
    jacobians: Jacobians = []
    batch = network.batch_shape
    for i, output in enumerate(result):

        def across(direction: Tensor, i: int = i) -> tuple[Tensor, ...]:
            cotangents = [torch.zeros_like(other) for other in result]
            cotangents[i] = direction
            flat: Sequence[Tensor] = pull(tuple(cotangents))
            return tuple(t.reshape(*batch, t.shape[len(batch) :].numel()) for t in flat)

        parts = _bundles(network, across, output, output.shape[-1])
        jacobians.append([rows.movedim(0, -2) for rows in parts])  # (*batch, m, n)
    return result, jacobians


def _bundles(
    network: Network,
    function: Callable[[Tensor], tuple[Tensor, ...]],
    like: Tensor,
    size: int,
) -> list[Tensor]:
    """A linear function of the unit vectors, the same for all elements of the batch."""
    batch = network.batch_shape
    pieces = []
    for start in range(0, size, network.step):
        stop = min(size, start + network.step)
        units = torch.zeros((stop - start, size), dtype=like.dtype, device=like.device)
        units.diagonal(offset=start).fill_(1)
        units = units.reshape(stop - start, *(1 for _ in batch), size)
        directions = units.expand(stop - start, *batch, size)
        pieces.append(vmap(function)(directions))
    return [torch.cat(part) for part in zip(*pieces, strict=True)]


def gains_of(call: Call, method: Method, selected: bool = False) -> Gains:
    """Expected Jacobians of a method times roots of the inputs, or those at the mean."""
    gains = method.gains(call, selected)
    if gains is None:
        network = Network(call.on_tensors, call.inputs)
        roots = [Root.of(x) for x in call.inputs]
        jacobians = linearize(network)[1] if network.outputs else []
        gains = {
            output.leaf: [root.after(one) for root, one in zip(roots, rows, strict=True)]
            for output, rows in zip(network.outputs, jacobians, strict=True)
        }
    for gain in itertools.chain(*gains.values()):
        if not is_finite(gain):
            raise MomentOverflow(
                f"the expected Jacobian of the output is not finite in {gain.dtype}; look for NaN "
                "or infinity in the model's weights and constants, or convert model and Gaussian "
                "to float64"
            )
    return gains
