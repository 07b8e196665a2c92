"""Random tangents in place of covariances: for layers too wide for a matrix."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from covprop.carriers import Ledger, Planned, SketchSettings, Tangents
from covprop.carriers.sketch import SharedSigns
from covprop.carriers.sketched_activations import ORDERS
from covprop.carriers.tangents import PlannedTangents
from covprop.covariance import Dense
from covprop.covariance.semidefinite import EXACT_CHECK, nearest_semidefinite
from covprop.error_estimate import SamplingError
from covprop.errors import TooLarge
from covprop.flow.lineage import Lineage, Replacements, Watcher, free_bytes
from covprop.flow.nests import leaves, map_leaves
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.methods.base import Gains, Method, check_generator
from covprop.methods.call import Call, check_memory, checked_result
from covprop.methods.layerwise import LayerwiseMethod
from covprop.methods.root import Root
from covprop.methods.sketched_backward import expected_jacobians, output_moments
from covprop.text_table import in_bytes

QUARTERS = 4
"""Into which tangents are divided: halves for the outputs, halves of these for the tangents."""
WORTH_A_PLAN = 2**20
"""Numbers in the tangents of the inputs from which memory is planned."""

INDEFINITE = (
    "eigenvalues of the sketched covariance down to -{:.1e} of the largest were set to zero, as "
    "tangents are few for outputs so correlated"
)


@final
@dataclass(frozen=True)
class Sketched(LayerwiseMethod):
    """Estimate the covariance of the outputs of a large network, without a matrix of its units.

    Sigma_out = J_0 Sigma_x J_0^T + sum_l J_l R_l J_l^T, with the expected Jacobians J from the
    input and from every nonlinearity l to the outputs, and the part R_l = Sigma_z - D Sigma_y D
    that a nonlinearity adds. Random tangents estimate the variances of hidden units. Memory and
    time are linear in the number of units. The result has `mean_stderr` and `covariance_stderr`,
    the errors that come from the number of tangents. There are no gradients.
    docs/methods-reference.md has the formulas, docs/large.md measured errors.

    Args:
        tangents: The total number of tangents, a multiple of four times the replicates.
        order: 1 keeps only the variances of R_l, 2 also its covariances to second order.
        generator: A random generator, by default torch's global one.
        outputs: An index of the flattened output, to compute only some elements.
        replicates: The number of independent runs that share the tangents. Their spread gives the
            standard errors; 1 gives none.
        exact: The number of directions of an input that are propagated exactly, by default as many
            as tangents.
        memory: A limit in bytes, by default half of the free memory.
        activations: As for `GaussianLayers`.

    Example:
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        x = cp.Gaussian.isotropic(torch.zeros(1, 1, 8, 8), stddev=0.1, batch_dims=1)
        y = cp.propagate(model, x, cp.Sketched(64))
    """

    tangents: int = 64
    order: int = 2
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)
    outputs: Any = field(default=None, kw_only=True, hash=False)
    replicates: int = field(default=4, kw_only=True)
    exact: int | None = field(default=None, kw_only=True)
    memory: int | None = field(default=None, kw_only=True)
    activations: Replacements = field(default_factory=dict, hash=False, kw_only=True)
    kept: int | None = field(default=None, init=False, repr=False)
    """Tangents that each nonlinearity remembers, if not all."""
    signs: SharedSigns = field(default_factory=SharedSigns, init=False, repr=False, compare=False)
    """What random directions of a run have in common."""

    backward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if self.order not in ORDERS:
            raise ValueError(f"the order of a sketch is 1 or 2, not {self.order!r}")
        if type(self.replicates) is not int or self.replicates < 1:
            raise ValueError(f"replicates is a whole number from 1, not {self.replicates!r}")
        least = QUARTERS * self.replicates
        if type(self.tangents) is not int or self.tangents < least or self.tangents % least:
            raise ValueError(
                f"tangents is a multiple of {least}, {QUARTERS} for each of {self.replicates} "
                f"replicates, not {self.tangents!r}"
            )
        for name in ("exact", "memory"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 0):
                raise ValueError(f"{name} is a whole number from 0, not {number!r}")
        if isinstance(self.outputs, tuple):  # which torch takes for one index of each dimension
            object.__setattr__(self, "outputs", list(self.outputs))
        elif hasattr(self.outputs, "tolist"):  # an array does not tell whether it is another
            object.__setattr__(self, "outputs", self.outputs.tolist())
        check_generator(self.generator)

    @property
    def directions(self) -> int:
        """How many directions of an input are carried exactly at most."""
        return self.tangents if self.exact is None else self.exact

    def replicate(self, kept: int | None = None) -> "Sketched":
        """One of the independent runs."""
        one = replace(
            self, tangents=self.tangents // self.replicates, replicates=1, exact=self.directions
        )
        object.__setattr__(one, "kept", kept)
        return one

    def for_one_run(self) -> "Sketched":
        """The same, with random signs of its own."""
        one = copy(self)
        object.__setattr__(one, "signs", SharedSigns())
        return one

    def seeded(self, device: torch.device) -> "Sketched":
        """The same with a generator of its own: what torch's draws then is the model's."""
        if self.generator is not None:
            return self
        seed = int(torch.randint(2**62, ()))
        one = replace(self, generator=torch.Generator(device).manual_seed(seed))
        object.__setattr__(one, "kept", self.kept)
        return one

    @property
    def stochastic(self) -> bool:
        """Tangents are random."""
        return True

    def passes(self, call: Call) -> Any:
        """Average independent passes; their spread tells the standard errors."""
        one = self._fitted(call)
        watcher = one.watcher(call, self.replicates)
        results = [one.traverse(call, watcher)]
        _check_rest(results[0], self.replicates, call.device)
        results += [one.traverse(call, watcher) for _ in range(1, self.replicates)]
        return _averaged(results, self, self.tangents)

    def traverse(
        self, call: Call, watcher: Watcher | None = None, observe: Callable[..., Any] | None = None
    ) -> Any:
        """One pass without autograd, which is for the backward pass, operation by operation."""
        with torch.inference_mode(False), torch.no_grad():
            return LayerwiseMethod.traverse(self.seeded(call.device), call, watcher, observe)

    def finish(self, y: GaussianTensor) -> Gaussian:
        """The Gaussian of an output, by the backward pass."""
        mean, matrix = output_moments(y, self.outputs, self._budget(y.device))
        return checked_result(mean, Dense(matrix), self)

    def gains(self, call: Call, selected: bool = False) -> Gains | None:
        """By a pass that remembers no tangents, and the backward pass."""
        outputs = self.outputs if selected else None
        one = replace(self.replicate(), order=1, outputs=outputs).seeded(call.device)
        with torch.inference_mode(False), torch.no_grad():
            return LayerwiseMethod.gains(one, call)

    def gains_of(
        self, y: GaussianTensor, inputs: Sequence[GaussianTensor], roots: Sequence[Root]
    ) -> list[Tensor]:
        """E[J] L by the backward pass."""
        jacobians = expected_jacobians(y, inputs, self.outputs, self._budget(y.device))
        return [root.after(one) for root, one in zip(roots, jacobians, strict=True)]

    def _budget(self, device: torch.device) -> int:
        return free_bytes(device) // 2 if self.memory is None else self.memory

    def _fitted(self, call: Call) -> "Sketched":
        """One of the runs, with as many tangents remembered as there is memory for."""
        one = self.replicate()
        numbers = sum(mean.numel() for mean in call.means) * one.tangents
        if self.memory is None and numbers < WORTH_A_PLAN:
            return one
        peak, available = one.plan(call).peak_bytes, self._budget(call.device) // 2
        kept = _tangents_kept(one.tangents, self.order, peak, available)
        return self.replicate(kept)

    @property
    def settings(self) -> SketchSettings:
        """Those of one run."""
        return SketchSettings(
            self.tangents, self.order, self.directions, self.generator, self.kept, self.signs
        )

    def carrier(self, x: Gaussian, lineage: Lineage) -> Tangents:
        """Random tangents, and directions that are few."""
        return Tangents.of_input(x.covariance, lineage, self.settings)

    def planned_carrier(self, x: Gaussian, lineage: Lineage, ledger: Ledger) -> Planned:
        """Tangents, directions that are carried exactly, and with these those of higher orders."""
        mean, covariance = x.mean.detach(), x.covariance
        parts = covariance.factor_and_noise()
        width = covariance.size if parts is None else parts[0].shape[-1]
        if width > self.directions:
            width = self.tangents
        else:
            width += self.tangents * (1 if self.order == 1 else 2)
        rows = PlannedTangents(
            covariance.batch_shape, covariance.size, mean.itemsize, width, self.order > 1,
            self.replicates,
        )  # fmt: skip
        return Planned(rows, mean, lineage, ledger)


def _tangents_kept(tangents: int, order: int, peak: int, available: int) -> int | None:
    """How many tangents each nonlinearity may remember, None for all; peak: bytes for all."""
    if peak <= available:
        return None
    kept = tangents * available // peak // 2 * 2 if order > 1 else 0  # the first order keeps none
    if kept == 0:
        first = "order=1, " if order > 1 else ""
        raise TooLarge(
            f"{tangents} tangents would need {in_bytes(peak)}, and {in_bytes(2 * available)} may "
            f"be used; take fewer tangents or more replicates, {first}or propagate parts of the "
            "batch"
        )
    return kept


def _check_rest(result: Any, replicates: int, device: torch.device) -> None:
    """Refuse what the other runs and the average of all would hold, if that does not fit."""
    found = [leaf for leaf in leaves(result) if isinstance(leaf, Gaussian)]
    outputs = sum(y.covariance.size for y in found)
    held = sum(y.batch_shape.numel() * y.covariance.size**2 * y.mean.itemsize for y in found)
    check_memory(outputs, (2 * replicates + 1) * held, device)


def _averaged(results: Sequence[Any], method: Method, tangents: int) -> Any:
    """Independent results as one, and from their spread its standard errors."""
    each = [iter(list(leaves(result))) for result in results]

    def of_leaf(leaf: Any) -> Any:
        own = [next(values) for values in each]
        return _average(own, method, tangents) if isinstance(leaf, Gaussian) else leaf

    return map_leaves(results[0], of_leaf)


def _average(results: Sequence[Gaussian], method: Method, tangents: int) -> Gaussian:
    means = torch.stack([y.mean for y in results])
    matrices = torch.stack([y.covariance_matrix for y in results])
    error, root = None, len(results) ** 0.5
    if len(results) > 1:
        error = SamplingError(tangents, means.std(0) / root, matrices.std(0) / root)
    notes = dict.fromkeys(note for y in results for note in y.notes)
    matrix = matrices.mean(0)
    if matrix.shape[-1] <= EXACT_CHECK:
        matrix, lowest = nearest_semidefinite(matrix)
        if lowest < 0:
            notes[INDEFINITE.format(-lowest)] = None
    return Gaussian(
        means.mean(0), matrix, validate_args=False, method=method, sampling=error,
        notes=tuple(notes),
    )  # fmt: skip
