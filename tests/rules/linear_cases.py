"""Every linear operation in every spelling, on a batch and on a single event."""

from tests.rules import linear_composed, linear_layers, linear_tensors
from tests.rules.spelling import BATCH, Layer, LinearCase

__all__ = ["BATCH", "LINEAR_CASES", "Layer", "LinearCase"]

_GROUPS = (
    linear_layers.layers,
    linear_layers.convolutions,
    linear_layers.pools,
    linear_layers.pads,
    linear_layers.resizing,
    linear_layers.sampling,
    linear_layers.windows,
    linear_tensors.shapes,
    linear_tensors.moves,
    linear_tensors.indices,
    linear_tensors.sums,
    linear_tensors.products,
    linear_tensors.arithmetic,
    linear_tensors.copies,
    linear_composed.choices,
    linear_composed.placed,
    linear_composed.fused_elementwise,
    linear_composed.fused_matrices,
)
LINEAR_CASES: list[LinearCase] = [case for group in _GROUPS for case in group()]
