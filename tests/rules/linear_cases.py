"""Every linear operation in every spelling, on a batch and on a single event."""

from tests.rules import linear_layers, linear_tensors
from tests.rules.spelling import BATCH, Layer, LinearCase

__all__ = ["BATCH", "LINEAR_CASES", "Layer", "LinearCase"]

_GROUPS = (
    linear_layers.layers,
    linear_layers.convolutions,
    linear_layers.pools,
    linear_layers.pads,
    linear_layers.resizing,
    linear_layers.windows,
    linear_tensors.shapes,
    linear_tensors.moves,
    linear_tensors.indices,
    linear_tensors.sums,
    linear_tensors.products,
    linear_tensors.arithmetic,
    linear_tensors.copies,
)
LINEAR_CASES: list[LinearCase] = [case for group in _GROUPS for case in group()]
