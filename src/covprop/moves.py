"""Which elements a movement takes, found from where each element of its result comes from."""

from collections.abc import Iterator

import torch
from torch import Tensor


def order_of(origins: Tensor, shape: torch.Size, batch: int) -> Tensor | None:
    """Which elements of one of a batch a movement takes, None for all in order.

    origins: where in a tensor of this shape each element of the result comes from.
    """
    size = shape.numel() // max(1, batch)
    flat = origins.reshape(-1).long()
    if not batch or torch.equal(flat, torch.arange(shape.numel(), device=flat.device)):
        return None
    for number, element in _places(shape, batch):
        of, within = number.to(flat.device)[flat], element.to(flat.device)[flat]
        for place in (-1, *range(origins.dim())):
            order = _taken(of, within, origins.shape, place, batch)
            if order is not None:
                whole = torch.arange(size, device=flat.device)
                return None if torch.equal(order, whole) else order
    return flat[: len(flat) // batch] % max(1, size)


def _places(shape: torch.Size, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Where the batch may be: the number of each element in it, and its place in one of them."""
    flat = torch.arange(shape.numel())
    size = shape.numel() // batch
    yield flat // size, flat % size
    for place, length in enumerate(shape):
        if length == batch:
            inner = shape[place + 1 :].numel()
            yield flat // inner % batch, flat // (inner * batch) * inner + flat % inner


def _taken(
    number: Tensor, element: Tensor, shape: torch.Size, place: int, batch: int
) -> Tensor | None:
    """The elements of each of the batch, if they are the same for all; place -1: batch first."""
    if place >= 0 and shape[place] != batch:
        return None

    def laid(values: Tensor) -> Tensor:
        whole = values if place < 0 else values.reshape(shape).movedim(place, 0)
        return whole.reshape(batch, -1)

    of, within = laid(number), laid(element)
    own = torch.arange(batch, device=number.device)[:, None]
    return within[0] if bool((of == own).all()) and bool((within == within[0]).all()) else None
