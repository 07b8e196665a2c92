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
    """The best way for this network and its noise, with an estimate of the error of its answer.

    Third cumulants are followed from layer to layer (`cp.Cumulants`); where a plan says that this
    takes too much, Gaussian layers (`cp.GaussianLayers`) or sketches (`cp.Sketched`). With noise in
    one to eight independent directions the network is evaluated at fixed points as well
    (`cp.QuasiMonteCarlo`), with more where the estimated error of the layers is large. The answer
    is the one with the smaller estimated error.

    `y.error` is the estimate, `y.method` the method that was used, `y.notes` say why. Where an
    error above 5 % is estimated and nothing better was found, there is a warning. The choice is one
    for all Gaussians of a batch: without a tolerance, as many points are taken as half of them need
    for 0.5 % and nine of ten for 2 %, and `y.error` has the errors of all. So a batch and a loop
    over it, which may take other numbers of points, agree within `y.error` only. Deterministic.
    Gradients are those of the way from layer to layer.

    Args:
        tolerance: The largest error that is wanted, of means in standard deviations and of
            standard deviations relatively: 0.01 is 1 %. The first way that is estimated to be
            within it is taken, cheap ones first; where none is found there is a warning. None for a
            good answer at moderate cost.
        seed: Of the points.

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
        """The best of the answers that there is reason to look for."""
        if not any(x.covariance.distributed for x in call.inputs):
            return Choice(call, self.tolerance, self.seed).made()
        result = GaussianLayers().passes(call)
        return map_leaves(
            result,
            lambda leaf: leaf.with_error(None, [SPREAD]) if isinstance(leaf, Gaussian) else leaf,
        )

    def plan(self, call: Call) -> Plan:
        """That of the way from layer to layer which it would take."""
        return self.layerwise(call).plan(call)

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """Those of the first method that can."""
        return self.layerwise(call).gains(call, selected)

    def layerwise(self, call: Call) -> LayerwiseMethod:
        """The method that goes from layer to layer which it would take."""
        return Choice(call, self.tolerance, self.seed).layerwise[0]
