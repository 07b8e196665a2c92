"""What operations do to an in-flight Gaussian; importing this package fills the table."""

from covprop.rules import (
    affine,
    aten,
    composed,
    composition,
    elementwise,
    joint,
    maximum,
    movement,
    noise,
    norms,
    placement,
    recurrent,
    smooth,
)

__all__ = [
    "affine",
    "aten",
    "composed",
    "composition",
    "elementwise",
    "joint",
    "maximum",
    "movement",
    "noise",
    "norms",
    "placement",
    "recurrent",
    "smooth",
]

composition.register_operations(elementwise.apply)  # of functions that have rules by now
