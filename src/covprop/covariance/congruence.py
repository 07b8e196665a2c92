"""A S A^T of large matrices: the map on the rows, then on the columns, in blocks.

Between the two lies S A^T, held so that its columns are pieces of memory. Of the result the upper
triangle is computed and the lower one copied.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from covprop.covariance.base import Covariance, LinearMap, both_triangles, symmetric

ROWS = 2**18
"""Entries of the rows that are treated at a time."""
WIDE = 2**24
"""Entries of a covariance that is worth not to be written out."""
TOGETHER = 16
"""Images that are convolved at a time, of which blocks are multiples: the patches of more leave the
cache."""
COLUMNS = 2**22
"""Entries of the columns of a root that are treated at a time."""


def half_congruence(values: Tensor, linear: LinearMap) -> Tensor:
    """S A^T (*batch, n, m) of a symmetric S (*batch, n, n)."""
    size = values.shape[-1]
    if linear.layer is not None and _many_small(values):
        return linear.layer.rows(values)[1]
    if values.numel() <= ROWS:
        return linear(values)
    result: Tensor | None = None
    for start, stop in _steps(size, values.numel() // size):
        rows = linear(values[..., start:stop, :])
        if rows.requires_grad:
            return linear(values)
        if result is None:
            result = rows.new_empty(*rows.shape[:-2], rows.shape[-1], size)
        result[..., start:stop] = rows.mT.contiguous()
    assert result is not None
    return result.mT


def complete_congruence(half: Tensor, linear: LinearMap) -> Tensor:
    """A H of H = S A^T (*batch, n, m), which is symmetric."""
    size = half.shape[-1]
    if half.numel() <= ROWS or half.requires_grad:
        return symmetric(linear(half.mT))
    result = half.new_empty(*half.shape[:-2], size, size)
    if linear.layer is not None and _many_small(half):  # whole matrices, some at a time
        together = max(1, ROWS // half.shape[-2:].numel())
        parts, results = half.flatten(0, -3).split(together), result.flatten(0, -3).split(together)
        for part, written in zip(parts, results, strict=True):
            symmetric(linear(part.mT), written)
        return result
    for start, stop in _steps(size, max(half.numel(), result.numel()) // size):
        columns = half[..., start:stop]
        if not half.mT.is_contiguous():
            columns = columns.contiguous().mT.contiguous().mT
        first, rows = linear.rest(columns.mT, start)
        if rows.requires_grad:
            return symmetric(linear(half.mT))
        result[..., start:stop, start:stop] = symmetric(rows[..., start - first : stop - first])
        both_triangles(result, start, stop, rows[..., stop - first :])
    return result


def skips_matrix(size: int, features: int, batch_shape: torch.Size) -> bool:
    """Whether a linear map to so many features never writes the matrix of its argument."""
    return features < size and batch_shape.numel() * size**2 > WIDE


def congruence_by_root(covariance: Covariance, linear: LinearMap) -> Tensor | None:
    """(A L) (A L)^T by a few columns of a root L at a time, None where S may be written out."""
    variance = covariance.diagonal()
    if not skips_matrix(covariance.size, 0, covariance.batch_shape):
        return None
    features = linear(variance[..., None, :]).shape[-1]
    if not skips_matrix(covariance.size, features, covariance.batch_shape):
        return None
    root = covariance.root()
    total = variance.new_zeros(*variance.shape[:-1], features, features)
    step = max(1, COLUMNS // max(1, variance.numel()))
    for start in range(0, root.width, step):
        image = linear(root.columns(start, min(root.width, start + step)).mT)
        total = total + image.mT @ image
    return symmetric(total)


def _many_small(matrices: Tensor) -> bool:
    return matrices.dim() > 2 and matrices.shape[-2:].numel() <= ROWS  # noqa: PLR2004


def _steps(size: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of this many entries each."""
    step = max(1, ROWS // max(1, width))
    step -= step % TOGETHER if step > TOGETHER else 0
    for start in range(0, size, step):
        yield start, min(size, start + step)
