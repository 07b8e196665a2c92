"""The backward pass: from an output to all noise that has entered on the way to it.

Cov(out) = J_0 Sigma_x J_0^T + sum_l J_l R_l J_l^T, J_l the expected Jacobian from where R_l enters.
Its rows are made by the transposes of the edges of the lineage, deepest first, and used up at once.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from covprop.carriers import Tangents
from covprop.carriers.cross_covariance import ancestors
from covprop.carriers.innovation import Innovation, joint_quadratic
from covprop.carriers.sketch import Sketch
from covprop.errors import ApproximationWarning, UnsupportedOperation, warn_user
from covprop.flow.carrier import (
    Carrier,
    DiagonalTransfer,
    IndexTransfer,
    LinearTransfer,
    ScalarTransfer,
)
from covprop.flow.lineage import Transfer
from covprop.flow.tensor import GaussianTensor
from covprop.methods.call import check_memory

COPIES = 4
"""Rows of the largest layer that the backward pass holds at a time, for each output."""


def output_moments(y: GaussianTensor, outputs: Any, budget: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a result, or of some of its elements, which are flat then.

    outputs: an index of its elements, or None for all; budget: bytes that may be used.
    """
    chosen, count = _chosen(y, outputs, budget)
    mean = y.loc
    if outputs is not None:
        mean = mean.reshape(*y.batch_shape, y.carrier.size)[..., chosen]
    return mean, _blocks(y, chosen, count)


def expected_jacobians(
    y: GaussianTensor, inputs: Sequence[GaussianTensor], outputs: Any, budget: int
) -> list[Tensor]:
    """E[J] (*batch, m, n) of a result with respect to tensors that it may have come of."""
    chosen, count = _chosen(y, outputs, budget)
    parts = [_jacobians(y, some, inputs) for some in chosen.split(count)]
    return [torch.cat(rows, dim=-2) for rows in zip(*parts, strict=True)]


