"""What operations do to an in-flight Gaussian; importing this package fills the table."""

from covprop.rules import (
    affine,
    aten,
    composed,
    composition,
    elementwise,
    joint,
    layers,
    logic,
    maximum,
    movement,
    noise,
    norms,
    placement,
    radius,
    recurrent,
    rounding,
    smooth,
)

__all__ = [
    "affine",
    "aten",
    "composed",
    "composition",
    "elementwise",
    "joint",
    "layers",
    "logic",
    "maximum",
    "movement",
    "noise",
    "norms",
    "placement",
    "radius",
    "recurrent",
    "rounding",
    "smooth",
]

elementwise.register_operations()  # of functions that have rules by now
rounding.register_rounded_division()
elementwise.register_bounds()
radius.register_radii()
