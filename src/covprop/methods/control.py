"""Sampling with the linearised network as a control variate of known moments."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from covprop.covariance.base import is_finite, symmetric
from covprop.error_estimate import SamplingError
from covprop.flow.nests import leaves
from covprop.gaussian import Gaussian
from covprop.methods.base import Method, WrappingMethod
from covprop.methods.call import Call
from covprop.methods.layerwise import GaussianLayers
from covprop.methods.linearized import gains_of
from covprop.methods.montecarlo import add_products
from covprop.methods.network import Estimate, Network, check_outputs
from covprop.methods.root import Root

MIN_SAMPLES = 128
"""Samples, at least, also of a group: of fewer, standard errors come out too small."""
HELD = 2**21
"""Numbers of all outputs of a group, about, which are held at a time."""
MATRICES = 14
"""In float64, of the size of a covariance, that are held at a time where one has to be repaired."""
LEAST_SHARE = 0.1
"""Of the sampled variance of a combination of outputs: where a control variate leaves less, the
samples are too few to know its coefficients, and are taken without it."""


@final
@dataclass(frozen=True)
class ControlVariate(WrappingMethod):
    """Moments of samples, with a linear control variate.

    For g = E[J] (x - m), whose moments are known, on the same samples:

        mean = mean(f - b g),  covariance = Cov(f) - c (Cov(g) - E[J] S E[J]^T)

    Here mean and Cov are sample moments, and b (for each output) and c (for each pair) are the
    coefficients of least variance. They are zero where g says nothing about f; the result is then
    plain sampling. The result is right within its standard errors, whatever E[J] the base computes;
    a better base makes them smaller. An output that is the same for all samples, although the base
    says that it varies, has the moments of the base. The covariance is positive semi-definite.
    There are no gradients.

    Args:
        samples: The number of samples, rounded up to equal groups if there are many outputs.
        base: The method that computes E[J].
        generator: A random generator, by default torch's global one.

    Example:
        y = cp.propagate(model, x, cp.ControlVariate(1024, cp.GaussianLayers()))
        y.mean, y.mean_stderr
    """

    samples: int = 1024
    base: Method = field(default_factory=GaussianLayers)
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if type(self.samples) is not int or self.samples < MIN_SAMPLES:
            raise ValueError(f"samples is a whole number from {MIN_SAMPLES}, not {self.samples!r}")
        if not isinstance(self.base, Method):
            raise TypeError(f"base is a method such as cp.GaussianLayers(), not {self.base!r}")

    uses_skewness: ClassVar[bool] = True
    """Samples have it, and the moments of g do not depend on it: the base need not use it."""

    @property
    def stochastic(self) -> bool:
        """Samples are random."""
        return True

    @torch.no_grad()
    def around(self, call: Call) -> Any:
        """Groups of samples, one after another."""
        network = Network(call.on_tensors, call.inputs)
        roots = [Root.of(x) for x in call.inputs]
        width = sum(root.width for root in roots)
        check_outputs(network, lambda _: MATRICES * torch.float64.itemsize, beside=width)
        gains = gains_of(call, self)
        # An output that the base found constant has no gain: plain sampling.
        known = [[gain.double() for gain in gains.get(o.leaf, ())] for o in network.outputs]
        tallies = [Tally(_covariance(rows)) for rows in known]
        groups, each = _groups(network, self.samples)
        for _ in range(groups):
            collected: list[list[tuple[Tensor, Tensor]]] = [[] for _ in network.outputs]
            for start in range(0, each, network.step):
                count = min(network.step, each - start)
                numbers = [root.standardised(count, self.generator) for root in roots]
                points = [r.x.mean + r.times(z) for r, z in zip(roots, numbers, strict=True)]
                for group, y, rows in zip(collected, network.at(points), known, strict=True):
                    group.append((y.double(), _linear(rows, numbers, y)))
                call.advance(count, groups * each)
            for tally, group in zip(tallies, collected, strict=True):
                both = [torch.cat(part) for part in zip(*group, strict=True)]
                group.clear()  # memory
                tally.add(*both)
        estimates = [
            tally.estimate(groups * each, output.dtype)
            for tally, output in zip(tallies, network.outputs, strict=True)
        ]
        constant = [tally.constant_variance() for tally in tallies]
        if any(bool(some.any()) for some in constant):
            results = list(leaves(self.run_base(call.on(call.inputs))))
            for i, output in enumerate(network.outputs):
                y = results[output.leaf]
                if isinstance(y, Gaussian) and y.mean.numel() == constant[i].numel():
                    mean = y.mean.reshape(constant[i].shape)
                    estimates[i] = _completed(estimates[i], constant[i], mean, y.covariance_matrix)
        return network.gaussians(estimates, self)


def _groups(network: Network, samples: int) -> tuple[int, int]:
    """How many groups, and of how many samples."""
    sizes = [output.event_shape.numel() for output in network.outputs]
    numbers = samples * network.batch_shape.numel() * sum(sizes)
    groups = max(1, min(samples // MIN_SAMPLES, numbers // HELD))
    return groups, -(-samples // groups)


def _linear(rows: Sequence[Tensor], numbers: Sequence[Tensor], like: Tensor) -> Tensor:
    """g (count, *batch, m) for the standardised numbers behind each input."""
    if not rows:
        return torch.zeros_like(like, dtype=torch.float64)
    parts = [
        torch.einsum("...mn,k...n->k...m", gain, z.double())
        for gain, z in zip(rows, numbers, strict=True)
    ]
    return torch.stack(parts).sum(0)


def _covariance(rows: Sequence[Tensor]) -> Tensor | None:
    """E[J] S E[J]^T."""
    return torch.stack([gain @ gain.mT for gain in rows]).sum(0) if rows else None


def _products(values: Tensor, control: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sums over samples of P - Q, Q, (P - Q)^2, (P - Q) Q and Q^2, each (*batch, m, m).

    P_ij and Q_ij are the products of deviations (count, *batch, m) of the values f and of the
    control variate g. Of u = f - g and v = f + g, P - Q is (u_i v_j + v_i u_j) / 2: small where u
    is, as a difference of squares would not be.
    """
    difference, total = values - control, values + control
    squares = _sums(difference.square(), total.square()).div_(2)
    both = difference * total
    add_products(squares, both, both, 0.5)
    return (
        _sums(difference, total),
        _sums(control, control),
        squares,
        _sums(difference * control, total * control),
        _sums(control.square(), control.square()),
    )


