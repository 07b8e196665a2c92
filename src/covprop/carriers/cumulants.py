"""The full covariance of every tensor, and its third cumulant in factors: what operations do to it.

`ThirdCumulant` has the factors; the formulas are those of `covprop.kernels.edgeworth`.
"""

import weakref
from typing import Self, final

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.activations.powers import ExpectedDerivatives, expected_derivatives
from covprop.carriers.activation_origin import ActivationOrigin
from covprop.carriers.full import Full
from covprop.carriers.origins import (
    Blocks,
    DropoutOrigin,
    Nonlinearity,
    ProductOrigin,
    Vertex,
    block_of,
    moved,
    product_factors,
)
from covprop.carriers.third_cumulant import ThirdCumulant
from covprop.covariance import Covariance, Dense, Diagonal, LinearMap
from covprop.covariance.base import symmetric
from covprop.covariance.semidefinite import nearest_semidefinite
from covprop.errors import InconsistentBranches, name_of
from covprop.flow.algebra import Contraction, Groups, Recurrence
from covprop.flow.carrier import Carrier, DiagonalTransfer, Moments, RandomLinear
from covprop.flow.lineage import Transfer
from covprop.kernels.edgeworth import (
    Coefficients,
    Fourth,
    Marginals,
    Tree,
    of_one_vector,
    product_loops,
    with_diagonal,
)
from covprop.kernels.normal import correlation, inverse_deviation

ORDER = 9
"""Expected derivatives that are used: sums over powers of the correlation have six terms."""
LEAST_VARIANCE, LARGEST_VARIANCE = 0.1, 10.0
"""Multiples of a Gaussian variance below and above which third cumulants are not to be trusted."""
SMALL_SHARE = 0.01
"""The share of all variances of a layer below which units are not worth a warning."""
LARGEST_SKEWNESS = 4.0
"""The skewness of an argument, times the share of the deviation that is not linear, beyond which
the expansion is not to be trusted."""
LARGE_KURTOSIS, LARGE_AVERAGE = 0.8, 0.25
"""The square of the kurtosis, times the same share, at which fourth cumulants count by half; and
the kurtosis times that share beyond which, on average over variances, a note says so."""
LARGE_FOURTH = (
    "{} lets fourth cumulants count little, as they are too large here for the expansion; compare "
    "with samples, or use smaller noise"
)
FALLBACK = (
    "{} takes some of its input as Gaussian, as third cumulants are too large here for their "
    "expansion; compare with samples, or use smaller noise"
)
INDEFINITE = (
    "third cumulants are an expansion: eigenvalues of the covariance down to -{:.1e} of the "
    "largest were set to zero"
)
INDEFINITE_PART, BROKEN_PART = 0.01, 0.2
"""Parts of the largest eigenvalue of the correlations from which a negative one is worth a warning,
and from which the result is that of Gaussian layers: there the expansion has failed."""


