"""A covariance and factors of the third cumulant, in blocks that belong to operations.

Every nonlinear operation makes a block: a column for each element i on which it is not linear,

    T = 1/2 sum over the 6 orders of ( e_i x w_i x q_i  +  r_i x e_i x e_i ),

the tree that is centred at i, and what the slices T_iij have beside it. A linear map takes factors
as it takes vectors, so the sum keeps its form; docs/mathematics.md has the derivation.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from covprop.activations import Activated
from covprop.carriers.cross_covariance import (
    CrossCache,
    SecondOrder,
    Treatment,
    at_same_depth,
    cross_covariance,
    release,
)
from covprop.carriers.fourth_cumulant import fourth_of_pairs, shared_vertices
from covprop.carriers.full import Full
from covprop.carriers.origins import (
    Blocks,
    InputOrigin,
    Nonlinearity,
    Origin,
    all_origins,
    block_of,
    moved,
)
from covprop.covariance import Covariance
from covprop.flow.carrier import Carrier
from covprop.flow.lineage import Lineage, Transfer
from covprop.kernels.edgeworth import Coefficients, Fourth, Slices
from covprop.kernels.normal import correlation, inverse_deviation
from covprop.kernels.products import columns_at_a_time, slices_of

UNKNOWN_SKEWNESS = (
    "the skewness of the result is too large for the expansion to be trusted, so it is not given; "
    "intervals are those of a Gaussian"
)
PARTLY = (
    "a product or a norm has an input that is not Gaussian, and not all of its higher cumulants "
    "are followed"
)
EXPANDED = "a function, as of several elements, is expanded about its mean, alike in both orders"
KEPT = 2**22
"""Bytes of blocks up to which they stay with a vector that the program no longer holds."""
LARGEST_RESULT = 3.0
"""The skewness of a result from which it is not given."""


class ThirdCumulant(Full):
    """A covariance structure, and blocks of factors of the third cumulant by their origin.

    blocks: those of what it came of, all in one tensor, so that a transfer and a slice are one
    matrix product each; what it shares with other origins is found when asked for. gaussian: the
    covariance that an activation would have of a Gaussian argument; known: the numbers of the
    activation that made it; own: the origin that it is itself; roots: the inputs that it came of;
    complete: whether every operation before it has made its block, so that skewness is known.

    Of a vector that the program no longer holds but that others may ask for, large blocks are
    released: what it made itself stays, and the rest is moved along its edges again when asked for.
    """

    lazy_release: ClassVar[bool] = False  # blocks are not counted

    def __init__(
        self,
        covariance: Covariance,
        lineage: Lineage,
        treatment: Treatment,
        edges: Iterable[tuple[Carrier, Transfer]] = (),
        activated: Activated | None = None,
        products: SecondOrder | None = None,
        opaque: bool = False,
        blocks: Blocks | None = None,
        gaussian: Covariance | None = None,
        known: Nonlinearity | None = None,
        own: Origin | None = None,
        good: Tensor | None = None,
    ) -> None:
        super().__init__(covariance, lineage, treatment, edges, activated, products, opaque)
        roots = (parent.roots for parent, _ in self._parents())
        self.roots: frozenset[int] = frozenset[int]().union(*roots) or frozenset((self.serial,))
        self.gaussian, self.known, self.own, self.fell_back = gaussian, known, own, False
        self.complete: bool = not opaque and all(parent.complete for parent, _ in self._parents())
        self._beside: dict[Origin, Tensor | None] = {}
        self._aligned: Blocks | None = None
        self._dtype, self._trusted_rows = covariance.dtype, good
        self._released: Blocks | None = None
        """What it made itself, while the rest is released."""
        blocks = self._moved() if blocks is None else blocks
        self.origins, self._blocks = blocks.origins, blocks

    @classmethod
    def of_input(
        cls, covariance: Covariance, third: Tensor | None, lineage: Lineage, treatment: Treatment
    ) -> Self:
        """An input whose elements are independent where they have third moments (*batch, n)."""
        blocks = Blocks()
        if third is not None:
            unit = torch.eye(covariance.size, dtype=third.dtype, device=third.device)
            unit = unit.expand(*third.shape, covariance.size)
            block = block_of(unit, None, None, torch.diag_embed(third / 3))
            blocks = blocks.with_block(InputOrigin(covariance.size), block)
        return cls(covariance, lineage, treatment, blocks=blocks)

    def _parents(self) -> list[tuple["ThirdCumulant", Transfer]]:
        return [(parent, edge) for parent, edge in self.edges if isinstance(parent, ThirdCumulant)]

    def directions(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of a function by its derivatives, which makes no block."""
        self.lineage.note(EXPANDED, warn=False)
        self.complete = False
        return super().directions(count)

    def note_partly(self, *others: "ThirdCumulant") -> None:
        """Note that orders which agree on an operation are not exact, where inputs have any."""
        if any(one.origins or not one.complete for one in (self, *others)):
            self.lineage.note(PARTLY, warn=False)

    def _moved(self) -> Blocks:
        """Blocks of what it came from, along the edges; only those of elements that are trusted."""
        parents = self._parents()
        origins = all_origins(*(parent.origins for parent, _ in parents))
        total: Tensor | None = None
        for parent, transfer in parents:
            factors = parent.factors(origins)
            if factors is not None:
                share = moved(factors.to(self._dtype), transfer)
                total = share if total is None else total + share
        blocks = Blocks() if total is None else Blocks(origins, total)
        return blocks if self._trusted_rows is None else blocks.only(self._trusted_rows)

    @property
    def blocks(self) -> Blocks:
        """The factors by their origin."""
        if self._released is not None:
            blocks = self._moved()
            for origin, block in self._released.parts().items():
                blocks = blocks.with_block(origin, block)
            self._blocks, self._released = blocks, None
            self.lineage.track(self)
        return self._blocks

    def add_block(self, origin: Origin, factors: Tensor) -> None:
        """Also the block of a newer origin."""
        self._blocks = self._blocks.with_block(origin, factors)
        self.origins = self._blocks.origins

    def release_blocks(self) -> None:
        """Keep what it made itself of large blocks, if the rest can be moved here again."""
        tensor, parents = self._blocks.tensor, self._parents()
        self.gaussian = self._aligned = None
        if self._released is not None or tensor is None or tensor.requires_grad:
            return
        before = all_origins(*(parent.origins for parent, _ in parents))
        simple = all(parent.origins == before for parent, _ in parents)
        if not parents or not simple or tensor.numel() * tensor.itemsize <= KEPT:
            return
        own = Blocks()
        for origin, block in self._blocks.parts().items():
            if origin not in before:
                own = own.with_block(origin, block.clone())
        self._released, self._blocks = own, Blocks()

    # Slices of the third cumulant.

    def factors(self, origins: tuple[Origin, ...]) -> Tensor | None:
        """What it has in the blocks of some origins, its own among them, None if that is zero."""
        if self.origins == origins:
            return self.blocks.tensor
        if self._aligned is None or self._aligned.origins != origins:
            found = [self.share(origin) for origin in origins]
            like = next((part for part in found if part is not None), None)
            tensor = None
            if like is not None:
                tensor = torch.cat([
                    like.new_zeros(*like.shape[:-2], origin.count, self.size) if part is None
                    else part.to(like.dtype)
                    for origin, part in zip(origins, found, strict=True)
                ], dim=-2)  # fmt: skip
            self._aligned = Blocks(origins, tensor)
        return self._aligned.tensor

    def share(self, origin: Origin) -> Tensor | None:
        """What it has in the block of one origin."""
        return self.blocks.parts()[origin] if origin in self.origins else self._beside_of(origin)

    def _beside_of(self, origin: Origin) -> Tensor | None:
        """What it has in the block of an origin that it did not come of."""
        if origin not in self._beside:
            y = origin.base
            found = None
            if y is not None and not y.roots.isdisjoint(self.roots):
                deeper = self.is_deeper(origin)
                found = self._along_edges(origin) if deeper else origin.beside(y, self)
            self._beside[origin] = found
        return self._beside[origin]

    def is_deeper(self, origin: Origin) -> bool:
        """Whether it has the share of what it came of, along the edges, in a block beside it."""
        depth = origin.depth
        return depth is not None and self.depth + (not self.nonlinear) > depth

    def _along_edges(self, origin: Origin) -> Tensor | None:
        total: Tensor | None = None
        for parent, transfer in self._parents():
            factors = parent.share(origin)
            if factors is not None:
                share = moved(factors.to(self._dtype), transfer)
                total = share if total is None else total + share
        rows = self._trusted_rows
        if total is None or rows is None:
            return total
        return torch.where(rows[..., None, None, :], total, 0)

    def slices(
        self,
        other: "ThirdCumulant",
        partner: "ThirdCumulant | None" = None,
        without: Origin | None = None,
    ) -> Tensor | None:
        """T(x_i, y_i, z_j) of this x, its partner y (x itself if None) and another z.

        Shape (*batch, n, m); None if it is zero. without: an origin whose block does not count.
        """
        y = self if partner is None else partner
        origins = all_origins(*(vector.origins for vector in (self, y, other)))
        if not origins or other.roots.isdisjoint(self.roots | y.roots):
            return None
        one, two, three = (vector.factors(origins) for vector in (self, y, other))
        if one is None or two is None or three is None:
            return None
        counting = None
        if without in origins:
            numbers = [one.new_full((o.count, 1), float(o is not without)) for o in origins]
            counting = torch.cat(numbers)
        two, three = two.to(one.dtype), three.to(one.dtype)
        return slices_of(one, two, three, counting)

    def thrice(self, inverse: Tensor, other: "ThirdCumulant") -> Tensor | None:
        """K(y_i, y_i, y_i, x_j) / sigma_i^3 of this y and another x, None if not known."""
        found = shared_vertices((self, inverse), (other, None))
        return None if found is None else found[0].thrice(found[1])

    def fourth(self, inverse: Tensor, other: "ThirdCumulant", others: Tensor) -> Fourth | None:
        """Fourth cumulants of pairs, given 1 / sigma of both, None if not known."""
        found = shared_vertices((self, inverse), (other, others))
        return None if found is None else fourth_of_pairs(*found)

    def third_moments(self) -> Tensor:
        """T_iii, (*batch, n)."""
        if self.blocks.tensor is None:
            return torch.zeros_like(self.variances())
        e, w, q, r = self.blocks.tensor.unbind(-3)
        return 3 * (e * (w * q + r * e)).sum(-2)

    def skewness(self) -> Tensor | None:
        """T_iii / sigma^3, where all of it is known and small enough for an expansion."""
        if not self.complete:
            return None
        inverse = inverse_deviation(self.variances().double())
        total = torch.zeros_like(inverse)
        tensor = self.blocks.tensor
        if tensor is not None:
            over = inverse.to(tensor)[..., None, None, :]
            for part in tensor.split(columns_at_a_time(tensor), dim=-2):
                e, w, q, r = (over * part).unbind(-3)
                third = (e * torch.addcmul(w * q, r, e)).sum(-2, dtype=total.dtype)
                total = total + 3 * third
        if bool((total.detach().abs() > LARGEST_RESULT).any()):
            self.lineage.note(UNKNOWN_SKEWNESS, warn=False)
            return None
        return total.to(self.variances().dtype)

    def cross(self, other: Carrier) -> Tensor | None:
        """Cov(this, other); those of this propagation that were found before are remembered."""
        assert isinstance(other, ThirdCumulant)
        if any(one.structure is not None and one.structure.constant for one in (self, other)):
            return None
        return cross_covariance(self, other, self.lineage.cross_cache)

    def beyond_gaussian(self, other: Carrier) -> Tensor | None:
        """What third cumulants add to Cov(g(y_i), x_j), beyond the slope E[g'] of the edge.

        T(y_i, y_i, x_j) g_2(i) / 2; of two activations of one depth, all orders.
        """
        assert isinstance(other, ThirdCumulant)
        if not self.edges:
            return None
        # The second order of two of one depth is in the Gaussian part already.
        without = other.own if at_same_depth(self, other) else None
        if self.products is not None and self.products.contraction.is_elementwise:
            u, v = self.products.parents
            assert isinstance(u, ThirdCumulant)
            assert isinstance(v, ThirdCumulant)
            return u.slices(other, v, without)  # kappa(u_i, v_i, x_j)
        return None if self.known is None else self._beyond(self.known, other, without)

    def _beyond(
        self, known: Nonlinearity, other: "ThirdCumulant", without: Origin | None
    ) -> Tensor | None:
        """The same of an activation."""
        y = self.edges[0][0]
        assert isinstance(y, ThirdCumulant)
        if other.known is None or not at_same_depth(self, other):
            slices = y.slices(other, without=without)
            if slices is None:
                return None
            rows = known.inverse.to(slices)[..., :, None]
            factor = (known.derivatives.first[2] / 2).to(slices)[..., :, None]
            total = factor * rows * (rows * slices)
            total = torch.where(known.trusted[..., :, None], total, 0)
            thrice = y.thrice(known.inverse, other)
            if thrice is not None:
                factor = (known.weight * known.derivatives.first[3] / 6).to(thrice)[..., :, None]
                total = total + torch.where(factor != 0, factor * thrice, 0)
            return total
        w = other.edges[0][0]
        assert isinstance(w, ThirdCumulant)
        cross = y.cross(w)
        if cross is None or not (y.origins or w.origins):
            return None
        rows = known.inverse.to(cross)[..., :, None]
        columns = other.known.inverse.to(cross)[..., None, :]
        left, right, zero = y.slices(w), w.slices(y), torch.zeros_like(cross)
        fourth = y.fourth(known.inverse, w, other.known.inverse)
        pairs = Slices(
            zero if left is None else left * rows * rows * columns,
            zero if right is None else right.mT * rows * columns * columns,
            None if fourth is None else fourth.weighted(known.weight, other.known.weight),
            (known.marginal, other.known.marginal),
        )
        both = known.trusted[..., :, None] & other.known.trusted[..., None, :]
        pairs = pairs._replace(
            left=torch.where(both, pairs.left, 0), right=torch.where(both, pairs.right, 0)
        )
        rho = correlation(cross, rows, columns)
        f, g = (
            Coefficients.of(one.derivatives.first, rho) for one in (known, other.known)
        )  # fmt: skip
        return pairs.correction(rho, f, g)

    def forget(self) -> None:
        """Cut the edges to what it came from; its blocks stay."""
        _ = self.blocks  # while there are edges
        super().forget()
        self.known = None

    @classmethod
    def collect(cls, held: set[Carrier], others: Iterable[Carrier]) -> None:
        """As of covariances; arguments of origins are kept for vectors that have no block."""
        nodes = {carrier for carrier in held if isinstance(carrier, ThirdCumulant)}
        living = [node for node in nodes if not node.covariance.constant]
        needed = dict.fromkeys(origin for node in living for origin in node.origins)
        bases: dict[Any, None] = {
            origin.base: None for origin in needed
            if origin.base is not None and any(
                origin not in node.origins and not origin.base.roots.isdisjoint(node.roots)
                for node in living
            )
        }  # fmt: skip
        # Others may be alive as well: vertices of what came of them refer to them.
        lineages = {node.lineage for node in nodes}
        alive = [one for lineage in lineages for ref in lineage.origins if (one := ref())]
        for origin in (*needed, *alive):
            if origin.base not in bases:
                origin.base = None
        living += [base for base in bases if base not in nodes]
        release(nodes, living)
        for lineage in lineages:
            _forget_crosses(lineage.cross_cache, living)
        for one in others:
            if isinstance(one, ThirdCumulant) and one not in nodes:
                one.release_blocks()


def _forget_crosses(crosses: CrossCache, living: Iterable[ThirdCumulant]) -> None:
    """Drop covariances of vectors that no edge leads to any more."""
    reached, pending = set[int](), list[Any](living)
    while pending:
        node = pending.pop()
        if node.serial not in reached:
            reached.add(node.serial)
            pending += [parent for parent, _ in node.edges]
    for pair in [pair for pair in crosses if not reached.issuperset(pair)]:
        del crosses[pair]
