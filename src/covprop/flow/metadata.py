"""What a model may ask of a tensor without touching its numbers."""

from typing import Any

import torch
from torch import Tensor


class TensorMetadata:
    """Shape, dtype and device under `torch.Tensor`'s names; the batch is shown at `batch_at`."""

    __slots__ = ()

    batch_at: int

    @property
    def template(self) -> Tensor:
        """A tensor of the same shape, batch first, dtype and device."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        """The shape that the model sees."""
        if not self.batch_at:
            return self.template.shape
        shape = list(self.template.shape)
        shape.insert(self.batch_at, shape.pop(0))
        return torch.Size(shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.template.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.template.dtype

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.template.device

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a CUDA device."""
        return self.template.is_cuda

    @property
    def is_nested(self) -> bool:
        """Never a nested tensor."""
        return False

    def size(self, dim: int | None = None) -> Any:
        """Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Tensor.dim."""
        return self.template.dim()

    def numel(self) -> int:
        """Tensor.numel."""
        return self.template.numel()

    def is_floating_point(self) -> bool:
        """Tensor.is_floating_point."""
        return True

    def __len__(self) -> int:
        """The size of the first dimension."""
        return self.shape[0]
