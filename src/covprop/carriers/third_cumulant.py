"""A covariance and factors of the third cumulant, in blocks that belong to operations.

Every nonlinear operation makes a block: a column for each element i on which it is not linear,

    T = 1/2 sum over the 6 orders of ( e_i x w_i x q_i  +  r_i x e_i x e_i ),

the tree that is centred at i, and what the slices T_iij have beside it. A linear map takes factors
as it takes vectors, so the sum keeps its form; docs/mathematics.md has the derivation.
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from covprop.activations import Activated
from covprop.carriers.cross_covariance import SecondOrder, Treatment, parallel, release
from covprop.carriers.full import Full
from covprop.carriers.origins import InputOrigin, Nonlinearity, Origin
from covprop.covariance import Covariance
from covprop.flow.carrier import Carrier, Transfer
from covprop.flow.lineage import Lineage
from covprop.kernels.edgeworth import Slices
from covprop.kernels.normal import correlation, inverse_deviation

FACTORS = 4
"""Tensors of a block: e, w, q and r."""
UNKNOWN_SKEWNESS = (
    "the skewness of the result is too large for the expansion to be trusted, so it is not given; "
    "intervals are those of a Gaussian"
)
LARGEST_RESULT = 3.0
"""The skewness of a result from which it is not given."""


class ThirdCumulant(Full):
    """A covariance structure, and blocks of factors of the third cumulant by their origin.

    A block is one tensor (*batch, n, 4 r): the columns of e, w, q and r side by side. gaussian: the
    covariance that an activation would have of a Gaussian argument; known: the numbers of the
    activation that made it; own: the origin that it is itself; roots: the inputs that it came of;
    complete: whether every operation before it has made its block, so that skewness is known.
    """

    def __init__(
        self,
        covariance: Covariance,
        lineage: Lineage,
        treatment: Treatment,
        edges: Iterable[tuple[Carrier, Transfer]] = (),
        activated: Activated | None = None,
        products: SecondOrder | None = None,
        opaque: bool = False,
        blocks: dict[Origin, Tensor] | None = None,
        gaussian: Covariance | None = None,
        known: Nonlinearity | None = None,
        own: Origin | None = None,
    ) -> None:
        super().__init__(covariance, lineage, treatment, edges, activated, products, opaque)
        roots = (parent.roots for parent, _ in self._parents())
        self.roots: frozenset[int] = frozenset[int]().union(*roots) or frozenset((self.serial,))
        self.gaussian, self.known, self.own, self.fell_back = gaussian, known, own, False
        self.complete: bool = not opaque and all(parent.complete for parent, _ in self._parents())
        self._beside: dict[Origin, Tensor | None] = {}
        self.blocks = self._moved() if blocks is None else blocks

    @classmethod
    def of_input(
        cls, covariance: Covariance, third: Tensor | None, lineage: Lineage, treatment: Treatment
    ) -> Self:
        """An input whose elements are independent where they have third moments (*batch, n)."""
        blocks: dict[Origin, Tensor] = {}
        if third is not None:
            unit = torch.eye(covariance.size, dtype=third.dtype, device=third.device)
            unit = unit.expand(*third.shape, covariance.size)
            nothing = torch.zeros_like(unit)
            parts = unit, nothing, nothing, torch.diag_embed(third / 3)
            blocks[InputOrigin()] = torch.cat(parts, dim=-1)
        return cls(covariance, lineage, treatment, blocks=blocks)

    def _parents(self) -> list[tuple["ThirdCumulant", Transfer]]:
        return [(parent, edge) for parent, edge in self.edges if isinstance(parent, ThirdCumulant)]

    def _moved(self) -> dict[Origin, Tensor]:
        """Blocks of what it came from, along the edges."""
        blocks: dict[Origin, Tensor] = {}
        parents = self._parents()
        for origin in dict.fromkeys(origin for parent, _ in parents for origin in parent.blocks):
            for parent, transfer in parents:
                factors = parent.factors(origin)
                if factors is not None:
                    share = transfer(factors.to(self.covariance.dtype))
                    blocks[origin] = blocks[origin] + share if origin in blocks else share
        return blocks

    # Slices of the third cumulant.

    def factors(self, origin: Origin) -> Tensor | None:
        """What it has in the block of an origin, None if that is zero."""
        if origin in self.blocks:
            return self.blocks[origin]
        if origin not in self._beside:
            y = origin.base
            independent = y is None or y.roots.isdisjoint(self.roots)
            self._beside[origin] = None if y is None or independent else origin.beside(y, self)
        return self._beside[origin]

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
        total: Tensor | None = None
        for origin in dict.fromkeys((*self.blocks, *y.blocks, *other.blocks)):
            if origin is without:
                continue
            factors = self.factors(origin), y.factors(origin), other.factors(origin)
            one, two, three = factors
            if one is None or two is None or three is None:
                continue
            two, three = two.to(one.dtype), three.to(one.dtype)
            (e, w, q, r), (e2, w2, q2, r2) = (f.chunk(FACTORS, dim=-1) for f in (one, two))
            centre = (w * q2 + q * w2) / 2 + r * e2 + e * r2
            left = [centre, (e * q2 + q * e2) / 2, (e * w2 + w * e2) / 2, e * e2]
            part = torch.cat(left, dim=-1) @ three.mT
            total = part if total is None else total + part
        return total

    def third_moments(self) -> Tensor:
        """T_iii, (*batch, n)."""
        total = torch.zeros_like(self.variances())
        for block in self.blocks.values():
            e, w, q, r = block.chunk(FACTORS, dim=-1)
            total = total + 3 * (e * (w * q + r * e)).sum(-1)
        return total

    def skewness(self) -> Tensor | None:
        """T_iii / sigma^3, where all of it is known and small enough for an expansion."""
        if not self.complete:
            return None
        inverse = inverse_deviation(self.variances().double())
        total = torch.zeros_like(inverse)
        for block in self.blocks.values():
            e, w, q, r = block.double().chunk(FACTORS, dim=-1)
            over = inverse[..., None]
            tree = (over * e) * (over * w) * (over * q)
            total = total + 3 * (tree + (over * r) * (over * e) * (over * e)).sum(-1)
        if bool((total.detach().abs() > LARGEST_RESULT).any()):
            self.lineage.note(UNKNOWN_SKEWNESS, warn=False)
            return None
        return total.to(self.variances().dtype)

    def beyond_gaussian(self, other: Carrier) -> Tensor | None:
        """What third cumulants add to Cov(g(y_i), x_j), beyond the slope E[g'] of the edge.

        T(y_i, y_i, x_j) g_2(i) / 2; of two activations of one depth, all orders.
        """
        assert isinstance(other, ThirdCumulant)
        if not self.edges:
            return None
        # The second order of two of one depth is in the Gaussian part already.
        without = other.own if parallel(self, other) else None
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
        if other.known is None or not parallel(self, other):
            slices = y.slices(other, without=without)
            if slices is None:
                return None
            rows = known.inverse.to(slices)[..., :, None]
            factor = (known.derivatives.first[2] / 2).to(slices)[..., :, None]
            return factor * rows * (rows * slices)
        w = other.edges[0][0]
        assert isinstance(w, ThirdCumulant)
        cross = y.cross(w)
        if cross is None or not (y.blocks or w.blocks):
            return None
        rows = known.inverse.to(cross)[..., :, None]
        columns = other.known.inverse.to(cross)[..., None, :]
        left, right, zero = y.slices(w), w.slices(y), torch.zeros_like(cross)
        pairs = Slices(
            zero if left is None else left * rows * rows * columns,
            zero if right is None else right.mT * rows * columns * columns,
            (known.skewness, other.known.skewness),
        )
        rho = correlation(cross, rows, columns)
        return pairs.correction(rho, known.derivatives.first, other.known.derivatives.first)

    def forget(self) -> None:
        """Cut the edges to what it came from; its blocks stay."""
        super().forget()
        self.known = None

    @classmethod
    def collect(cls, held: set[Carrier], others: Iterable[Carrier]) -> None:
        """As of covariances; arguments of origins are kept for vectors that have no block."""
        del others
        nodes = {carrier for carrier in held if isinstance(carrier, ThirdCumulant)}
        living = [node for node in nodes if not node.covariance.constant]
        bases = dict[Any, None]()
        for origin in dict.fromkeys(origin for node in living for origin in node.blocks):
            base = origin.base
            if base is None:
                continue
            if any(
                origin not in node.blocks and not base.roots.isdisjoint(node.roots)
                for node in living
            ):
                bases[base] = None
            else:
                origin.base = None
        release(nodes, [*living, *(base for base in bases if base not in nodes)])
