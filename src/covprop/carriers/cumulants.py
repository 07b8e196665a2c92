"""The full covariance of every tensor, and its third cumulant in factors.

Every nonlinear operation makes a block: a column for each element i that it bends,

    T = 1/2 sum over the 6 orders of ( e_i x w_i x q_i  +  r_i x e_i x e_i ),

the tree that is centred at i, and what the slices T_iij have beside it. A linear map takes factors
as it takes vectors, so the sum keeps its form; docs/mathematics.md has the derivation.
"""

from collections.abc import Iterable
from typing import Any, Self, final

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.activations.powers import ExpectedDerivatives, expected_derivatives
from covprop.carriers.cross_covariance import SecondOrder, Treatment, parallel, release
from covprop.carriers.full import Full
from covprop.carriers.origins import (
    ActivationOrigin,
    DropoutOrigin,
    InputOrigin,
    Nonlinearity,
    Origin,
    ProductOrigin,
    product_factors,
)
from covprop.covariance import Covariance, Dense, Diagonal, LinearMap
from covprop.covariance.base import symmetric
from covprop.covariance.semidefinite import nearest_semidefinite
from covprop.errors import name_of
from covprop.flow.algebra import Contraction
from covprop.flow.carrier import Carrier, Scaled, Transfer
from covprop.flow.lineage import Lineage
from covprop.kernels.edgeworth import (
    Marginals,
    Slices,
    Tree,
    pair_sum,
    product_loops,
    with_diagonal,
)
from covprop.kernels.normal import correlation, inverse_deviation

ORDER = 9
"""Expected derivatives that are used: sums over powers of the correlation have six terms."""
FACTORS = 4
"""Tensors of a block: e, w, q and r."""
LEAST_VARIANCE, LARGEST_VARIANCE = 0.1, 10.0
"""Multiples of a Gaussian variance below and above which third cumulants are not to be trusted."""
SMALL_SHARE = 0.01
"""The share of all variances of a layer below which units are not worth a warning."""
LARGEST_SKEWNESS = 4.0
"""The skewness of an argument, times the share of the deviation that is not linear, beyond which
the expansion is not to be trusted."""
FALLBACK = (
    "{} takes some of its input as Gaussian, as third cumulants are too large here for their "
    "expansion; compare with samples, or use smaller noise"
)
INDEFINITE = (
    "third cumulants are an expansion: eigenvalues of the covariance down to -{:.1e} of the "
    "largest were set to zero"
)
INDEFINITE_PART = 0.01
"""The part of the largest eigenvalue from which a negative one is worth a warning."""


