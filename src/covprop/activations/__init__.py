"""Declarations of scalar functions: their moments, coefficients and pairwise covariances."""

from covprop.activations import rectifiers as rectifiers
from covprop.activations import smooth as smooth
from covprop.activations.base import DECLARATIONS as DECLARATIONS
from covprop.activations.base import Activated as Activated
from covprop.activations.base import Activation
from covprop.activations.base import Declaration as Declaration
from covprop.activations.base import declare as declare
from covprop.activations.base import in_place_spellings as in_place_spellings
from covprop.activations.base import spellings as spellings
from covprop.activations.piecewise import Piecewise
from covprop.activations.quadrature import Quadrature

__all__ = ["Activation", "Piecewise", "Quadrature"]


def __dir__() -> list[str]:
    return list(__all__)
