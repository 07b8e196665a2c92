"""Variances alone: every feature taken as independent of every other."""

from dataclasses import InitVar, dataclass, field
from typing import ClassVar, final

from covprop.carriers import Ledger, PlannedVariances, Variances
from covprop.covariance.planned import PlannedRows
from covprop.flow.lineage import Lineage, Replacements
from covprop.gaussian import Gaussian
from covprop.methods.base import LayerwiseMethod


@final
@dataclass(frozen=True)
class AssumedDensity(LayerwiseMethod):
    """Assumed density filtering (Gast & Roth 2018): means and variances only, in O(n).

    The moments of every nonlinearity are exact, but features and branches are treated as
    independent. This is for comparison only: on trained networks its standard deviations were 84 to
    97 % too small, because units that share inputs are correlated (docs/large.md). Where
    `GaussianLayers` does not fit, use `Sketched`.

    Args:
        activations: As for `GaussianLayers`.
        independent_maxima: Deprecated, without effect: maxima treat their arguments as independent
            in any case.

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
        cp.propagate(torch.relu, x, cp.AssumedDensity())
    """

    activations: Replacements = field(default_factory=dict, hash=False)
    independent_maxima: InitVar[bool] = True

    carries_pairs: ClassVar[bool] = False

    def __post_init__(self, independent_maxima: bool) -> None:
        """Take the former option, which never had an effect."""

    def carrier(self, x: Gaussian, lineage: Lineage) -> Variances:
        """Its variances."""
        return Variances(x.covariance.diagonal(), lineage)

    def planned_carrier(self, x: Gaussian, lineage: Lineage, ledger: Ledger) -> PlannedVariances:
        """One number for each feature."""
        rows = PlannedRows(x.batch_shape, x.covariance.size, x.mean.itemsize, width=1)
        return PlannedVariances(rows, x.mean.detach(), lineage, ledger)
