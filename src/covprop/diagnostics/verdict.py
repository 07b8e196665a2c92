"""Distances between Gaussians, verdicts graded by the size of errors, and the bound of a series."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.gaussian import Gaussian
from covprop.kernels.rounding import EIGENVALUE, REMAINDER, rounding
from covprop.methods.series import remainders
from covprop.rules.elementwise import find_activation
from covprop.text_table import in_digits, in_percent

FINE = "within sampling error"
"""The verdict on a method that no test rejects."""
SMALL = 0.01  # error up to which a method is hardly off, of the standard deviation
MODERATE = 0.1  # error from which it is wrong
NEGLIGIBLE = 1e-4  # error below which its digits say no more
FACTOR = 10.0  # relative error of a standard deviation from which it is written as a factor
MOST_ERRORS = 999  # standard errors beyond which their number says no more
UNEXPLAINED = 4.0  # times the relative error of deviations: a covariance worse than it is named too
SIGNIFICANCE = 0.01
"""Probability that sampling alone makes any figure of a correct method look wrong, about."""
ADVISED_SAMPLES = 10_000  # of a control variate: standard deviations to one percent, or better


def recommendation(split: bool = True) -> str:
    """The call to make where layers are too far from Gaussian; `split` also offers `cp.Split`."""
    unbiased = (
        "unbiased moments, with standard errors: "
        f"cp.propagate(model, x, method=cp.ControlVariate({ADVISED_SAMPLES:_}))"
    )
    cheaper = "cheaper, and often half as far off where noise is large: method=cp.Split()"
    return f"{unbiased}; {cheaper}" if split else unbiased


@torch.no_grad()
def wasserstein_distance(first: Gaussian, second: Gaussian) -> Tensor:
    """The 2-Wasserstein distance between two Gaussians, in the units of their elements.

    W^2 = |m - n|^2 + tr(C + D - 2 (C^1/2 D C^1/2)^1/2)
        = |m - n|^2 + min over orthogonal U of |C^1/2 - D^1/2 U|_F^2

    in float64, by the second form, in which nothing cancels where C and D are nearly equal.

    Args:
        first: a Gaussian; its covariance may be singular.
        second: a Gaussian of the same shape.

    Returns:
        A distance for each element of the batch.

    Example:
        cp.wasserstein_distance(cp.propagate(model, x), cp.propagate(model, x, cp.Linearized()))
    """
    _check_shapes(first, second)
    left, right = _square_root(first.covariance_matrix), _square_root(second.covariance_matrix)
    u, _, v = torch.linalg.svd(right @ left)  # the polar factor of it is the best U
    difference = (left - right @ (u @ v)).square().sum((-2, -1))
    shift = flat(first, first.mean) - flat(second, second.mean)
    return (shift.square().sum(-1) + difference).sqrt()


@torch.no_grad()
def kl_divergence(first: Gaussian, second: Gaussian) -> Tensor:
    """The Kullback-Leibler divergence KL(first || second) of two Gaussians, in nats.

    (1/2) (sum_i (l_i - 1 - log l_i) + |D^-1/2 (m - n)|^2), l the eigenvalues of D^-1/2 C D^-1/2.

    If the covariances are singular but vary in the same directions (to rounding), and the means
    differ in no other direction, it is the divergence on this common support; else it is infinite.

    Args:
        first: a Gaussian with mean m and covariance C.
        second: a Gaussian of the same shape, with mean n and covariance D.

    Returns:
        A divergence in float64 for each element of the batch.

    Example:
        cp.kl_divergence(cp.propagate(model, x, cp.MonteCarlo()), cp.propagate(model, x))
    """
    _check_shapes(first, second)
    size = first.event_shape.numel()
    dtype = torch.promote_types(first.dtype, second.dtype)
    rounding = EIGENVALUE * torch.finfo(dtype).eps * size
    m, n = (flat(x, x.mean).reshape(-1, size) for x in (first, second))
    c, d = (x.covariance_matrix.double().reshape(-1, size, size) for x in (first, second))
    values = [_kl(*pair, rounding) for pair in zip(m, n, c, d, strict=True)]
    return torch.tensor(values, dtype=torch.float64, device=first.device).reshape(first.batch_shape)


def _kl(m: Tensor, n: Tensor, c: Tensor, d: Tensor, rounding: float) -> float:
    """One divergence, on the support of C + D, which C and D each have to fill."""
    values, vectors = torch.linalg.eigh(c + d)
    least = rounding * float(values.clamp(min=0).max())
    vary = values > least
    shift = vectors.mT @ (m - n)
    blurred = rounding * float(torch.maximum(m.abs(), n.abs()).max()) + least**0.5
    if bool((shift[~vary].abs() > blurred).any()):
        return math.inf
    if not bool(vary.any()):
        return 0.0
    basis = vectors[:, vary]
    c, d = basis.mT @ c @ basis, basis.mT @ d @ basis
    widths, axes = torch.linalg.eigh(d)
    if float(torch.linalg.eigvalsh(c).min()) <= least or float(widths.min()) <= least:
        return math.inf
    whiten = axes * widths.rsqrt()
    ratios = torch.linalg.eigvalsh(whiten.mT @ c @ whiten)
    distance = (whiten.mT @ shift[vary]).square().sum()
    return float((ratios - 1 - ratios.log()).sum() + distance) / 2


def _check_shapes(first: Gaussian, second: Gaussian) -> None:
    if first.mean.shape != second.mean.shape or first.batch_shape != second.batch_shape:
        raise ValueError(
            f"two Gaussians of one shape are compared, and these have means of shapes "
            f"{tuple(first.mean.shape)} and {tuple(second.mean.shape)}"
        )


def _square_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix.double())
    # Eigenvalues below zero are rounding.
    return vectors * values.clamp(min=0).sqrt()[..., None, :] @ vectors.mT


class Grade(Enum):
    """How large the errors of a method are that sampling does not explain, in ascending order."""

    AGREES = "agrees"
    JOINT = "off jointly"
    SMALL = "below 1 %"
    MODERATE = "a few percent"
    WRONG = "wrong"

    @property
    def rank(self) -> int:
        """The place in that order."""
        return list(Grade).index(self)

    @property
    def words(self) -> str:
        """For a sentence: the method is ..."""
        words = {Grade.SMALL: "less than 1 % off", Grade.MODERATE: "a few percent off"}
        return words.get(self, FINE if self.rank <= Grade.JOINT.rank else self.value)


class Deviation(NamedTuple):
    """The largest error of a kind, among those that sampling does not explain if there are any.

    size: relative, of means in standard deviations; infinite where an output should not vary, NaN
    where none varies. standard_errors: the same error in standard errors of the samples.
    """

    size: float
    standard_errors: float
    significant: bool

    @property
    def significance(self) -> str:
        """Its standard errors, "" where there are none."""
        if not math.isfinite(self.standard_errors):
            return ""
        if self.standard_errors > MOST_ERRORS:
            return f">{MOST_ERRORS}"
        return in_digits(self.standard_errors, 2)

    def words(self, what: str, amount: str) -> str:
        """`standard deviations 2 % off (4 standard errors)`: the size before its significance."""
        if math.isinf(self.size):
            return f"{what} off where samples do not vary"
        suffix = f" ({self.significance} standard errors)" if self.significance else ""
        return f"{what} {amount} off{suffix}"


def in_share(size: float) -> str:
    """A relative error in percent; a tiny one by a bound."""
    return f"<{in_percent(NEGLIGIBLE)}" if 0 < size < NEGLIGIBLE else in_percent(size)


def in_share_or_factor(size: float, word: str = "x") -> str:
    """The same of a standard deviation, of which a large one is written as a factor."""
    return in_share(size) if not size >= FACTOR else f"{word} {in_digits(1 + size, 2)}"


def in_deviations(size: float) -> str:
    """An error in standard deviations; a tiny one by a bound."""
    return f"<{in_digits(NEGLIGIBLE)}" if 0 < size < NEGLIGIBLE else in_digits(size, 2)


def _graded(size: float) -> Grade:
    if size >= MODERATE:
        return Grade.WRONG
    return Grade.SMALL if size < SMALL else Grade.MODERATE


@dataclass(frozen=True)
class Judgement:
    """What samples say of a method's Gaussian.

    stddev, mean, covariance: the largest errors. divergence: how many times the divergence is that
    of sampling, where all moments together differ significantly, else NaN.
    """

    stddev: Deviation
    mean: Deviation
    covariance: Deviation
    divergence: float = math.nan

    @property
    def grade(self) -> Grade:
        """By the size of the largest error that sampling does not explain."""
        sizes = [size for size, _ in self._parts()]
        if sizes:
            return _graded(max(sizes))
        return Grade.AGREES if math.isnan(self.divergence) else Grade.JOINT

    @property
    def words(self) -> str:
        """The errors that sampling does not explain, with their sizes, the worst grade first."""
        parts = sorted(self._parts(), key=lambda part: -_graded(part[0]).rank)
        if parts:
            return ", ".join(words for _, words in parts)
        if math.isnan(self.divergence):
            return FINE
        times = in_digits(self.divergence, 2)
        return f"{FINE} in each moment, but not in all together (KL {times} times that of sampling)"

    def _parts(self) -> list[tuple[float, str]]:
        """Significant errors; that of the covariance if those of deviations do not explain it."""
        found = []
        if self.stddev.significant:
            amount = in_share_or_factor(self.stddev.size, "a factor of")
            found.append((self.stddev.size, self.stddev.words("standard deviations", amount)))
        if self.mean.significant:
            amount = f"{in_deviations(self.mean.size)} standard deviations"
            found.append((self.mean.size, self.mean.words("means", amount)))
        explained = UNEXPLAINED * self.stddev.size if self.stddev.significant else 0.0
        if self.covariance.significant and self.covariance.size > explained:
            amount = in_share(self.covariance.size)
            found.append((self.covariance.size, self.covariance.words("covariance", amount)))
        return found


def allowed_errors(tests: int) -> float:
    """Standard errors that any of so many figures exceeds with the probability SIGNIFICANCE."""
    return -NormalDist().inv_cdf(SIGNIFICANCE / 2 / max(1, tests))


def flat(x: Gaussian, values: Tensor) -> Tensor:
    """(*batch, n) in float64."""
    return values.double().reshape(*x.batch_shape, x.event_shape.numel())


@torch.no_grad()
def series_error_bound(
    function: Callable[..., Any] | Activation, x: Gaussian, order: int, **options: Any
) -> Tensor:
    """Bound |covariance - its series of an order| for an element-wise function of a Gaussian.

    |rho|^(K+1) sqrt(R_i R_j), with R = Var[g] - sum_{k <= K} a_k^2 (Cauchy-Schwarz on the tail of
    Theorem 1), plus rounding.

    Args:
        function: A torch function, or an `Activation`.
        x: The Gaussian argument of the function.
        order: The number of terms of the series.
        options: Options of the torch function.

    Returns:
        The bound, (*batch, n, n); zero on the diagonal, where `cp.Series` puts the exact variance.

    Raises:
        ValueError: The order is below 1.

    Example:
        cp.series_error_bound(torch.tanh, cp.Gaussian(torch.zeros(3), torch.eye(3)), order=4)
    """
    if order < 1:
        raise ValueError(f"the order of a series is a whole number from 1, not {order}")
    activation = (
        function if isinstance(function, Activation) else find_activation(function, **options)
    )
    variance = x.covariance.diagonal().double()
    mean = x.mean.double().reshape(variance.shape)
    output = activation.variance(mean, variance)
    share = remainders(activation, mean, variance, order)[-1]
    size = x.correlation_matrix.double().abs()
    tail = (share * output).sqrt()
    scale = output.sqrt()
    bound = size ** (order + 1) * (tail[..., :, None] * tail[..., None, :])
    rounded = rounding(REMAINDER, x.dtype) * size
    bound = bound + rounded * (scale[..., :, None] * scale[..., None, :])
    return torch.diagonal_scatter(bound, torch.zeros_like(scale), dim1=-2, dim2=-1).to(x.dtype)
