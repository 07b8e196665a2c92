"""Another machine's BLAS, by hand: sums of products are added up in other orders.

Every entry of a matrix product, and every sum, is computed in one of two random orders of its
terms. What a BLAS promises still holds: each order is a valid one, and sums that are exact stay so.
What none promises is broken: A @ A.mT is not symmetric to the last bit, a batch of products need
not be what its elements give one by one. The same call gives the same bits, as on any machine.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default)
WITH_OFFSET = (aten.addmm.default, aten.baddbmm.default)


class AnotherBLAS(TorchDispatchMode):
    """Within it, matrix products and sums are rounded differently."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Replace products and sums, leave everything else."""
        kwargs = kwargs or {}
        if function in PRODUCTS and not kwargs:
            return self._either(lambda order: function(*_reordered(*args, order)), args[0])
        if function in WITH_OFFSET and not kwargs:
            offset, first, second = args
            return self._either(
                lambda order: function(offset, *_reordered(first, second, order)), first
            )
        if function is aten.sum.dim_IntList and len(args) > 1 and args[1] and args[0].dim():
            return self._sum(function, args, kwargs)
        return function(*args, **kwargs)

    def _sum(self, function: Any, args: Sequence[Any], kwargs: Any) -> Tensor:
        values, dims, *rest = args
        dim = dims[0] % values.dim()

        def permuted(order: Tensor) -> Tensor:
            return function(values.index_select(dim, order), dims, *rest, **kwargs)

        return self._either(permuted, values, dim)

    def _either(self, compute: Callable[[Tensor], Tensor], like: Tensor, dim: int = -1) -> Tensor:
        """Each entry from one of two orders of the summed dimension, at random."""
        size = like.shape[dim]
        generator = torch.Generator().manual_seed(size + like.dim())  # no test sees other draws
        orders = [torch.randperm(size, generator=generator) for _ in range(2)]
        first, second = (compute(order.to(like.device)) for order in orders)
        if not first.is_floating_point():
            return first
        coin = torch.rand(first.shape, generator=generator) < 0.5
        return torch.where(coin.to(first.device), first, second)


def _reordered(first: Tensor, second: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return first.index_select(-1, order), second.index_select(-2, order)
