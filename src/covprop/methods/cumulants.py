"""Past Gaussian layers: third cumulants of every tensor, in factors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.carriers import Cumulants as Carrier
from covprop.carriers import Ledger, Planned, PlannedCumulants
from covprop.covariance import Covariance
from covprop.errors import ApproximationWarning, InconsistentBranches, warn_user
from covprop.flow.lineage import Lineage, Replacements, Watcher
from covprop.flow.nests import map_leaves
from covprop.gaussian import Gaussian
from covprop.methods.base import Gains, LayerwiseMethod
from covprop.methods.call import Call
from covprop.methods.gaussian_layers import GaussianLayers, exact_cross, exact_moments
from covprop.skewed import Skewed


@final
@dataclass(frozen=True)
class Cumulants(LayerwiseMethod):
    """Gaussian moments of each nonlinearity, corrected by the third cumulant of its input.

    `GaussianLayers` takes the input of every layer as Gaussian. This follows its skewness as well,
    to first order, so that means, covariances and the `skewness` of the outputs hold at larger
    noise. It costs 5 to 20 times as much. Where the expansion cannot be trusted, an operation takes
    its input as Gaussian, warns and leaves a note in the result (`y.notes`).

    Args:
        activations: As of `GaussianLayers`.

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(3), 1.0)
        y = cp.propagate(torch.relu, x, cp.Cumulants())
        y.skewness
    """

    activations: Replacements = field(default_factory=dict, hash=False)

    independent_maxima: bool = field(default=False, init=False, repr=False)

    uses_skewness: ClassVar[bool] = True
    third_cumulants: ClassVar[bool] = True

    def carrier(self, x: Gaussian, lineage: Lineage) -> Carrier:
        """Covariance and third moments."""
        third = None
        if isinstance(x, Skewed) and x.skewness is not None:
            third = x.skewness.flatten(len(x.batch_shape)) * x.covariance.diagonal() ** 1.5
        return Carrier.of_input(x.covariance, third, lineage, self)

    def planned_carrier(self, x: Gaussian, lineage: Lineage, ledger: Ledger) -> Planned:
        """Blocks beside the covariances."""
        own = x.covariance.size if isinstance(x, Skewed) else 0
        return PlannedCumulants(x.covariance.planned(), x.mean.detach(), lineage, ledger, own=own)

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Those of a Gaussian, as of `GaussianLayers`."""
        return exact_moments(activation, mean, covariance)

    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """That of Gaussians, as of `GaussianLayers`."""
        return exact_cross(left, right, covariance)

    def traverse(
        self, call: Call, watcher: Watcher | None = None, observe: Callable[..., Any] | None = None
    ) -> Any:
        """One pass; where branches do not join with third cumulants, one of `GaussianLayers`."""
        try:
            return super().traverse(call, watcher, observe)
        except InconsistentBranches as error:
            note = warn_user(
                "third cumulants give a negative variance, so the result is that of "
                f"cp.GaussianLayers(): {error}",
                ApproximationWarning,
            )
        result = GaussianLayers(self.activations).traverse(call, watcher, observe)
        return map_leaves(result, lambda leaf: self._noted(leaf, note))

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """Those of `GaussianLayers` where branches cannot be joined with third cumulants."""
        try:
            return super().gains(call, selected)
        except InconsistentBranches:
            return GaussianLayers(self.activations).gains(call, selected)

    def _noted(self, leaf: Any, note: str) -> Any:
        if not isinstance(leaf, Gaussian):
            return leaf
        return Gaussian(leaf.mean, leaf.covariance, validate_args=False, method=self, notes=(note,))
