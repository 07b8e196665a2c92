"""Variances alone: every feature taken as independent of every other."""

from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor

from covprop.carriers import Ledger, Planned, PlannedIndependentMaxima, Variances
from covprop.carriers.planned_rows import PlannedRows
from covprop.covariance import Covariance
from covprop.flow.lineage import Lineage, Replacements
from covprop.methods.base import LayerwiseMethod


@final
@dataclass(frozen=True)
class AssumedDensity(LayerwiseMethod):
    """Assumed density filtering, as of Gast & Roth (2018): means and variances, in O(n).

    Exact moments of every nonlinearity, but all dependence between features and between branches is
    left out. For comparison, and never an answer: on trained networks its standard deviations were
    84 to 97 % too small, because units that share inputs move together (docs/large.md). Where
    `Exact` does not fit, use `Sketched`.

    Args:
        activations: As of `Exact`.
        independent_maxima: Maxima take their arguments as independent in any case.

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(3), 0.1)
        cp.propagate(torch.relu, x, cp.AssumedDensity())
    """

    activations: Replacements = field(default_factory=dict, hash=False)
    independent_maxima: bool = True

    carries_pairs: ClassVar[bool] = False

    def carrier(self, covariance: Covariance, lineage: Lineage) -> Variances:
        """Its variances."""
        return Variances(covariance.diagonal(), lineage)

    def planned_carrier(
        self, mean: Tensor, covariance: Covariance, lineage: Lineage, ledger: Ledger
    ) -> Planned:
        """One number for each feature."""
        rows = PlannedRows(covariance.batch_shape, covariance.size, mean.itemsize, width=1)
        return PlannedIndependentMaxima(rows, mean, lineage, ledger)
