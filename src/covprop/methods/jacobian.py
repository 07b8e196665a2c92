"""Jacobians of a network at one point, a bundle of columns or of rows at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods.network import Network, quiet

Jacobians = list[list[Tensor]]
"""For every output, its Jacobian (*batch, m, n) with respect to every input."""


def linearize(network: Network) -> tuple[tuple[Tensor, ...], Jacobians]:
    """The outputs (*batch, m) at the means of the inputs, and their Jacobians there.

    Elements of a batch do not mix, so that one direction for all of them tells a column (or row) of
    the Jacobian of each. Columns by forward mode or rows by reverse mode, of which there are fewer;
    the other where torch has no formula for one.
    """
    rows = sum(output.event_shape.numel() for output in network.outputs)
    columns = sum(x.event_shape.numel() for x in network.inputs)
    ways = [_by_rows, _by_columns] if rows < columns else [_by_columns, _by_rows]
    first: Exception | None = None
    for way in ways:
        try:
            with quiet():
                return way(network)
        except (RuntimeError, NotImplementedError) as error:
            first = first or error
    raise UnsupportedOperation(
        f"torch cannot differentiate this model ({str(first).splitlines()[0]}); use "
        "cp.MonteCarlo() or cp.Unscented(), which need no derivatives"
    ) from first


def pushed(jacobians: Sequence[Tensor], inputs: Sequence[Gaussian]) -> Tensor:
    """The sum of J S J^T over independent inputs, (*batch, m, m)."""
    total: Tensor | None = None
    for jacobian, x in zip(jacobians, inputs, strict=True):
        part = x.covariance.quadratic(jacobian)
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

            tangents: tuple[Tensor, ...] = jvp(of_one, (mean,), (direction.reshape(mean.shape),))[1]
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
