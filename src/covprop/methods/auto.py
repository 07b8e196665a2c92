"""The default: chooses a method, and says how far its answer may be off."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from covprop.flow.nests import map_leaves
from covprop.gaussian import Gaussian
from covprop.methods.base import Gains, Method
from covprop.methods.call import Call
from covprop.methods.choice import Choice
from covprop.methods.layerwise import GaussianLayers, LayerwiseMethod
from covprop.methods.plan import Plan

SPREAD = (
    "the covariance is spread over processes, which carry it from layer to layer as Gaussian: the "
    "error of this is not estimated"
)


@final
@dataclass(frozen=True)
class Auto(Method):
    """Choose the best method for this network and noise, and estimate the error of the answer.

    It propagates third cumulants from layer to layer (`cp.Cumulants`) or, where these cost too
    much, uses `cp.GaussianLayers` or `cp.Sketched`. If the noise has at most eight independent
    directions, or the estimated error of the layers is large, it also evaluates the network at
    fixed points (`cp.QuasiMonteCarlo`). The answer is the one with the smaller estimated error.

    `y.error` is the estimate, `y.method` the method that was used, and `y.notes` say why. If the
    estimated error stays above 5 %, there is a warning. One choice is made for a whole batch:
    without a tolerance, it takes enough points for an error of 0.5 % in half of the batch, and
    of 2 % in nine tenths of it. A loop over the batch may take other numbers of points, so the
    results agree within `y.error` only. Results are deterministic. Gradients come from the layers.

    Args:
        tolerance: The largest acceptable error, of means in standard deviations and of standard
            deviations relative to themselves: 0.01 is 1 %. Cheap methods come first, and the first
            one whose estimate is within the tolerance is the answer; if there is none, there is a
            warning. None stands for a good answer at moderate cost.
        seed: The seed of the points.

    Example:
        y = cp.propagate(model, x, cp.Auto(tolerance=0.01))
        print(y.error, y.method, y.notes)
    """

    tolerance: float | None = None
    seed: int = 0

    uses_skewness: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is a share between 0 and 1, not {self.tolerance!r}")

    def run(self, call: Call) -> Any:
        """The best of the answers that it computes."""
        if not any(x.covariance.distributed for x in call.inputs):
            return Choice(call, self.tolerance, self.seed).made()
        result = GaussianLayers().passes(call)
        return map_leaves(
            result,
            lambda leaf: leaf.with_error(None, [SPREAD]) if isinstance(leaf, Gaussian) else leaf,
        )

    def plan(self, call: Call) -> Plan:
        """The plan of the layerwise method that it would use."""
        return self.layerwise(call).plan(call)

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """Those of the first method that can."""
        return self.layerwise(call).gains(call, selected)

    def layerwise(self, call: Call) -> LayerwiseMethod:
        """The layerwise method that it would use."""
        return Choice(call, self.tolerance, self.seed).layerwise[0]
