"""Back from an output to all noise that has entered on the way to it.

Cov(out) = J_0 Sigma_x J_0^T + sum_l J_l R_l J_l^T, J_l the expected Jacobian from where R_l enters.
Its rows are made by the transposes of the edges of the lineage, deepest first, and used up at once.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from covprop.covariance import Sketch
from covprop.covariance.innovation import Innovation, joint_quadratic
from covprop.dispatch import leaves, map_leaves
from covprop.errors import ApproximationWarning, TooLarge, UnsupportedOperation, warn_user
from covprop.gaussian import Gaussian
from covprop.lineage import Node, Transfer
from covprop.methods import Root, Sketched
from covprop.report.table import in_bytes
from covprop.room import free_bytes
from covprop.sampling import SamplingError
from covprop.tensor import GaussianTensor
from covprop.transfers import Along, Scaled, Taken, Times

CARRIED = 2**24
"""Numbers in columns of the root of an input that are carried to the outputs at a time."""
COPIES = 4
"""Rows of the largest layer that the way back holds at a time, for each output."""


def budget(method: Sketched, device: torch.device) -> int:
    """Bytes that a sketch may use."""
    return free_bytes(device) // 2 if method.memory is None else method.memory


def retraced(tensor: GaussianTensor, method: Sketched) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a result, or of some of its elements, which are flat then."""
    chosen, room = _wanted(tensor, method)
    mean = tensor.loc
    if method.outputs is not None:
        mean = mean.reshape(*tensor.batch_shape, _size(tensor.node))[..., chosen]
    return mean, _blocks(tensor, chosen, room)


