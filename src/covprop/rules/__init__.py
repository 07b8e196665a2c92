"""What operations do to an in-flight Gaussian; importing this package fills the table."""

from covprop.rules import (
    affine,
    delta,
    elementwise,
    facts,
    identity,
    join,
    maximum,
    movement,
    noise,
    product,
)

__all__ = [
    "affine",
    "delta",
    "elementwise",
    "facts",
    "identity",
    "join",
    "maximum",
    "movement",
    "noise",
    "product",
]
