"""What modules return while Gaussians go through them, kept by the paths of the modules."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from covprop.covariance import Covariance, Dense
from covprop.flow.nests import map_leaves
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.methods import Method

SHOWN = 8
"""Paths that a message names."""


def kept_gaussian(mean: Tensor, covariance: Covariance, method: Method) -> Gaussian:
    """A Gaussian that outlives its propagation: a large covariance is written out."""
    compact = covariance.independent or covariance.factored
    kept = covariance if compact else Dense(covariance.matrix())
    return Gaussian(mean, kept, validate_args=False, method=method)


@final
class ModuleOutputs:
    """The outputs of chosen modules, in the nests that they return, one for each call.

    names: paths of modules by their id; keep: whether all are chosen, or which.
    """

    def __init__(
        self, names: Mapping[int, str], keep: bool | str | Sequence[str], method: Method
    ) -> None:
        self.found: dict[str, list[Any]] = {}
        self._method = method
        self._paths = _chosen(names, keep)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep what the chosen modules return inside."""
        if not self._paths:
            yield
            return
        hook = register_module_forward_hook(self._returned)
        try:
            yield
        finally:
            hook.remove()

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        path = self._paths.get(id(module))
        if path is not None:
            self.found.setdefault(path, []).append(map_leaves(output, self._gaussian))

    def _gaussian(self, leaf: Any) -> Any:
        """Of an in-flight tensor, as it is now; anything else is returned."""
        if not isinstance(leaf, GaussianTensor):
            return leaf
        leaf.evaluate()
        return kept_gaussian(leaf.loc.clone(), leaf.covariance, self._method)


def _chosen(names: Mapping[int, str], keep: bool | str | Sequence[str]) -> dict[int, str]:
    """The paths of modules that are kept, by the id of the module."""
    if isinstance(keep, bool):
        return dict(names) if keep else {}
    wanted = {keep} if isinstance(keep, str) else set(keep)
    chosen = {module: path for module, path in names.items() if path in wanted}
    unknown = sorted(wanted - set(chosen.values()))
    if unknown and not names:
        raise ValueError(f"there is no module {unknown[0]!r}: a function has no modules")
    if unknown:
        known = ", ".join(map(repr, sorted(names.values())[:SHOWN]))
        raise ValueError(
            "keep takes paths of modules, as model.named_modules() has them, and "
            f"{unknown[0]!r} is none; there are {known}{', ...' if len(names) > SHOWN else ''}"
        )
    return chosen
