"""Sizes of third cumulants: blocks of columns beside what a plan counts of covariances."""

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor

from covprop.carriers.origins import FACTORS
from covprop.carriers.planned import Ledger, Planned
from covprop.covariance.planned import Cost, PlannedCovariance
from covprop.flow.carrier import Carrier
from covprop.flow.lineage import Lineage

BESIDE = 3
"""Copies of the factors of a vector in the blocks of others that are held while they are made."""
HELD = 19
"""Matrices that the corrections of a nonlinear operation hold at a time."""
FOLLOWED = 40
"""Those that autograd keeps of them."""


@final
class PlannedCumulants(Planned):
    """A random vector whose blocks are counted as if every element had a column.

    own: columns of its own block; columns: those of all blocks, by the vector that made them.
    """

    def __init__(
        self,
        structure: PlannedCovariance,
        loc: Tensor,
        lineage: Lineage,
        ledger: Ledger,
        parents: Iterable[Carrier] = (),
        own: int = 0,
        **options: Any,
    ) -> None:
        parents = tuple(parents)
        self.columns: dict[int, int] = {}
        for parent in parents:
            if isinstance(parent, PlannedCumulants):
                self.columns.update(parent.columns)
        super().__init__(structure, loc, lineage, ledger, parents, **options)
        if own:
            self.columns[self.serial] = own

    @property
    def nbytes(self) -> int:
        """With the blocks, which stay when the covariance is released."""
        return 0 if self.saved else super().nbytes + self._blocks(self.size, self.columns)

    def _blocks(self, size: int, columns: dict[int, int]) -> int:
        unit = self.batch_shape.numel() * self._zeros.itemsize
        return unit * size * FACTORS * sum(columns.values())

    def _new(
        self, loc: Tensor, cost: Cost, *others: Planned, grid: int | None = None, **options: Any
    ) -> Planned:
        """The result of an operation; a nonlinear one has a block of its own."""
        columns = dict(self.columns)
        for other in others:
            columns.update(other.columns if isinstance(other, PlannedCumulants) else {})
        result = self._result(loc, *others)
        moved = self._blocks(result.size, columns)
        work = cost.work + 2 * result.taps * moved / result.itemsize
        held, kept, own = moved, moved, 0
        for one in dict.fromkeys((self, *others)):  # what each has in the blocks of the others
            have = one.columns if isinstance(one, PlannedCumulants) else {}
            missing = {serial: count for serial, count in columns.items() if serial not in have}
            beside = (1 + BESIDE) * self._blocks(one.size, missing)
            held, kept, work = held + beside, kept + beside, work + 2 * beside
        if options.get("nonlinear"):
            own = result.size
            matrix = self.batch_shape.numel() * result.itemsize * own**2
            held += moved + HELD * matrix
            kept += moved + FOLLOWED * matrix
            work += 2 * own * moved / result.itemsize
            held += FACTORS * matrix
        cost = cost._replace(temporary=cost.temporary + held, work=work, graph=cost.graph + kept)
        return super()._new(loc, cost, *others, grid=grid, own=own, **options)
