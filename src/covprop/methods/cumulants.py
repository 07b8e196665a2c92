"""Past Gaussian layers: third cumulants of every tensor, in factors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.carriers import Cumulants as Carrier
from covprop.carriers import Ledger, Planned, PlannedCumulants
from covprop.covariance import Covariance, Dense
from covprop.errors import ApproximationWarning, InconsistentBranches, warn_user
from covprop.flow.lineage import Lineage, Replacements, Watcher
from covprop.flow.nests import leaves, map_leaves
from covprop.gaussian import Gaussian
from covprop.methods.base import Gains
from covprop.methods.call import Call
from covprop.methods.layerwise import GaussianLayers, LayerwiseMethod, exact_cross, exact_moments
from covprop.skewed import Skewed


@final
@dataclass(frozen=True)
class Cumulants(LayerwiseMethod):
    """Gaussian moments of each nonlinearity, corrected by the third cumulant of its input.

    `GaussianLayers` treats the input of every layer as Gaussian. This method also follows its
    skewness and fourth cumulants of pairs, to first order, so it is accurate at larger noise, and
    it computes the `skewness` of the outputs. It costs 2 to 20 times as much. Where the expansion
    is not valid, an operation treats its input as Gaussian, warns, and leaves a note in `y.notes`.
    Large fourth cumulants are reduced, with a note.

    Args:
        activations: As for `GaussianLayers`.

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(3), stddev=1.0)
        y = cp.propagate(torch.relu, x, cp.Cumulants())
        y.skewness
    """

    activations: Replacements = field(default_factory=dict, hash=False)

    uses_skewness: ClassVar[bool] = True
    third_cumulants: ClassVar[bool] = True

    def carrier(self, x: Gaussian, lineage: Lineage) -> Carrier:
        """Covariance and third moments."""
        third = None
        if isinstance(x, Skewed) and x.skewness is not None:
            variances = x.covariance.diagonal()
            third = x.skewness.reshape(variances.shape) * variances**1.5
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
        """One pass; elements whose branches do not join with third cumulants are Gaussian."""
        done, failed, result, reason = call, None, None, ""
        while failed is None or not bool(failed.all()):
            try:
                result = super().traverse(done, watcher, observe)
                break
            except InconsistentBranches as error:
                failed, reason = _also_failed(call, failed, error), str(error)
                done = _only(call, ~failed)
        if failed is None:
            return result
        exact = GaussianLayers(self.activations).traverse(_only(call, failed), watcher, observe)
        share = (
            "" if failed.numel() == 1 else f" in {int(failed.sum())} of {failed.numel()} elements"
        )
        note = warn_user(
            f"third cumulants give a negative variance{share}, so the result there is that of "
            f"cp.GaussianLayers(): {reason}",
            ApproximationWarning,
        )
        others = iter(leaves(exact if result is None else result))
        return map_leaves(exact, lambda leaf: self._joined(leaf, next(others), failed, note))

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """Those of `GaussianLayers` where branches cannot be joined with third cumulants."""
        try:
            return super().gains(call, selected)
        except InconsistentBranches:
            return GaussianLayers(self.activations).gains(call, selected)

    def _joined(self, exact: Any, other: Any, failed: Tensor, note: str) -> Any:
        """One result for some elements of the batch, and another for the rest."""
        if not isinstance(exact, Gaussian):
            return exact
        mean, covariance, notes = exact.mean, exact.covariance, (*other.notes, note)
        if other is not exact:
            mean = torch.where(_leading(failed, mean), mean, other.mean)
            matrix, rest = exact.covariance.matrix(), other.covariance.matrix()
            covariance = Dense(torch.where(failed[..., None, None], matrix, rest))
        return Gaussian(mean, covariance, validate_args=False, method=self, notes=notes)


def _leading(mask: Tensor, like: Tensor) -> Tensor:
    """A mask (*batch) for a tensor (*batch, *any)."""
    return mask.reshape(*mask.shape, *(1,) * (like.dim() - mask.dim()))


def _also_failed(call: Call, before: Tensor | None, error: InconsistentBranches) -> Tensor:
    """Elements of the batch that an error is about, beside those before; all if it is not known."""
    cause: BaseException | None = error
    elements = None
    while elements is None and cause is not None:  # a later error names the module
        elements, cause = getattr(cause, "elements", None), cause.__cause__
    every = torch.ones(call.inputs[0].batch_shape, dtype=torch.bool, device=call.device)
    if elements is None or elements.shape != every.shape:
        return every
    before = torch.zeros_like(every) if before is None else before
    return before | elements if bool((elements & ~before).any()) else every


def _only(call: Call, elements: Tensor) -> Call:
    """The same call, without noise in the other elements of the batch."""
    if bool(elements.all()):
        return call

    def without(tensor: Tensor) -> Tensor:
        return torch.where(_leading(elements, tensor), tensor, 0)

    return call.on([x.with_moments(covariance=x.covariance.map(without)) for x in call.inputs])
