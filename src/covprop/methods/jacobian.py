"""Jacobians of a network at one point, a bundle of columns or of rows at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import vjp, vmap

from covprop.errors import ApproximationWarning, UnsupportedOperation, warn_user
from covprop.gaussian import Gaussian
from covprop.kernels.forward import jvp, quiet
from covprop.methods.network import Network

Jacobians = list[list[Tensor]]
"""For every output, its Jacobian (*batch, m, n) with respect to every input."""
NEAR = 0.01
"""Standard deviations from the mean at which slopes are compared with derivatives."""
STRAIGHT = 0.02
"""Relative difference of slopes on both sides, and at half the distance, of a straight line."""
OFF = 0.2
"""Relative difference of a slope and of a derivative that is another one's."""
RESOLVED = 1e4
"""In units of machine epsilon: movement of a value that rounding does not explain."""
JITTER = 64.0
"""The same of a value that is constant but for rounding, beside itself and the inputs."""


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
            "in it, such as .detach() or torch.no_grad(), cuts them off; use cp.Exact(), "
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
    step = _deviations(network)
    slopes = _along(jacobians, step)
    moved = [
        network.at([m[None] + k * NEAR * d for m, d in zip(network.means, step, strict=True)])
        for k in (1.0, -1.0, 0.5, -0.5)
    ]
    for value, slope, *points in zip(values, slopes, *moved, strict=True):
        up, down, half, back = (point[0].double() - value.double() for point in points)
        line = (up - down) / 2
        resolved = RESOLVED * torch.finfo(value.dtype).eps * value.abs().double()
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
    step = _deviations(network)
    moved = [
        network.at([m[None] + k * d for m, d in zip(network.means, step, strict=True)])
        for k in (1.0, -1.0)
    ]
    sizes = [(x.mean.abs() + x.stddev).amax() for x in network.inputs if x.mean.numel()]
    scale = max(map(float, sizes), default=0.0)
    for value, rows, *points in zip(values, jacobians, *moved, strict=True):
        zero = torch.stack([(one == 0).all(-1) for one in rows]).all(0)
        jitter = JITTER * torch.finfo(value.dtype).eps * (value.abs() + scale)
        changed = torch.stack([(point[0] - value).abs() > jitter for point in points]).any(0)
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
                "they have other values; use cp.Exact() or cp.MonteCarlo()",
                ApproximationWarning,
            )


def _deviations(network: Network) -> list[Tensor]:
    """A standard deviation of every element of every input, of either sign."""
    coins = torch.Generator().manual_seed(0)
    return [
        x.stddev.detach() * (2 * torch.randint(2, x.mean.shape, generator=coins) - 1).to(x.mean)
        for x in network.inputs
    ]


def _along(jacobians: Jacobians, step: Sequence[Tensor]) -> list[Tensor]:
    """J d (*batch, m) of every output."""
    return [
        torch.stack(
            [(one @ d.to(one).reshape(*one.shape[:-2], one.shape[-1], 1))[..., 0]
             for one, d in zip(rows, step, strict=True)]
        ).sum(0)
        for rows in jacobians
    ]  # fmt: skip


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
