"""Random tangents in place of covariances: for layers too wide for a matrix."""

import itertools
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.covariance import Covariance, Diagonal, LowRank, Sketch, Zero
from covprop.covariance.innovation import Innovation, random_signs
from covprop.covariance.roots import square_root
from covprop.covariance.sketch import Product, SharedSigns, random_products
from covprop.errors import UnsupportedOperation
from covprop.kernels.normal import inverse_deviation, standard_deviation
from covprop.methods.base import LayerwiseMethod, Replacements

ORDERS = (1, 2)
WIDENED = 6
"""|xi|^2 of the points where functions of few directions are looked at is so much larger than that
of normal numbers, as |xi|^6 is what the square of the third order asks for."""
ROUNDED = 16 * torch.finfo(torch.float64).eps
"""What a difference of a few numbers is of them where it is rounding alone."""
BLOCK = 2**15
"""Elements whose moments are found at a time."""
NUMBERS = itertools.count()
"""Names of inputs, in the order in which they begin: two may share one covariance."""
QUARTERS = 4
"""Into which tangents are divided: halves for the outputs, halves of these for the tangents."""


@final
@dataclass(frozen=True)
class Sketched(LayerwiseMethod):
    """The covariance of the outputs as a sum of what enters on the way, without any matrix.

    Sigma_out = J_0 Sigma_x J_0^T + sum_l J_l R_l J_l^T, J the expected Jacobians from the input and
    from every nonlinearity l to the outputs, R_l = Sigma_z - D Sigma_y D what it adds. Variances of
    hidden units come from random tangents that carry the noise forward. Memory and time are linear
    in the number of units. An estimate: `mean_stderr` and `covariance_stderr` tell how far it may
    be off for want of tangents. No gradients. docs/large.md has formulas and measured errors.

    tangents: how many in all; order: 1 keeps the variances of R_l alone, 2 also what its second
    order has between units, and with that of others of its depth; generator: where random numbers
    come from (torch's global one by default); outputs: an index of the flattened output, if only
    some are wanted; replicates: independent runs, each with its share of the tangents, whose spread
    tells the standard errors (1 tells none); exact: how many directions of an input are carried
    exactly rather than by chance, as many as tangents by default; memory: bytes that may be used
    beside the model, half of what is free by default; activations: what to use in place of declared
    activations, by torch function.
    """

    tangents: int = 64
    order: int = 2
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)
    outputs: Any = field(default=None, kw_only=True, hash=False)
    replicates: int = field(default=4, kw_only=True)
    exact: int | None = field(default=None, kw_only=True)
    memory: int | None = field(default=None, kw_only=True)
    activations: Replacements = field(default_factory=dict, hash=False, kw_only=True)
    independent_maxima: bool = field(default=False, init=False)
    kept: int | None = field(default=None, init=False, repr=False)
    """Tangents that each nonlinearity remembers, if not all."""
    signs: SharedSigns = field(default_factory=SharedSigns, init=False, repr=False, compare=False)
    """What random directions of a run have in common."""

    returns: ClassVar[bool] = True

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
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(
                "generator is a torch.Generator, as torch.Generator().manual_seed(0) gives, not "
                f"{self.generator!r}"
            )

    @property
    def directions(self) -> int:
        """How many directions of an input are carried exactly at most."""
        return self.tangents if self.exact is None else self.exact

    @property
    def remembers(self) -> bool:
        """Tangents before a nonlinearity tell its second order."""
        return self.order > 1

    def replicate(self, kept: int | None = None) -> "Sketched":
        """One of the independent runs."""
        one = replace(
            self, tangents=self.tangents // self.replicates, replicates=1, exact=self.directions
        )
        object.__setattr__(one, "kept", kept)
        return one

    def begun(self) -> "Sketched":
        """The same, with random signs of its own."""
        one = copy(self)
        object.__setattr__(one, "signs", SharedSigns())
        return one

    def seeded(self, device: torch.device) -> "Sketched":
        """The same with a generator of its own, if it has none, seeded by torch's global one.

        What the global one is asked for then is what the model draws.
        """
        if self.generator is not None:
            return self
        seed = int(torch.randint(2**62, ()))
        one = replace(self, generator=torch.Generator(device).manual_seed(seed))
        object.__setattr__(one, "kept", self.kept)
        return one

    def brief(self) -> "Sketched":
        """A run for expected Jacobians alone, which remembers no tangents."""
        return replace(self.replicate(), order=1)

    def begin(self, covariance: Covariance) -> Sketch:
        """Directions that are few are kept; of others, random combinations."""
        count, size = self.tangents, covariance.size
        variance = covariance.diagonal()
        none = variance.new_zeros(*covariance.batch_shape, count, size)
        begun = Sketch(none, {}, self.generator, self.kept, covariance)
        if isinstance(covariance, Zero):
            return begun
        if isinstance(covariance, LowRank) and covariance.rank <= self.directions:
            begun = replace(begun, exact={next(NUMBERS): covariance.factor.mT})
            return begun if covariance.values is None else self._with(begun, covariance.values)
        if size <= self.directions:
            return replace(begun, exact={next(NUMBERS): square_root(covariance.matrix()).mT})
        if isinstance(covariance, Diagonal):
            return self._with(begun, covariance.values)
        root = covariance.root()
        shape = torch.Size((count, *covariance.batch_shape, root.width))
        draws = root.times(random_signs(shape, variance, self.generator)).movedim(0, -2)
        return replace(begun, tangents=draws / math.sqrt(count))

    def columns(self, covariance: Covariance) -> int:
        """Tangents, directions that are carried exactly, and with these those of higher orders."""
        known = covariance.rank if isinstance(covariance, LowRank) else covariance.size
        if known > self.directions:
            return self.tangents
        return known + self.tangents * (1 if self.order == 1 else 2)

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Exact moments of each unit; the tangents by E[g'], and what is left enters."""
        assert isinstance(covariance, Sketch)
        variance = covariance.diagonal()
        found = _moments(activation, mean, variance, covariance.uncertainty(), self.order)
        moved = replace(covariance.scale(found.slope), slope=found.slope)
        left = (found.carried - found.second.square()).clamp(min=0)
        if self.order == 1:
            return found.mean, moved.innovated(Innovation(found.seen, left=left))
        # In units of the deviations: a_2 / sigma^2 overflows where hardly anything varies.
        scaled = covariance.scale(inverse_deviation(variance))
        product = Product(found.second, scaled, scaled)
        shared, layout = random_products([product], self.signs), product.layout()
        if not covariance.exact:
            innovation = Innovation(found.seen, (product.pairs(),), left=left, layout=layout)
            return found.mean, moved.innovated(innovation, shared)
        # Few directions: there is hardly any chance in what is above, and what is beyond the second
        # order counts. Outputs see random directions of it, whose diagonal is known already.
        higher = _beyond_second(activation, mean, variance, scaled)
        seen = found.seen - higher.square().sum(-2)
        columns = _first(higher, self.kept)
        higher = higher * random_signs(higher[..., :1].shape, higher, self.generator)
        higher, left = _within(higher, left)
        innovation = Innovation(seen, (product.pairs(),), columns, left, layout)
        return found.mean, moved.innovated(innovation, shared + higher)

    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """There are no covariances between two tensors: tangents have their dependence."""
        del left, right, covariance
        raise UnsupportedOperation(
            "cp.Sketched has no covariance of two tensors on the way; use cp.Exact()"
        )

    def _with(self, begun: Sketch, variance: Tensor) -> Sketch:
        """Independent noise in the tangents, which the covariance of the input tells of."""
        return replace(begun.plus(variance), entry=begun.entry)


class _Moments(NamedTuple):
    """E[g], E[g'], a_2 (or zeros), and R_ii twice.

    seen: Var(g) - E[g']^2 sigma^2 for the outputs, less sigma^2 Var(D) for D that is E[g'] and an
    error, as outputs see the square of D; carried: Var(g) - D^2 v, so that tangents have Var(g).
    """

    mean: Tensor
    slope: Tensor
    second: Tensor
    seen: Tensor
    carried: Tensor


def _moments(
    activation: Activation, mean: Tensor, variance: Tensor, uncertainty: Tensor, order: int
) -> _Moments:
    """Moments in float64 until the last; few elements at a time, which stay in cache.

    A variance v that is known to +- s would bias what is not linear in it, in every run and layer
    the same way, by s^2 h''(v) / 2; that is taken away (`_unbiased`).
    """
    found = []
    for part in _blocks(activation, mean):
        point, spread, error = (t[..., part].double() for t in (mean, variance, uncertainty))
        error = torch.minimum(error, spread)
        three = [
            _at(activation, point, each, order) for each in (spread, spread + error, spread - error)
        ]
        found.append([one.to(mean.dtype) for one in _known(spread, *three)])
    result, *others = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
    return _Moments(result, *map(_without_dust, others))


def _known(
    variance: Tensor, here: Sequence[Tensor], above: Sequence[Tensor], below: Sequence[Tensor]
) -> _Moments:
    """What moments at v, v + s and v - s say of those at the variance that v estimates."""
    each = zip(here, above, below, strict=True)
    mean, output, slope, rest, second = (_unbiased(*three) for three in each)
    doubt = (above[2] - below[2]).square() / 4  # of the slope
    seen = (rest - doubt * variance).clamp(min=0)
    carried = (output - slope.square() * variance).clamp(min=0)
    return _Moments(mean, slope, second, seen, carried)


def _unbiased(here: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """h(v) less the bias h(v +- s) - h(v) on average, for h at v, v + s and v - s.

    Where that is more than h itself, as in the tails, h^2 over the average: right for exponentials,
    and what is positive stays so.
    """
    average = (above + below) / 2
    share = here.abs() / average.abs().clamp(min=torch.finfo(here.dtype).tiny)
    bias = (average - here) * share.clamp(max=1)
    return torch.where(torch.isfinite(bias), here - bias, here)  # v + s may be too large alone


def _at(activation: Activation, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, ...]:
    """E[g], Var(g), E[g'], R_ii and a_2 where variances are known."""
    result, output, coefficients = activation.moments(mean, variance, order)
    rest = (output - coefficients[0].square() * variance).clamp(min=0)
    second = coefficients[order - 1] * standard_deviation(variance) * (order - 1)
    return result, output, coefficients[0], rest, second


def _beyond_second(
    activation: Activation, mean: Tensor, variance: Tensor, scaled: Sketch
) -> Tensor:
    """Random directions (*batch, q, n) with sum_{k>=3} a_k a_k^T o rho^k, all orders of it.

    Values of r(xi) = g(mu + sigma xi) - sum_{k<=2} a_k He_k(xi) / sqrt(k!), as E[r_i r_j] is that
    for normal xi_i, xi_j with the correlations rho of the sketch (Mehler).
    """
    points, weight = _points(scaled)
    xi = scaled.mixed(points.to(scaled.dtype), 0, scaled.count)
    parts = [
        _residual(activation, mean[..., part].double(), variance[..., part].double(), xi[..., part])
        for part in _blocks(activation, mean, scaled.count)
    ]
    return torch.cat(parts, -1) * weight.sqrt()[..., None].to(mean.dtype)


def _points(scaled: Sketch) -> tuple[Tensor, Tensor]:
    """Points (*batch, q, rows of the sketch), and weights (*batch, q): a normal distribution.

    Each coordinate has one point in each of q equally likely intervals (a Latin hypercube). Those
    of exact directions are drawn from a wider distribution and weighted for it: a mean over normal
    numbers would depend on whether a few of them are far out.
    """
    known = sum(rows.shape[-2] for rows in scaled.exact.values())
    shape = (*scaled.batch_shape, scaled.count, scaled.count + known)
    order, within = torch.rand(
        (2, *shape), dtype=torch.float64, device=scaled.device, generator=scaled.generator
    )
    points = torch.special.ndtri((order.argsort(-2) + within) / scaled.count)
    wide = 1 + WIDENED / max(1, known)  # the variance
    exact = points[..., scaled.count :].mul_(math.sqrt(wide))
    logarithm = known * math.log(wide) - exact.square().sum(-1) * (1 - 1 / wide)
    return points, (logarithm / 2).exp() / scaled.count


def _residual(activation: Activation, mean: Tensor, variance: Tensor, xi: Tensor) -> Tensor:
    """What g has beyond its second order at points (*batch, q, n), where rounding leaves any."""
    centre, _, coefficients = activation.moments(mean, variance, max(ORDERS))
    deviation = standard_deviation(variance)
    first, second = (coefficients * deviation)[..., None, :].unbind(0)
    here, points = mean[..., None, :], xi.double()
    there = here + deviation[..., None, :] * points
    value = torch.zeros_like(there)  # of g, but for a constant
    for factor, scalar in activation.scalars(mean, variance):
        rise = scalar(there.mT) - scalar(here.mT)  # (*batch, n, q)
        value += factor[..., None, :] * rise.mT
    shift = (centre - activation.mean(mean, torch.zeros_like(mean)))[..., None, :]
    result = value - shift - first * points - second * (points.square() - 1) / math.sqrt(2)
    size = centre[..., None, :].abs() + value.abs() + (first * points).abs()
    return torch.where(result.abs() > ROUNDED * size, result, 0).to(xi.dtype)


def _within(rows: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Directions that have no more than these variances (*batch, n), and what is left of them."""
    taken = rows.square().sum(-2)
    least = torch.minimum(taken, variance)
    share = least / torch.where(taken > 0, taken, 1)
    return rows * share.sqrt()[..., None, :], variance - least


def _first(rows: Tensor, kept: int | None) -> Tensor:
    """So many of random directions alone, which have what all have."""
    return rows if kept is None else rows[..., :kept, :] * math.sqrt(rows.shape[-2] / kept)


def _blocks(activation: Activation, mean: Tensor, rows: int = 1) -> list[slice]:
    """Features (*batch, n) that are treated at a time, if so many numbers of each are held."""
    size = mean.shape[-1]
    each = rows * max(1, mean.numel() // max(1, size))
    step = max(1, BLOCK // each) if activation.uniform else max(1, size)
    return [slice(start, start + step) for start in range(0, max(1, size), step)]


def _without_dust(values: Tensor) -> Tensor:
    """Zeros for what no sum with the largest would show: denormal numbers are slow."""
    least = torch.finfo(values.dtype).eps ** 2 * values.abs().amax(-1, keepdim=True)
    return torch.where(values.abs() < least, 0, values)
