"""What operations do to an in-flight Gaussian; importing this package fills the table."""

from covprop.rules import (
    affine,
    aten,
    clamp,
    composed,
    composition,
    elementwise,
    joint,
    layers,
    maximum,
    movement,
    noise,
    norms,
    placement,
    radius,
    recurrent,
    rounding,
    scatter,
    smooth,
)

__all__ = [
    "affine",
    "aten",
    "clamp",
    "composed",
    "composition",
    "elementwise",
    "joint",
    "layers",
    "maximum",
    "movement",
    "noise",
    "norms",
    "placement",
    "radius",
    "recurrent",
    "rounding",
    "scatter",
    "smooth",
]

elementwise.register_operations()  # of functions that have rules by now
rounding.register_rounded_division()
clamp.register_bounds()
radius.register_radii()