def _sums(left: Tensor, right: Tensor) -> Tensor:
    """Over samples, of (l_i r_j + r_i l_j) / 2."""
    total = left.new_zeros(*left.shape[1:], left.shape[-1])
    add_products(total, left, right)
    return symmetric(total)


def _coefficients(values: Tensor, control: Tensor) -> tuple[Tensor, Tensor]:
    """b (*batch, m) and 1 - c (*batch, m, m) of least variance, by samples (count, *batch, m).

    c = Cov(P, Q) / Var(Q), with Q of the control variate times b: the covariance has the variance
    Var(P) - Cov(P, Q)^2 / Var(Q) over the number of samples, never more than that of P alone, and
    with nothing in common c is zero.
    """
    values, control = values - values.mean(0), control - control.mean(0)
    square = control.square().sum(0)
    common = (values * control).sum(0)
    slope = torch.where(square > 0, common / torch.where(square > 0, square, 1), 0)
    difference, inner, _, mixed, squares = _products(values, slope * control)
    count = len(values)
    spread = squares - inner.square() / count
    common = mixed - difference * inner / count
    varies = spread > 0
    return slope, torch.where(varies, -common / torch.where(varies, spread, 1), 1)


@final
class Tally:
    """Averages over groups, with the coefficients of the first: they are constants to the others.

    known: the covariance of the control variate, if there is one.
    """

    _first: Tensor
    _constant: Tensor
    _coefficients: tuple[Tensor, Tensor]
    _sums: Sequence[Tensor]

    def __init__(self, known: Tensor | None) -> None:
        """No group yet."""
        self._known, self._groups = known, 0

    def add(self, values: Tensor, control: Tensor) -> None:
        """The moments of a group: samples (count, *batch, m) and their control variate."""
        if not self._groups:
            self._first = values[0]
            self._constant = torch.ones_like(self._first, dtype=torch.bool)
            self._coefficients = _coefficients(values, control)
        self._constant = self._constant & (values == self._first).all(0)
        found = _moments(values, control, *self._coefficients, self._known)
        if self._groups:
            for total, one in zip(self._sums, found, strict=True):
                total += one
        else:
            self._sums = found
        self._groups += 1

    def constant_variance(self) -> Tensor:
        """Variances (*batch, m) of the control where the outputs are the same for all samples."""
        if self._known is None:
            return torch.zeros_like(self._constant, dtype=torch.float64)
        return torch.where(self._constant, self._known.diagonal(dim1=-2, dim2=-1), 0)

    def estimate(self, samples: int, dtype: torch.dtype) -> Estimate:
        """Mean and covariance of all groups, and their standard errors."""
        mean, covariance, plain = (total / self._groups for total in self._sums[:3])
        errors = (total.sqrt().div(self._groups).to(dtype) for total in self._sums[3:])
        matrix = _semidefinite(covariance, plain)
        return Estimate(mean.to(dtype), matrix.to(dtype), SamplingError(samples, *errors))


