"""What operations do to an in-flight Gaussian; importing this package fills the table."""

from covprop.rules import (
    affine,
    aten,
    attention,
    composed,
    delta,
    elementwise,
    facts,
    identity,
    join,
    lengths,
    maximum,
    movement,
    noise,
    norms,
    product,
    recurrent,
)

__all__ = [
    "affine",
    "aten",
    "attention",
    "composed",
    "delta",
    "elementwise",
    "facts",
    "identity",
    "join",
    "lengths",
    "maximum",
    "movement",
    "noise",
    "norms",
    "product",
    "recurrent",
]
