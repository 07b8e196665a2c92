"""Values that lie in a plane, as pictures of a few pixels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covprop.report.page.markup import rounded

LEAST = 4
"""Pixels that an image has at least on either side."""
SIDE = 64
"""Pixels of a picture on its longer side."""


def plane(shape: Sequence[int]) -> tuple[int, int, int] | None:
    """(channels, height, width) of an event that is an image, else None."""
    sizes = [int(size) for size in shape]
    while len(sizes) > 3 and sizes[0] == 1:  # noqa: PLR2004
        sizes = sizes[1:]
    if len(sizes) == 2:  # noqa: PLR2004
        sizes = [1, *sizes]
    if len(sizes) != 3 or min(sizes[1:]) < LEAST:  # noqa: PLR2004
        return None
    return sizes[0], sizes[1], sizes[2]


def picture(values: Tensor, side: int = SIDE) -> dict[str, Any]:
    """Averages over channels (channels, height, width), and over pixels where there are many."""
    flat = values.double().mean(0, keepdim=True)
    height, width = flat.shape[-2:]
    shrink = max(1.0, max(height, width) / side)
    size = max(1, round(height / shrink)), max(1, round(width / shrink))
    small = torch.nn.functional.adaptive_avg_pool2d(flat, size)[0] if shrink > 1 else flat[0]
    return {"rows": size[0], "columns": size[1], "values": rounded(small.flatten())}


def sentence(channels: int, height: int, width: int, side: int = SIDE) -> str:
    """What the picture leaves out."""
    said = [f"averages over {channels} channels"] if channels > 1 else []
    if max(height, width) > side:
        said.append(f"averages of neighbouring pixels ({height} × {width} in all)")
    return f"Pictures show {' and '.join(said)}." if said else ""