def _completed(estimate: Estimate, control: Tensor, mean: Tensor, covariance: Tensor) -> Estimate:
    """An estimate with the moments of another method for outputs that are constant over samples.

    control: variances (*batch, m) that those outputs have at least, zero for others. Samples do not
    estimate them: the variances may be off by as much again, and covariances with other outputs,
    which stay zero, by what they could be at most.
    """
    found, matrix, error, _ = estimate
    assert error is not None
    constant = control > 0
    both = constant[..., :, None] & constant[..., None, :]
    either = constant[..., :, None] | constant[..., None, :]
    matrix = torch.where(both, covariance.to(matrix), torch.where(either, 0, matrix))
    variance = torch.maximum(matrix.diagonal(dim1=-2, dim2=-1), control.to(matrix))
    most = (variance[..., :, None] * variance[..., None, :]).sqrt()
    errors = SamplingError(
        error.samples,
        torch.where(constant, (variance / error.samples).sqrt(), error.mean),
        torch.where(either, most, error.covariance),
    )
    return Estimate(torch.where(constant, mean.to(found), found), matrix, errors)


def _moments(
    values: Tensor, control: Tensor, slope: Tensor, rest: Tensor, known: Tensor | None
) -> Sequence[Tensor]:
    """Mean, covariance, that of the samples alone, and the variances of the first two.

    mean(f - b g) and mean(P) - c o (mean(Q) - K), K the known covariance of b g; slope: b;
    rest: 1 - c.
    """
    count = len(values)
    control = control * slope
    mean = (values - control).mean(0)
    values, control = values - values.mean(0), control - control.mean(0)
    of_mean = (values - control).square().sum(0) / (count * (count - 2))
    difference, inner, squares, mixed, of_control = _products(values, control)
    squares.addcmul_(rest, mixed, value=2).addcmul_(of_control.mul_(rest), rest)
    del mixed, of_control
    total = difference + rest * inner
    squares.addcmul_(total, total, value=-1 / count).clamp_(min=0).div_(count * (count - 2))
    plain = difference.add_(inner).div_(count - 1)
    # (1 - rest) K, K of the control variate times its slope.
    scaled = inner.zero_() if known is None else inner.copy_(known)
    scaled.mul_(slope[..., :, None]).mul_(slope[..., None, :])
    covariance = total.div_(count - 1).add_(scaled).addcmul_(rest, scaled, value=-1)
    return mean, covariance, plain, of_mean, squares


def _semidefinite(covariance: Tensor, plain: Tensor) -> Tensor:
    """A covariance (*batch, m, m) that is positive semi-definite, as that of the samples is.

    In units in which the sampled covariance is 1, directions in which less than LEAST_SHARE is left
    have what was sampled.
    """
    if not (is_finite(covariance) and is_finite(plain)):
        return covariance  # it is refused with a reason, as every result is
    covariance = symmetric(covariance)
    if _leaves_enough(covariance, plain):
        return covariance
    plain = symmetric(plain)
    values = torch.linalg.eigvalsh(covariance)
    sizes, axes = torch.linalg.eigh(plain)
    varies = sizes > _rounding(sizes)
    root = torch.where(varies, sizes, 0).sqrt()
    white = axes * torch.where(varies, 1 / torch.where(varies, root, 1), 0)[..., None, :]
    shares = symmetric(white.mT @ covariance @ white)
    del white, plain  # memory
    shares.diagonal(dim1=-2, dim2=-1).add_(~varies)
    shares, turns = torch.linalg.eigh(shares)
    sound = (values[..., 0] >= -_rounding(values)[..., 0]) & (shares[..., 0] >= LEAST_SHARE)
    factor = axes.mul_(root[..., None, :]) @ turns
    del axes, turns  # memory
    kept = torch.where(shares < LEAST_SHARE, 1, shares)
    mended = symmetric((factor * kept[..., None, :]) @ factor.mT)
    return torch.where(sound[..., None, None], covariance, mended)


def _leaves_enough(covariance: Tensor, plain: Tensor) -> bool:
    """Whether enough is left of every combination of outputs, by a Cholesky factor."""
    if not covariance.numel():
        return True
    left = torch.sub(covariance, plain, alpha=LEAST_SHARE)
    largest = plain.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    rounding = torch.finfo(left.dtype).eps * left.shape[-1] * largest
    left.diagonal(dim1=-2, dim2=-1).add_(rounding)
    return not bool(torch.linalg.cholesky_ex(left).info.any())


def _rounding(values: Tensor) -> Tensor:
    """What of eigenvalues, in ascending order, is rounding."""
    scale = torch.maximum(values[..., -1:].abs(), values[..., :1].abs())
    return torch.finfo(values.dtype).eps * values.shape[-1] * scale
