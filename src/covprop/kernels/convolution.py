"""Convolutions of many images as few large matrix products, where torch has no fast kernel."""

import torch
from torch import Tensor

TOGETHER = 16
"""Images that are convolved at a time: the patches of more leave the cache."""


class Convolver:
    """A convolution without bias, with memory for the patches of some images.

    The images come last while it works, so that a place of all images is one piece of memory, and
    patches are made along the rows of the kernel only: the row below sees the same ones, one place
    further down. widths: the zeros left, right, above and below, as `F.pad` has them.
    """

    def __init__(
        self,
        weight: Tensor,
        image: torch.Size,
        stride: tuple[int, int],
        widths: tuple[int, int, int, int],
    ) -> None:
        (down, right), (left, before, above, below) = stride, widths
        channels, height, width = image
        kernel = weight.shape[-2:]
        self.image = image
        self.rows = (height + above + below - kernel[0]) // down + 1
        self.columns = (width + left + before - kernel[1]) // right + 1
        # kernel row, output channel, (kernel column, input channel)
        self.taps = weight.permute(2, 0, 3, 1).flatten(2).contiguous()
        across = [
            _inside(range(shift - left, shift - left + right * self.columns, right), width)
            for shift in range(kernel[1])
        ]
        seen = [range(i - above, i - above + down * self.rows, down) for i in range(kernel[0])]
        if down == 1:  # what the rows of the kernel see overlaps
            seen = [range(-above, height + below)]
        self.views = [(_inside(rows, height), across) for rows in seen]
        # Zeros stay zeros: what is outside of the images is never written.
        self._patches = [
            weight.new_zeros(kernel[1], channels, len(rows), self.columns, TOGETHER)
            for rows in seen
        ]

    def __call__(self, vectors: Tensor, channel: int = 0) -> Tensor:
        """Flat images (count, inputs) to their outputs from a channel on, (count, outputs)."""
        taps = self.taps[:, channel:]
        places = taps.shape[1] * self.rows * self.columns
        result = vectors.new_empty(places, len(vectors))
        products = vectors.new_empty(taps.shape[1], self.rows * self.columns * TOGETHER)
        for start in range(0, len(vectors), TOGETHER):
            part = vectors[start : start + TOGETHER]
            self._load(part.mT.contiguous().unflatten(0, self.image), len(part))
            for i, tap in enumerate(taps):
                if i == 0:
                    torch.mm(tap, self._under(i), out=products)
                else:
                    products.addmm_(tap, self._under(i))
            outputs = products.reshape(places, TOGETHER)
            result[:, start : start + TOGETHER] = outputs[:, : len(part)]
        return result.mT

    def _load(self, images: Tensor, count: int) -> None:
        """Put images (channels, rows, columns, count) under each column of the kernel."""
        for patches, ((rows, there), across) in zip(self._patches, self.views, strict=True):
            for shift, (columns, where) in enumerate(across):
                patches[shift, :, rows, columns, :count] = images[:, there, where]

    def _under(self, row: int) -> Tensor:
        """What a row of the kernel sees: (its columns * channels, places * images)."""
        patches = self._patches[0][:, :, row : row + self.rows]
        if len(self._patches) > 1:
            patches = self._patches[row]
        return patches.flatten(0, 1).flatten(1)


def _inside(seen: range, size: int) -> tuple[slice, slice]:
    """Which of the places seen are in [0, size): as a slice of them, and as one of the places."""
    kept = [i for i, place in enumerate(seen) if 0 <= place < size]
    if not kept:
        return slice(0, 0), slice(0, 0)
    first, last = kept[0], kept[-1]
    return slice(first, last + 1), slice(seen[first], seen[last] + 1, seen.step)
