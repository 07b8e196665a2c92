"""The ways to carry randomness through a network, one file each."""

from covprop.carriers.cross_covariance import Treatment
from covprop.carriers.cumulants import Cumulants
from covprop.carriers.full import Full
from covprop.carriers.ledger import Ledger, Work
from covprop.carriers.planned import Planned
from covprop.carriers.planned_cumulants import PlannedCumulants
from covprop.carriers.sketched_activations import SketchSettings
from covprop.carriers.tangents import Tangents
from covprop.carriers.variances import PlannedVariances, Variances

__all__ = [
    "Cumulants",
    "Full",
    "Ledger",
    "Planned",
    "PlannedCumulants",
    "PlannedVariances",
    "SketchSettings",
    "Tangents",
    "Treatment",
    "Variances",
    "Work",
]
