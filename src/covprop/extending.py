"""What rules are written with: functions by name, bodies for the common kinds, and the algebra.

A rule is registered with `cp.rule`, an element-wise function with `cp.register_activation`.
docs/extending.md has an example of each kind.
"""

from covprop.activations import in_place_spellings, spellings
from covprop.covariance import LinearMap
from covprop.flow.algebra import Contraction, Groups
from covprop.flow.carrier import Carrier
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor
from covprop.rules.affine import affine
from covprop.rules.movement import movement
from covprop.rules.smooth import delta

__all__ = [
    "Batch",
    "Carrier",
    "Contraction",
    "GaussianTensor",
    "Groups",
    "Kind",
    "LinearMap",
    "affine",
    "delta",
    "in_place_spellings",
    "movement",
    "rule",
    "spellings",
]


def __dir__() -> list[str]:
    return list(__all__)