def _chosen(y: GaussianTensor, outputs: Any, budget: int) -> tuple[Tensor, int]:
    """The elements that are asked for, and how many of them may go back at a time."""
    size = y.carrier.size
    chosen = torch.arange(size, device=y.device)
    if outputs is not None:
        try:
            chosen = chosen[outputs].reshape(-1)
        except (IndexError, TypeError) as error:
            raise ValueError(
                f"outputs={outputs!r} is no index of the {size:,} elements of the flat output"
            ) from error
    if not len(chosen) and size:
        raise ValueError(f"outputs={outputs!r} names no element of the output")
    widest = max(node.size for node in ancestors(y.carrier))
    each = COPIES * widest * y.batch_shape.numel() * y.loc.itemsize
    return chosen, max(1, budget // 2 // max(1, each))


def _blocks(tensor: GaussianTensor, chosen: Tensor, most: int) -> Tensor:
    """All outputs together, or, where that would be too many, each two groups of them."""
    count = len(chosen)
    if count <= most:
        return covariance_of_rows(tensor.carrier, _units(tensor, chosen))
    groups = chosen.split(max(1, most // 2))
    places = torch.arange(count, device=chosen.device).split(max(1, most // 2))
    check_memory(count, tensor.batch_shape.numel() * count**2 * tensor.loc.itemsize, tensor.device)
    result = tensor.loc.new_zeros(*tensor.batch_shape, count, count)
    for i, j in itertools.combinations_with_replacement(range(len(groups)), 2):
        if i == j and len(groups) > 1:
            continue  # what it has is in every pair with it
        both = torch.cat([places[i], places[j]])
        block = covariance_of_rows(
            tensor.carrier, _units(tensor, torch.cat([groups[i], groups[j]]))
        )
        result[..., both[:, None], both] = block
    return result


def _units(tensor: GaussianTensor, chosen: Tensor) -> Tensor:
    sketch = _sketch(tensor.carrier)
    rows = tensor.loc.new_zeros(len(chosen), sketch.size)
    rows[torch.arange(len(chosen), device=rows.device), chosen] = 1
    return rows.expand(*sketch.batch_shape, *rows.shape)


def covariance_of_rows(node: Carrier, rows: Tensor) -> Tensor:
    """The covariance (*batch, p, p) of rows (*batch, p, n) of a random vector.

    An estimate: what it has too little on the diagonal by chance must not make a variance negative,
    and is left away if it does.
    """
    total = _sum_of_noise(node, rows)
    negative = (total.diagonal(dim1=-2, dim2=-1) < 0).any(-1)[..., None, None]
    if bool(negative.any()):
        total = torch.where(negative, _sum_of_noise(node, rows, definite=True), total)
    return total


def _sum_of_noise(node: Carrier, rows: Tensor, definite: bool = False) -> Tensor:
    """J R J^T of all noise; nonlinearities of one depth share their second order."""
    total = rows.new_zeros(*rows.shape[:-1], rows.shape[-2])
    for _, group in itertools.groupby(_backward(node, rows), lambda pair: _rank(pair[0])[:2]):
        sharing: list[tuple[Innovation, Tensor]] = []
        for ancestor, jacobian in group:
            entry = _sketch(ancestor).entry
            if isinstance(entry, Innovation) and entry.shares:
                sharing.append((entry, jacobian))
            elif isinstance(entry, Innovation):
                total = total + joint_quadratic([(entry, jacobian)], definite).to(total.dtype)
            elif entry is not None:
                total = total + entry.quadratic(jacobian).to(total.dtype)
        if sharing:
            _check_kinds([innovation for innovation, _ in sharing])
            total = total + joint_quadratic(sharing, definite).to(total.dtype)
    return total


def _check_kinds(innovations: Sequence[Innovation]) -> None:
    """Warn where the second order of a matrix product meets that of something else."""
    if len({bool(innovation.pairs) for innovation in innovations}) > 1:
        warn_user(
            "a matrix product of two uncertain tensors and another nonlinearity, of the same "
            "inputs, meet on the way to an output: cp.Sketched takes what they have beyond their "
            "first order as independent; use cp.GaussianLayers(), or compare with sampling",
            ApproximationWarning,
        )


def _sketch(node: Carrier) -> Sketch:
    return cast(Tangents, node).sketch


def _rank(node: Carrier) -> tuple[int, bool, int]:
    """Higher than of all that a node came of; nonlinearities of one depth follow each other."""
    sketch = _sketch(node)
    shares = isinstance(sketch.entry, Innovation) and sketch.entry.shares
    return sketch.depth, not shares, node.serial


def _jacobians(
    tensor: GaussianTensor, chosen: Tensor, inputs: Sequence[GaussianTensor]
) -> list[Tensor]:
    rows = _units(tensor, chosen)
    jacobians = {x.carrier: rows.new_zeros(*rows.shape[:-1], x.carrier.size) for x in inputs}
    for ancestor, jacobian in _backward(tensor.carrier, rows):
        if ancestor in jacobians:
            jacobians[ancestor] = jacobian
    return [jacobians[x.carrier] for x in inputs]


def _backward(node: Carrier, rows: Tensor) -> Iterator[tuple[Carrier, Tensor]]:
    """All that a random vector came of, deepest first, with the expected Jacobian of the rows."""
    pending = {node: rows}
    while pending:
        deepest = max(pending, key=_rank)
        jacobian = pending.pop(deepest)
        if deepest.opaque:
            raise UnsupportedOperation(
                "a rule made a tensor with .replace(mean, covariance), which does not say how it "
                "depends on its argument; use .through(mean, linear), or pass a transfer"
            )
        yield deepest, jacobian
        for parent, transfer in deepest.edges:
            share = transposed(transfer, jacobian, parent.size).to(parent.dtype)
            pending[parent] = pending[parent] + share if parent in pending else share


def transposed(transfer: Transfer, rows: Tensor, size: int) -> Tensor:
    """A^T of rows (*batch, p, m), for a linear map A of columns (*batch, size, p)."""
    if isinstance(transfer, LinearTransfer | DiagonalTransfer | IndexTransfer | ScalarTransfer):
        known = transfer.transposed(rows)
        if known is not None:
            return known
    with torch.inference_mode(False), torch.enable_grad():
        zeros = rows.new_zeros(*rows.shape[:-1], size).mT.requires_grad_()
        try:
            image = transfer(zeros)
            (result,) = torch.autograd.grad(image, zeros, rows.mT.to(image.dtype))
        except RuntimeError as error:
            raise UnsupportedOperation(
                f"the backward pass through an operation failed ({str(error).splitlines()[0]}); "
                "cp.Sketched differentiates every operation, so the model must not switch autograd "
                "to inference mode"
            ) from error
    return result.detach().mT.contiguous()