def _wanted(tensor: GaussianTensor, method: Sketched) -> tuple[Tensor, int]:
    """The elements that are asked for, and how many of them may go back at a time."""
    size, outputs = _size(tensor.node), method.outputs
    chosen = torch.arange(size, device=tensor.device)
    if outputs is not None:
        try:
            chosen = chosen[outputs].reshape(-1)
        except (IndexError, TypeError) as error:
            raise ValueError(
                f"outputs={outputs!r} is no index of the {size:,} elements of the flat output"
            ) from error
    if not len(chosen) and size:
        raise ValueError(f"outputs={outputs!r} names no element of the output")
    widest = max(_size(node) for node in _ancestors(tensor.node))
    each = COPIES * widest * tensor.batch_shape.numel() * tensor.loc.itemsize
    return chosen, max(1, budget(method, tensor.device) // 2 // max(1, each))


def _blocks(tensor: GaussianTensor, chosen: Tensor, room: int) -> Tensor:
    """All outputs together, or, where there is no room, each two groups of them."""
    count = len(chosen)
    if count <= room:
        return gathered(tensor.node, _units(tensor, chosen))
    groups = chosen.split(max(1, room // 2))
    places = torch.arange(count, device=chosen.device).split(max(1, room // 2))
    result = tensor.loc.new_zeros(*tensor.batch_shape, count, count)
    for i, j in itertools.combinations_with_replacement(range(len(groups)), 2):
        if i == j and len(groups) > 1:
            continue  # what it has is in every pair with it
        both = torch.cat([places[i], places[j]])
        block = gathered(tensor.node, _units(tensor, torch.cat([groups[i], groups[j]])))
        result[..., both[:, None], both] = block
    return result


def _units(tensor: GaussianTensor, chosen: Tensor) -> Tensor:
    sketch = tensor.covariance
    rows = tensor.loc.new_zeros(len(chosen), sketch.size)
    rows[torch.arange(len(chosen), device=rows.device), chosen] = 1
    return rows.expand(*sketch.batch_shape, *rows.shape)


def gathered(node: Node, rows: Tensor) -> Tensor:
    """The covariance (*batch, p, p) of rows (*batch, p, n) of a random vector.

    An estimate: what it has too little on the diagonal by chance must not make a variance negative,
    and is left away if it does.
    """
    total = _gathered(node, rows)
    negative = (total.diagonal(dim1=-2, dim2=-1) < 0).any(-1)[..., None, None]
    if bool(negative.any()):
        total = torch.where(negative, _gathered(node, rows, definite=True), total)
    return total


def _gathered(node: Node, rows: Tensor, definite: bool = False) -> Tensor:
    """What nonlinearities of one depth add is seen together, as they share their second order."""
    total = rows.new_zeros(*rows.shape[:-1], rows.shape[-2])
    for _, group in itertools.groupby(_passed(node, rows), lambda pair: _rank(pair[0])[:2]):
        together: list[tuple[Innovation, Tensor]] = []
        for passed, seen in group:
            entry = _sketch(passed).entry
            if isinstance(entry, Innovation) and entry.shares:
                together.append((entry, seen))
            elif isinstance(entry, Innovation):
                total = total + joint_quadratic([(entry, seen)], definite).to(total.dtype)
            elif entry is not None:
                total = total + entry.quadratic(seen).to(total.dtype)
        if together:
            _check_kinds([innovation for innovation, _ in together])
            total = total + joint_quadratic(together, definite).to(total.dtype)
    return total


def _check_kinds(innovations: Sequence[Innovation]) -> None:
    """Warn where the second order of a matrix product meets that of something else."""
    if len({bool(innovation.pairs) for innovation in innovations}) > 1:
        warn_user(
            "a matrix product of two uncertain tensors and another nonlinearity, of the same "
            "inputs, meet on the way to an output: cp.Sketched takes what they have beyond their "
            "first order as independent; use cp.Exact(), or compare with sampling",
            ApproximationWarning,
        )


def _sketch(node: Node) -> Sketch:
    assert isinstance(node.covariance, Sketch)
    return node.covariance


def _rank(node: Node) -> tuple[int, bool, int]:
    """Higher than of all that a node came of; nonlinearities of one depth follow each other."""
    sketch = _sketch(node)
    shares = isinstance(sketch.entry, Innovation) and sketch.entry.shares
    return sketch.depth, not shares, node.serial


def expected_jacobians(
    tensor: GaussianTensor, inputs: Sequence[GaussianTensor], method: Sketched
) -> list[Tensor]:
    """E[J] (*batch, m, n) of a result with respect to tensors that it may have come of."""
    chosen, room = _wanted(tensor, method)
    parts = [_jacobians(tensor, some, inputs) for some in chosen.split(room)]
    return [torch.cat(rows, dim=-2) for rows in zip(*parts, strict=True)]


def carried(y: GaussianTensor, x: GaussianTensor, root: Root) -> Tensor:
    """E[J] L (*batch, m, width) of a result and an input with the root L, forward."""
    parts = []
    for start in range(0, root.width, step := max(1, CARRIED // max(1, x.numel()))):
        columns = root.structure.columns(start, min(root.width, start + step))
        part = y.lineage.carried(y.node, x.node, columns)
        if part is None:  # they are independent
            break
        parts.append(part)
    if not parts:
        return x.loc.new_zeros(*x.batch_shape, y.event_shape.numel(), root.width)
    return torch.cat(parts, dim=-1)


def _jacobians(
    tensor: GaussianTensor, chosen: Tensor, inputs: Sequence[GaussianTensor]
) -> list[Tensor]:
    rows = _units(tensor, chosen)
    found = {x.node: rows.new_zeros(*rows.shape[:-1], _size(x.node)) for x in inputs}
    for passed, seen in _passed(tensor.node, rows):
        if passed in found:
            found[passed] = seen
    return [found[x.node] for x in inputs]


def _passed(node: Node, rows: Tensor) -> Iterator[tuple[Node, Tensor]]:
    """All that a random vector came of, deepest first, with the expected Jacobian of the rows."""
    waiting = {node: rows}
    while waiting:
        newest = max(waiting, key=_rank)
        seen = waiting.pop(newest)
        if newest.opaque:
            raise UnsupportedOperation(
                "a rule made a tensor with .replace(mean, covariance), which does not say how it "
                "depends on its argument; use .through(mean, linear), or pass a transfer"
            )
        yield newest, seen
        for parent, transfer in newest.edges:
            share = transposed(transfer, seen, _size(parent)).to(parent.dtype)
            waiting[parent] = waiting[parent] + share if parent in waiting else share


def transposed(transfer: Transfer, rows: Tensor, size: int) -> Tensor:
    """A^T of rows (*batch, p, m), for a linear map A of columns (*batch, size, p)."""
    if isinstance(transfer, Along | Scaled | Taken | Times):
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
                f"the way back through an operation failed ({str(error).splitlines()[0]}); "
                "cp.Sketched differentiates every operation, so the model must not switch autograd "
                "to inference mode"
            ) from error
    return result.detach().mT.contiguous()


def fitted(method: Sketched, peak: int, room: int) -> Sketched:
    """One of the runs, with as many tangents remembered as there is room for; peak: for all."""
    one = method.replicate()
    if peak <= room:
        return one
    kept = one.tangents * room // peak // 2 * 2 if method.order > 1 else 0  # which remembers none
    if kept == 0:
        first = "order=1, " if method.order > 1 else ""
        raise TooLarge(
            f"{one.tangents} tangents would need {in_bytes(peak)}, and {in_bytes(2 * room)} may be "
            f"used; take fewer tangents or more replicates, {first}or propagate parts of the batch"
        )
    return method.replicate(kept)


def averaged(results: Sequence[Any], method: Sketched) -> Any:
    """Independent results as one, and from their spread its standard errors."""
    each = [iter(list(leaves(result))) for result in results]

    def one(leaf: Any) -> Any:
        found = [next(values) for values in each]
        return _average(found, method) if isinstance(leaf, Gaussian) else leaf

    return map_leaves(results[0], one)


def _average(found: Sequence[Gaussian], method: Sketched) -> Gaussian:
    means = torch.stack([y.mean for y in found])
    matrices = torch.stack([y.covariance_matrix for y in found])
    error, root = None, len(found) ** 0.5
    if len(found) > 1:
        error = SamplingError(method.tangents, means.std(0) / root, matrices.std(0) / root)
    return Gaussian(
        means.mean(0), matrices.mean(0), validate_args=False, method=method, sampling=error
    )


def _ancestors(node: Node) -> Iterator[Node]:
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        yield node
        new = {parent for parent, _ in node.edges} - seen
        seen |= new
        waiting += new


def _size(node: Node) -> int:
    assert node.covariance is not None
    return node.covariance.size