@final
class Cumulants(Full):
    """A covariance structure, and blocks of factors of the third cumulant by their origin.

    A block is one tensor (*batch, n, 4 r): the columns of e, w, q and r side by side. gaussian: the
    covariance that an activation would have of a Gaussian argument; known: the numbers of the
    activation that made it; roots: the inputs that it came of.
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
    ) -> None:
        super().__init__(covariance, lineage, treatment, edges, activated, products, opaque)
        roots = (parent.roots for parent, _ in self._parents())
        self.roots: frozenset[int] = frozenset[int]().union(*roots) or frozenset((self.serial,))
        self.gaussian, self.known = gaussian, known
        self._beside: dict[Origin, Tensor | None] = {}
        self.blocks = self._moved() if blocks is None else blocks

    @classmethod
    def of_input(
        cls, covariance: Covariance, third: Tensor | None, lineage: Lineage, treatment: Treatment
    ) -> "Cumulants":
        """An input whose elements are independent where they have third moments (*batch, n)."""
        blocks: dict[Origin, Tensor] = {}
        if third is not None:
            unit = torch.eye(covariance.size, dtype=third.dtype, device=third.device)
            unit = unit.expand(*third.shape, covariance.size)
            nothing = torch.zeros_like(unit)
            parts = unit, nothing, nothing, torch.diag_embed(third / 3)
            blocks[InputOrigin()] = torch.cat(parts, dim=-1)
        return cls(covariance, lineage, treatment, blocks=blocks)

    def _parents(self) -> list[tuple["Cumulants", Transfer]]:
        return [(parent, edge) for parent, edge in self.edges if isinstance(parent, Cumulants)]

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
            apart = y is None or y.roots.isdisjoint(self.roots)
            self._beside[origin] = None if y is None or apart else origin.beside(y, self)
        return self._beside[origin]

    def slices(self, other: "Cumulants", partner: "Cumulants | None" = None) -> Tensor | None:
        """T(x_i, y_i, z_j) of this x, its partner y (x itself if None) and another z.

        Shape (*batch, n, m); None if it is zero.
        """
        y = self if partner is None else partner
        total: Tensor | None = None
        for origin in dict.fromkeys((*self.blocks, *y.blocks, *other.blocks)):
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

    def beyond_gaussian(self, other: Carrier) -> Tensor | None:
        """What third cumulants add to Cov(g(y_i), x_j), beyond the slope E[g'] of the edge.

        T(y_i, y_i, x_j) g_2(i) / 2; of two activations of one depth, all orders.
        """
        assert isinstance(other, Cumulants)
        if self.known is None or not self.edges:
            return None
        y = self.edges[0][0]
        assert isinstance(y, Cumulants)
        if other.known is None or not parallel(self, other):
            slices = y.slices(other)
            if slices is None:
                return None
            factor = self.known.derivatives.first[2] * self.known.inverse.square() / 2
            return factor.to(slices)[..., :, None] * slices
        w = other.edges[0][0]
        assert isinstance(w, Cumulants)
        cross = y.cross(w)
        if cross is None or not (y.blocks or w.blocks):
            return None
        rows = self.known.inverse.to(cross)[..., :, None]
        columns = other.known.inverse.to(cross)[..., None, :]
        left, right, zero = y.slices(w), w.slices(y), torch.zeros_like(cross)
        pairs = Slices(
            zero if left is None else left * rows.square() * columns,
            zero if right is None else right.mT * rows * columns.square(),
            (self.known.skewness, other.known.skewness),
        )
        rho = correlation(cross, rows, columns)
        return pairs.correction(rho, self.known.derivatives.first, other.known.derivatives.first)

    # Operations.

    def linear(self, loc: Tensor, linear: LinearMap) -> Full:
        """A S A^T; of the Gaussian covariance where third cumulants are not to be trusted."""
        self._expect(loc)
        covariance = self.covariance.push(linear)
        if self.gaussian is None:
            return self._linear(loc, linear, covariance)
        plain = self.gaussian.push(linear)
        good = self._trusted("a linear map", covariance.diagonal(), plain.diagonal(), worth=0.0)
        if good is None:
            return self._linear(loc, linear, covariance)
        matrix = torch.where(_both(good), covariance.matrix(), plain.matrix())
        made = self._linear(loc, linear, Dense(matrix))
        assert isinstance(made, Cumulants)
        made.blocks = _rows(made.blocks, good)
        return made

    def _trusted(
        self,
        operation: str,
        variance: Tensor,
        plain: Tensor,
        skewness: Tensor | None = None,
        worth: float = SMALL_SHARE,
    ) -> Tensor | None:
        """Elements of a result for which third cumulants are to be trusted, None for all.

        variance, plain: of the result, with and without them; skewness: of the argument, times the
        share of the deviation that is not linear; worth: the share of all variances that the others
        may have without a note.
        """
        variance, plain = variance.detach(), plain.detach()
        bad = (variance < LEAST_VARIANCE * plain) | (variance > LARGEST_VARIANCE * plain)
        if skewness is not None:
            bad |= skewness.abs() > LARGEST_SKEWNESS
        bad &= plain > 0
        if not bool(bad.any()):
            return None
        share = torch.where(bad, plain, 0).sum(-1) / plain.sum(-1)
        if bool((share > worth).any()):
            self.lineage.note(FALLBACK.format(operation))
        return ~bad

    def activation(self, activation: Activation, mean: Tensor) -> tuple[Tensor, "Full"]:
        """Moments of a Gaussian, what the third cumulant adds to them, and a block of its own."""
        result, plain = super().activation(activation, mean)
        variance = self.variances().double()
        derivatives = expected_derivatives(activation, mean.double(), variance, ORDER)
        slices = self.slices(self)
        made, known = self._corrected(plain, derivatives, variance, slices, self.blocks)
        if slices is not None:
            name = name_of(getattr(activation, "function", type(activation)))
            skewness = known.skewness.detach() * derivatives.curvature()
            good = self._trusted(name, made.variances(), plain.variances(), skewness)
            if good is not None:
                del made
                slices, blocks = torch.where(_both(good), slices, 0), _rows(self.blocks, good)
                made, known = self._corrected(plain, derivatives, variance, slices, blocks)
        return result + known.marginals.shift.to(result), made

    def _corrected(
        self,
        plain: Full,
        derivatives: ExpectedDerivatives,
        variance: Tensor,
        slices: Tensor | None,
        before: dict[Origin, Tensor],
    ) -> tuple[Full, Nonlinearity]:
        """An activation, given that of a Gaussian, and the slices and blocks of its argument."""
        assert plain.activated is not None
        f, square, cube = derivatives
        matrix, inverse = self.covariance.matrix(), inverse_deviation(variance)
        rows = inverse.to(matrix)[..., :, None]
        rho = correlation(matrix, rows, rows.mT)
        slope, covariance = plain.activated.coefficients(1)[0], plain.covariance
        skewness, scaled = torch.zeros_like(variance), None
        if slices is not None:
            units = slices * rows.square() * rows.mT
            skewness = units.diagonal(dim1=-2, dim2=-1).double()
            scaled = Slices(units, units.mT, (skewness, skewness))
            slope = slope + skewness * f[4] / 6 * inverse
        marginals = Marginals.of(f, square, cube, skewness)
        kappa = pair_sum(rho, square, f, 0, 0, start=1)
        if scaled is not None:
            if self.covariance.independent:
                covariance = Diagonal(marginals.variance.to(matrix))
            else:
                value = symmetric(covariance.matrix() + scaled.correction(rho, f, f))
                covariance = Dense(with_diagonal(value, marginals.variance))
            kappa = kappa + scaled.correction(rho, square, f)
            kappa = kappa - 2 * marginals.shift.to(matrix)[..., :, None] * covariance.matrix()
        known = Nonlinearity(derivatives, inverse, skewness, slope, marginals)
        transfer = Scaled(slope)
        blocks = {origin: transfer(block) for origin, block in before.items()}
        columns = derivatives.nonlinear(matrix.dtype)
        if len(columns):
            has_column = torch.zeros_like(matrix[..., :1, :]).index_fill(-1, columns, 1)
            tree = Tree.of(f, slope, inverse, matrix, slices, skewness)
            tree = Tree(*(factor * has_column for factor in tree))
            have = tree.slices()
            if slices is not None:
                d = slope.to(matrix)
                have = have + d.square()[..., :, None] * d[..., None, :] * slices
            own = (marginals.third.to(matrix) - have.diagonal(dim1=-2, dim2=-1)) / 3
            parts = (_unit(matrix), *tree, with_diagonal(kappa - have, own).mT)
            block = torch.cat([part.index_select(-1, columns) for part in parts], dim=-1)
            w, q = (t.diagonal(dim1=-2, dim2=-1)[..., columns] for t in tree)
            blocks[ActivationOrigin(self, columns, known.take(columns), (w, q))] = block
        options = {"activated": plain.activated, "blocks": blocks, "known": known}
        gaussian = None if slices is None else plain.covariance
        return self._new(covariance, ((self, transfer),), gaussian=gaussian, **options), known

    def product(
        self, other: Self, contraction: Contraction, mean: Tensor, other_mean: Tensor
    ) -> tuple[Tensor, "Full"]:
        """Isserlis' terms; of vectors also what third cumulants add, and a block of its own."""
        centre, made = Full.product(self, other, contraction, mean, other_mean)
        if not contraction.is_elementwise:
            return centre, made
        assert isinstance(made, Cumulants)
        parts = (
            None if slices is None else factor[..., :, None] * slices.mT
            for factor, slices in (
                (mean, self.slices(other, other)), (other_mean, self.slices(self, other))
            )
        )  # fmt: skip
        plain = made.covariance.matrix()
        value = plain
        for part in parts:
            if part is not None:
                value = value + (part + part.mT)
        if value is not plain:
            variance, gaussian = (m.diagonal(dim1=-2, dim2=-1) for m in (value, plain))
            good = self._trusted("a product", variance, gaussian)
            value = value if good is None else torch.where(_both(good), value, plain)
            made.structure = Dense(symmetric(value))
        u, v, cross = self.covariance.matrix(), other.covariance.matrix(), self.cross(other)
        loops = product_loops(u, v, torch.zeros_like(u) if cross is None else cross)
        own = loops.diagonal(dim1=-2, dim2=-1) / 3
        block = product_factors(
            self.cross(made), other.cross(made), with_diagonal(loops, own).mT, _unit(u)
        )
        if block is not None:
            made.blocks[ProductOrigin(self, other)] = block
        return centre, made

    def dropout(self, loc: Tensor, mean: Tensor, ratio: float, groups: Tensor | None) -> "Full":
        """Independent noise; that of single elements has a third cumulant of its own."""
        made = super().dropout(loc, mean, ratio, groups)
        if groups is not None:
            return made
        assert isinstance(made, Cumulants)
        variance, third = self.variances(), self.third_moments()
        origin = DropoutOrigin(self, mean, ratio)
        # The mask b has E b = 1, Var b = ratio and third central moment ratio (ratio - 1).
        cube = mean**3 + 3 * mean * variance + third
        own = ratio * (ratio - 1) * cube + 3 * ratio * (2 * mean * variance + third)
        rest = with_diagonal(origin.slices(self, self), own / 3).mT
        nothing = torch.zeros_like(rest)
        made.blocks[origin] = torch.cat([_unit(rest), nothing, nothing, rest], dim=-1)
        return made

    def finish(self, loc: Tensor) -> Covariance:
        """Positive semi-definite, which an expansion need not be; variances stay."""
        covariance = super().finish(loc)
        if covariance.independent:
            return covariance
        matrix, lowest = nearest_semidefinite(covariance.matrix())
        if lowest == 0:
            return covariance
        self.lineage.note(INDEFINITE.format(-lowest), warn=-lowest > INDEFINITE_PART)
        return Dense(matrix)

    def forget(self) -> None:
        """Cut the edges to what it came from; its blocks stay."""
        super().forget()
        self.known = None

    @classmethod
    def collect(cls, held: set[Carrier], others: Iterable[Carrier]) -> None:
        """As of covariances; arguments of origins are kept for vectors that have no block."""
        del others
        nodes = {carrier for carrier in held if isinstance(carrier, Cumulants)}
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


def _both(good: Tensor) -> Tensor:
    """Pairs of elements (*batch, n, n) of which both are good."""
    return good[..., :, None] & good[..., None, :]


def _rows(blocks: dict[Origin, Tensor], good: Tensor) -> dict[Origin, Tensor]:
    """Blocks without the rows of other elements."""
    return {origin: torch.where(good[..., None], b, 0) for origin, b in blocks.items()}


def _unit(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
