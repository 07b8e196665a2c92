"""Declarations of scalar functions: their moments, coefficients and pairwise covariances."""

from covprop.activations import piecewise, smooth
from covprop.activations.base import (
    DECLARATIONS,
    Activated,
    Activation,
    Declaration,
    declare,
    spellings,
)
from covprop.activations.piecewise import Piecewise
from covprop.activations.quadrature import Quadrature

__all__ = [
    "DECLARATIONS",
    "Activated",
    "Activation",
    "Declaration",
    "Piecewise",
    "Quadrature",
    "declare",
    "piecewise",
    "smooth",
    "spellings",
]
