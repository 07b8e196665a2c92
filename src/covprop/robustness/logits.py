"""Gaussian logits: one for each class, and what is asked of them."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.gaussian import Gaussian


@final
@dataclass(frozen=True)
class Logits:
    """Moments of the logits in float64, flat: mean (rows, classes), covariance with one more.

    batch_shape: what the rows are; rounding: machine epsilon of the numbers that came in.
    """

    mean: Tensor
    covariance: Tensor
    batch_shape: torch.Size
    dtype: torch.dtype

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
        size = event[-1]
        mean = output.mean.double().reshape(-1, size)
        covariance = output.covariance_matrix.double().reshape(-1, size, size)
        if size == 1:  # the same decision as that between the logits 0 and y
            mean = torch.nn.functional.pad(mean, (1, 0))
            covariance = torch.nn.functional.pad(covariance, (1, 0, 1, 0))
        return cls(mean, covariance, output.batch_shape, output.dtype)

    @property
    def classes(self) -> int:
        """How many."""
        return self.mean.shape[-1]

    @property
    def rounding(self) -> float:
        """Machine epsilon of the numbers that came in."""
        return torch.finfo(self.dtype).eps

    def labels(self, label: int | Tensor) -> Tensor:
        """Class numbers (rows,), one for each of the batch or one for all."""
        return class_numbers(label, self.batch_shape, self.classes, self.mean.device).reshape(-1)

    def restored(self, values: Tensor) -> Tensor:
        """From (rows, ...) to (*batch, ...), in the dtype of the logits."""
        return values.reshape((*self.batch_shape, *values.shape[1:])).to(self.dtype)


def class_numbers(
    label: int | Tensor, batch_shape: torch.Size, classes: int, device: torch.device
) -> Tensor:
    """Labels (*batch,) that are class numbers of so many classes."""
    numbers = torch.as_tensor(label, device=device)
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


def margins(logits: Gaussian, label: int | Tensor) -> Gaussian:
    """The Gaussian of the label's logit less every other one.

    d = A y, Cov[d] = A S A^T with a row e_label - e_j of A for every other class j, in the order of
    the classes: event (classes - 1,). Positive everywhere means that the label wins.
    """
    given = Logits.of(logits)
    labels = given.labels(label)
    rivals = others(labels[:, None], given.classes)
    mean, matrix, _ = differences(given.mean, given.covariance, labels, rivals)
    return Gaussian(
        given.restored(mean), given.restored(matrix), validate_args=False, method=logits.method
    )


def rivals_of(logits: Gaussian, label: int | Tensor) -> Tensor:
    """The class numbers that `margins` compares with, (*batch, classes - 1)."""
    given = Logits.of(logits)
    found = others(given.labels(label)[:, None], given.classes)
    return found.reshape(*given.batch_shape, -1)