@final
class Cumulants(ThirdCumulant):
    """A random vector that follows its skewness, to first order, from operation to operation."""

    def with_covariance(
        self, loc: Tensor, covariance: Covariance, transfer: Transfer | None
    ) -> Full:
        """By the transfer, without a block: what a rule gives so may be nonlinear."""
        made = super().with_covariance(loc, covariance, transfer)
        _incomplete(made)
        return made

    def linear(self, loc: Tensor, linear: LinearMap) -> Full:
        """A S A^T; of the Gaussian covariance where third cumulants are not to be trusted."""
        self._reserve(loc)
        covariance = self.covariance.push(linear)
        if self.gaussian is None:
            return self._linear(loc, linear, covariance)
        plain = self.gaussian.pushed_variances(linear)
        good = self._trusted("a linear map", covariance.diagonal(), plain, worth=0.0)
        if good is None:
            return self._linear(loc, linear, covariance)
        gaussian = self.gaussian.push(linear).matrix()
        matrix = torch.where(_both(good), covariance.matrix(), gaussian)
        return self._linear(loc, linear, Dense(matrix), good=good)

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
        result, plain, activated = self._activated(activation, mean)
        variance = self.variances().double()
        derivatives = expected_derivatives(activation, mean.double(), variance, ORDER)
        inverse, slices = inverse_deviation(variance), self.slices(self)
        skewness = kurtosis = weight = torch.zeros_like(variance)
        good = fourth = None
        marginals = Marginals.of(*derivatives, skewness, kurtosis)
        if slices is not None:
            rows = inverse.to(slices)
            skewness = (slices.diagonal(dim1=-2, dim2=-1) * rows.square() * rows).double()
            name = name_of(getattr(activation, "function", type(activation)))
            fourth = self.fourth(inverse, self, inverse)
            if fourth is not None:
                kurtosis = fourth.kurtosis().double()
                weight = self._weight(name, kurtosis, derivatives)
                kurtosis = torch.where(weight > 0, weight.square() * kurtosis, 0)
            marginals = Marginals.of(*derivatives, skewness, kurtosis)
            share = skewness.detach() * derivatives.curvature()
            limits = torch.finfo(slices.dtype)  # below, sigma^3 has few digits, or none
            share = torch.where(variance**1.5 < limits.tiny / limits.eps, torch.inf, share)
            good = self._trusted(name, marginals.variance, plain.diagonal(), share)
            if good is not None:
                slices = torch.where(_both(good), slices, 0)
                skewness, kurtosis, weight = (
                    torch.where(good, k, 0) for k in (skewness, kurtosis, weight)
                )
                marginals = Marginals.of(*derivatives, skewness, kurtosis)
                corrected = torch.where(good, marginals.variance, plain.diagonal())
                marginals = marginals._replace(variance=corrected)
        slope = activated.coefficients(1)[0]
        if slices is not None:
            first = derivatives.first
            slope = slope + (skewness * first[4] / 6 + kurtosis * first[5] / 24) * inverse
        trusted = torch.ones_like(variance, dtype=torch.bool) if good is None else good
        known = Nonlinearity(
            derivatives, inverse, trusted, skewness, weight, kurtosis, slope, marginals
        )
        made = self._corrected(plain, activated, known, slices, good, fourth)
        made.fell_back = good is not None
        return result + marginals.shift.to(result), made

    def _weight(self, operation: str, kurtosis: Tensor, derivatives: ExpectedDerivatives) -> Tensor:
        """By which fourth cumulants count: of one element, so that it matters not what is beside.

        Those of pairs have the weights of both; that of K_iiii is 1 / (1 + share^2).
        """
        share = (kurtosis.square() / LARGE_KURTOSIS).square() * derivatives.curved_share()
        large = kurtosis.detach().abs() * derivatives.curvature() - LARGE_AVERAGE
        if bool(((large * derivatives.second[0]).sum(-1) > 0).any()):
            self.lineage.note(LARGE_FOURTH.format(operation), warn=False)
        return (1 / (1 + share)).nan_to_num(0).sqrt()

    def _corrected(
        self,
        covariance: Covariance,
        activated: Activated,
        known: Nonlinearity,
        slices: Tensor | None,
        good: Tensor | None,
        fourth: Fourth | None,
    ) -> "Cumulants":
        """An activation, given the covariance of a Gaussian's, and slices of its argument."""
        derivatives, marginals, slope = known.derivatives, known.marginals, known.slope
        matrix, gaussian = self.covariance.matrix(), None if slices is None else covariance
        rows = known.inverse.to(matrix)[..., :, None]
        units = None if slices is None else slices * rows * rows * rows.mT
        rho = correlation(matrix, rows, rows.mT)
        f, square = (Coefficients.of(values, rho) for values in derivatives[:2])
        weight = known.weight
        fourth = None if units is None or fourth is None else fourth.weighted(weight, weight)
        added, kappa = of_one_vector(rho, units, fourth, known.marginal, f, square)
        if added is not None:
            if self.covariance.independent:
                covariance = Diagonal(marginals.variance.to(matrix))
            else:
                value = covariance.matrix() + added
                covariance = Dense(with_diagonal(value, marginals.variance))
            kappa = kappa - 2 * marginals.shift.to(matrix)[..., :, None] * covariance.matrix()
        blocks, factor = self.blocks, slope.to(matrix)
        factor = factor if good is None else torch.where(good, factor, 0)
        curved, own_origin = derivatives.nonlinear(matrix.dtype), None
        columns = curved.reshape(-1, self.size).any(0).nonzero()[:, 0]
        if len(columns):
            every, mask = bool(curved.all()), curved[..., :, None]
            right = None if slices is None else slices.mT
            tree = Tree.of(known.bent, known.bent, matrix, slices, right)
            if not every:
                tree = Tree(*(torch.where(mask, factor, 0) for factor in tree))
            have = tree.slices()
            if slices is not None:
                d = slope.to(matrix)
                have = have + d.square()[..., :, None] * d[..., None, :] * slices
            own = (marginals.third.to(matrix) - have.diagonal(dim1=-2, dim2=-1)) / 3
            parts: tuple[Tensor, ...] = (_unit(matrix), *tree, with_diagonal(kappa - have, own))
            if (
                not every
            ):  # zero for elements of the batch where it is linear, as if each came by itself
                parts = tuple(torch.where(mask, p, 0).index_select(-2, columns) for p in parts)
            w, q = (t.diagonal(dim1=-2, dim2=-1)[..., columns] for t in tree)
            own_origin = ActivationOrigin(
                self,
                columns,
                known.take(columns),
                (w, q),
                self._vertex(columns, known, rho),
                self.depth + 1,
            )
            self.lineage.origins.append(weakref.ref(own_origin))
            blocks = blocks.extended(factor, own_origin, parts)
        elif blocks.tensor is not None:
            blocks = Blocks(blocks.origins, moved(blocks.tensor, DiagonalTransfer(factor)))
        made = self._new(
            covariance,
            ((self, DiagonalTransfer(slope)),),
            activated=activated,
            blocks=blocks,
            gaussian=gaussian,
            known=known,
            own=own_origin,
            good=good,
        )
        assert isinstance(made, Cumulants)
        if own_origin is not None:
            own_origin.result = weakref.ref(made)
        return made

    def _vertex(self, columns: Tensor, known: Nonlinearity, rho: Tensor) -> Vertex | None:
        """Of some elements of an activation of this vector; None behind what has no vertices."""
        if any(origin.vertex is None for origin in self.origins):
            return None
        some, f = known.take(columns), known.derivatives.first[..., columns]
        over = some.inverse.to(rho)[..., None, :]
        older = {
            origin: block[..., 1, :, :].index_select(-1, columns) * over
            for origin, block in self.blocks.parts().items()
        }
        living = [origin for ref in self.lineage.origins if (origin := ref()) is not None]
        for origin in living:  # those of branches beside it
            if origin not in older and (cross := self._met(origin)) is not None:
                older[origin] = cross.index_select(-1, columns) * over
        own = rho.index_select(-1, columns).index_select(-2, columns)
        second = f[2] + some.skewness * f[5] / 6
        return Vertex(second, f[3], own, older, self.roots)

    def _met(self, origin: ActivationOrigin) -> Tensor | None:
        """Its w in the block of an origin beside it."""
        if not self.is_deeper(origin):
            return origin.correlation(self)
        share = self.share(origin)
        return None if share is None else share[..., 1, :, :]

    def product(
        self, other: Self, contraction: Contraction, mean: Tensor, other_mean: Tensor
    ) -> tuple[Tensor, "Full"]:
        """Isserlis' terms; of vectors also what third cumulants add, and a block of its own."""
        centre, made = Full.product(self, other, contraction, mean, other_mean)
        self.note_partly(other)
        if not contraction.is_elementwise:
            _incomplete(made)
            return centre, made
        assert isinstance(made, Cumulants)
        parts = (
            None if slices is None else factor[..., :, None] * slices.mT
            for factor, slices in (
                (mean, self.slices(other, other)), (other_mean, self.slices(self, other))
            )
        )  # fmt: skip
        value = plain = made.covariance.matrix()
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
            self.cross(made), other.cross(made), with_diagonal(loops, own), _unit(u)
        )
        if block is not None:
            made.own = ProductOrigin(self, other, made.depth)
            made.add_block(made.own, block)
        return centre, made

    def recurrent(self, mean: Tensor, recurrence: Recurrence) -> None:
        """Step by step: what a step makes of third cumulants, all later ones meet."""
        del mean, recurrence

    def dropout(self, loc: Tensor, mean: Tensor, ratio: float, groups: Tensor | None) -> "Full":
        """Independent noise; that of single elements has a third cumulant of its own."""
        made = super().dropout(loc, mean, ratio, groups)
        assert isinstance(made, Cumulants)
        if groups is not None:
            made.complete = False
            return made
        variance, third = self.variances(), self.third_moments()
        origin = DropoutOrigin(self, mean, ratio)
        # The mask b has E b = 1, Var b = ratio and third central moment ratio (ratio - 1).
        cube = mean**3 + 3 * mean * variance + third
        own = ratio * (ratio - 1) * cube + 3 * ratio * (2 * mean * variance + third)
        rest = with_diagonal(origin.slices(self, self), own / 3)
        made.add_block(origin, block_of(_unit(rest), None, None, rest))
        return made

    def normalized(self, groups: Groups, mean: Tensor, weight: Tensor) -> Moments:
        """By the expected slope, without a block."""
        self.note_partly()
        moments = super().normalized(groups, mean, weight)
        _incomplete(moments.carrier)
        return moments

    def lengths(self, loc: Tensor, groups: Groups, mean: Tensor, factor: float) -> Moments:
        """By the expected slope, without a block."""
        self.note_partly()
        moments = super().lengths(loc, groups, mean, factor)
        _incomplete(moments.carrier)
        return moments

    def random_linear(self, loc: Tensor, mean: Tensor, layer: RandomLinear) -> Full:
        """By the mean weights, without a block."""
        made = super().random_linear(loc, mean, layer)
        _incomplete(made)
        return made

    def finish(self, loc: Tensor) -> Covariance:
        """Positive semi-definite, with the same variances; refused if it is far from that."""
        if self.fell_back:
            self.lineage.note(FALLBACK.format("the last activation"))
        covariance = super().finish(loc)
        if covariance.independent:
            return covariance
        matrix, lowest = nearest_semidefinite(covariance.matrix())
        if lowest == 0:
            return covariance
        if -lowest > BROKEN_PART:
            raise _broken(covariance.matrix())
        self.lineage.note(INDEFINITE.format(-lowest), warn=-lowest > INDEFINITE_PART)
        return Dense(matrix)


def _broken(matrix: Tensor) -> InconsistentBranches:
    """What says which elements of the batch have a direction of a large negative variance."""
    rows = inverse_deviation(matrix.diagonal(dim1=-2, dim2=-1))[..., :, None]
    eigenvalues = torch.linalg.eigvalsh(correlation(matrix, rows, rows.mT).detach())
    return InconsistentBranches(
        "the correlations of the result have a large negative eigenvalue; use smaller noise, or "
        "sampling",
        eigenvalues[..., 0] < -BROKEN_PART * eigenvalues[..., -1],
    )


def _incomplete(made: Carrier) -> None:
    """Say of a result that its third cumulant lacks what the operation made."""
    assert isinstance(made, Cumulants)
    made.complete = False


def _both(good: Tensor) -> Tensor:
    """Pairs of elements (*batch, n, n) of which both are good."""
    return good[..., :, None] & good[..., None, :]


def _unit(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
