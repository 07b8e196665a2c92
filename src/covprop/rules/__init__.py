"""What operations do to an in-flight Gaussian; importing this package fills the table."""

from covprop.rules import (
    affine,
    attention,
    delta,
    elementwise,
    facts,
    identity,
    join,
    maximum,
    movement,
    noise,
    product,
    recurrent,
)

__all__ = [
    "affine",
    "attention",
    "delta",
    "elementwise",
    "facts",
    "identity",
    "join",
    "maximum",
    "movement",
    "noise",
    "product",
    "recurrent",
]
