"""Gaussian logits: one for each class, and what is asked of them."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from covprop.gaussian import Gaussian


@final
@dataclass(frozen=True)
class Logits:
    """Moments of the logits in float64, flat: mean (rows, classes), covariance with one more.

    Rows are the batch; of a mixture, as `cp.Split` makes it, its components with their batch.
    """

    mean: Tensor
    covariance: Tensor
    batch_shape: torch.Size
    dtype: torch.dtype
    weights: Tensor | None = None
    """Of the components of a mixture, (components,)."""

    @classmethod
    def of(cls, output: Gaussian) -> "Logits":
        """From a network's output; a single logit is the log-odds of class 1 against class 0."""
        if not isinstance(output, Gaussian):
            raise TypeError(
                f"logits are a cp.Gaussian, as cp.propagate gives, not {type(output).__name__}"
            )
        event = output.event_shape
        if not event or event.numel() != event[-1] or event[-1] < 1:
            raise ValueError(
                f"logits have an event of shape (classes,), and this Gaussian one of "
                f"{tuple(event)}; give it its batch dimensions, or pick the logits"
            )
        if output.mixture is None:
            return cls(*_flat(output, event[-1]), output.batch_shape, output.dtype)
        parts, weights = output.mixture.components, output.mixture.weights.double()
        return cls(*_flat(parts, event[-1]), output.batch_shape, output.dtype, weights)

    @property
    def classes(self) -> int:
        """How many."""
        return self.mean.shape[-1]

    @property
    def rounding(self) -> float:
        """Machine epsilon of the numbers that came in."""
        return torch.finfo(self.dtype).eps

    def labels(self, label: int | Tensor) -> Tensor:
        """Class numbers (batch,), one for each of it or one for all."""
        return class_numbers(label, self.batch_shape, self.classes, self.mean.device).reshape(-1)

    def averaged(self, values: Tensor) -> Tensor:
        """Averages over the components of a mixture: (*any, rows, k) -> (*any, batch, k)."""
        if self.weights is None:
            return values
        apart = values.unflatten(-2, (len(self.weights), -1))
        return torch.einsum("c,...cbk->...bk", self.weights, apart)

    def restored(self, values: Tensor) -> Tensor:
        """From (batch, ...) to (*batch, ...), in the dtype of the logits."""
        return values.reshape((*self.batch_shape, *values.shape[1:])).to(self.dtype)


def _flat(output: Gaussian, size: int) -> tuple[Tensor, Tensor]:
    """Moments (rows, classes) and (rows, classes, classes); a single logit stands against 0."""
    rows = output.batch_shape.numel()
    mean = output.mean.double().reshape(rows, size)
    covariance = output.covariance_matrix.double().reshape(rows, size, size)
    if size > 1:
        return mean, covariance
    return functional.pad(mean, (1, 0)), functional.pad(covariance, (1, 0, 1, 0))


def class_numbers(
    label: int | Tensor, batch_shape: torch.Size, classes: int, device: torch.device
) -> Tensor:
    """Labels (*batch,) that are class numbers of so many classes."""
    try:
        numbers = torch.as_tensor(label, device=device)
    except (TypeError, ValueError, RuntimeError) as error:  # of None, of words, of ragged lists
        raise TypeError(
            f"a label is a class number, or a tensor of one for each of the batch, not {label!r}"
        ) from error
    if numbers.dtype.is_floating_point or numbers.dtype == torch.bool or numbers.is_complex():
        raise ValueError(f"labels are class numbers (integers), not {numbers.dtype}")
    if numbers.dim() and numbers.shape != batch_shape:
        raise ValueError(
            f"the labels have shape {tuple(numbers.shape)} and the batch {tuple(batch_shape)}; "
            "give one class number, or one for each element of the batch"
        )
    if numbers.numel() and not bool(((numbers >= 0) & (numbers < classes)).all()):
        raise ValueError(f"a label is none of the {classes} classes, 0 to {classes - 1}")
    return numbers.long().expand(batch_shape)


def others(chosen: Tensor, count: int) -> Tensor:
    """Every number below count but the chosen ones (rows, k), ascending: (rows, count - k)."""
    left = torch.ones(len(chosen), count, dtype=torch.bool, device=chosen.device)
    left.scatter_(1, chosen, value=False)
    return left.nonzero()[:, 1].reshape(len(chosen), count - chosen.shape[1])


def differences(
    mean: Tensor, covariance: Tensor, base: Tensor, rivals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of y_base - y_rival for every rival, and the size of what cancels in the variances.

    mean (rows, classes), base (rows,), rivals (rows, k): (rows, k), (rows, k, k), (rows, k).
    """
    rows = torch.arange(len(base), device=base.device)
    across = covariance[rows, base].gather(1, rivals)  # Cov(y_base, y_rival)
    own = covariance[rows, base, base]
    between = covariance[rows[:, None, None], rivals[:, :, None], rivals[:, None, :]]
    matrix = own[:, None, None] - across[:, :, None] - across[:, None, :] + between
    size = own[:, None].abs() + 2 * across.abs() + between.diagonal(dim1=-2, dim2=-1).abs()
    return mean[rows, base][:, None] - mean.gather(1, rivals), matrix, size.detach()


def marginal_differences(
    mean: Tensor, covariance: Tensor, row: Tensor, pair: Tensor, rivals: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of y_i - y_k for pairs (i, j) and rivals k: mean, variance, covariance with y_i - y_j, size.

    mean (rows, classes); row (pairs,), pair (pairs, 2), rivals (pairs, k): each (pairs, k).
    """
    first, second = pair.T
    own = covariance[row, first, first][:, None]
    to_first = covariance[row, first].gather(1, rivals)
    to_second = covariance[row, second].gather(1, rivals)
    theirs = covariance.diagonal(dim1=-2, dim2=-1)[row].gather(1, rivals)
    shift = mean[row, first][:, None] - mean[row].gather(1, rivals)
    across = own - covariance[row, first, second][:, None] - to_first + to_second
    size = own.abs() + 2 * to_first.abs() + theirs.abs()
    return shift, own - 2 * to_first + theirs, across, size


def margins(logits: Gaussian, label: int | Tensor) -> Gaussian:
    """The Gaussian of the label's logit less every other one.

    d = A y, Cov[d] = A S A^T with a row e_label - e_j of A for every other class j, in the order of
    the classes: event (classes - 1,). Positive everywhere means that the label wins.
    """
    given = Logits.of(logits)
    size = logits.event_shape[-1]
    labels = given.labels(label)
    rivals = others(labels[:, None], given.classes)
    mean, matrix, _ = differences(*_flat(logits, size), labels, rivals)
    return Gaussian(
        given.restored(mean), given.restored(matrix), validate_args=False, method=logits.method
    )
