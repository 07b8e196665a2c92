"""What operations do to an in-flight Gaussian; importing this package fills the table."""

from covprop.rules import (
    affine,
    aten,
    attention,
    composed,
    composition,
    elementwise,
    lengths,
    maximum,
    metadata,
    movement,
    noise,
    norms,
    products,
    recurrent,
    smooth,
    sums,
)

__all__ = [
    "affine",
    "aten",
    "attention",
    "composed",
    "composition",
    "elementwise",
    "lengths",
    "maximum",
    "metadata",
    "movement",
    "noise",
    "norms",
    "products",
    "recurrent",
    "smooth",
    "sums",
]

composition.register_operations(elementwise.apply)  # of functions that have rules by now
