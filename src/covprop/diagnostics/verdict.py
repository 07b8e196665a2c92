"""Distances between Gaussians, tests of moments against sampled ones, and the bound of a series."""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, final

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.gaussian import Gaussian
from covprop.kernels.rounding import MOMENT, REMAINDER, rounding
from covprop.methods.series import remainders
from covprop.rules.elementwise import find_activation
from covprop.text_table import in_digits, in_percent

FINE = "within sampling error"
"""The verdict on a method that no test rejects."""
SIGNIFICANCE = 0.01
"""Probability that sampling alone makes any figure of a correct method look wrong, about."""
TESTS = 3  # that share it: of the means, of the covariances, and of all moments jointly
RARE = 0.1  # relative standard error of a sampled variance from which an output is rarely active
UNRELIABLE = 0.2  # the same error from which an output is left out of the divergence
TINY = math.sqrt(torch.finfo(torch.float64).tiny)  # variance whose standard error underflows
KINK = 2.0  # how much more an unsampled kink may change a variance than a mean, at most
SKEW = 0.5  # widening of an interval by skewness, in units of z^2 times the relative error
EIGENVALUE_ROUNDING = 8.0  # in units of machine epsilon times n times the largest eigenvalue
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
    shift = _flat(first, first.mean) - _flat(second, second.mean)
    return (shift.square().sum(-1) + difference).sqrt()


@torch.no_grad()
def kl_divergence(first: Gaussian, second: Gaussian) -> Tensor:
    """The Kullback-Leibler divergence KL(first || second) of two Gaussians, in nats.

    (1/2) (sum_i (l_i - 1 - log l_i) + |D^-1/2 (m - n)|^2), l the eigenvalues of D^-1/2 C D^-1/2.

    Singular covariances have the divergence on their common support where both vary in the same
    directions, to rounding, and the means differ in no other; else it is infinite.

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
    rounding = EIGENVALUE_ROUNDING * torch.finfo(dtype).eps * size
    m, n = (_flat(x, x.mean).reshape(-1, size) for x in (first, second))
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


@final
class Verdict:
    """A method's Gaussian against a sampled one, in float64, with flattened outputs.

    The standard errors that samples give of a rarely active unit are themselves uncertain, and
    smallest where the estimate is most wrong. So they are taken at the larger of the sampled and
    the method's variance, and the skewness of the estimate (at most its relative error for a mean,
    by Pearson's inequality) widens what a normal distribution allows. An event that no sample shows
    has no standard error: with a control variate only distant kinks are left, and samples may have
    met none of them.
    """

    def __init__(self, result: Gaussian, truth: Gaussian) -> None:
        error = truth.sampling_error
        assert error is not None
        self.samples, self.dtype = error.samples, truth.dtype
        self.mean_stderr = _flat(truth, error.mean)  # (*batch, n)
        self.covariance_stderr = error.covariance.double()  # (*batch, n, n)
        self.sampled_mean = _flat(truth, truth.mean)
        self.shift = _flat(result, result.mean) - self.sampled_mean
        self.covariance = result.covariance_matrix.double()
        self.sampled_covariance = truth.covariance_matrix.double()
        self.variance, self.sampled_variance = (
            _diagonal(matrix).clamp(min=0) for matrix in (self.covariance, self.sampled_covariance)
        )
        self.rounding = MOMENT * torch.finfo(self.dtype).eps
        self.mean_rounding = self.rounding * self.sampled_mean.abs()
        self.covariance_rounding = self.rounding * _pairs(
            torch.mul, self.sampled_variance.sqrt()
        ) + _pairs(torch.mul, self.mean_rounding)
        self.varied = self.sampled_variance > self.mean_rounding.square().clamp(min=TINY)
        divisor = torch.where(self.varied, self.sampled_variance, 1)
        # A handful of samples may seem to have no error, and two never have one.
        relative = (_diagonal(self.covariance_stderr) / divisor).clamp(min=1 / self.samples)
        self.relative_stderr = torch.where(self.varied, relative, math.inf)  # of variances
        ratio = torch.where(self.varied, self.variance / divisor, 1)
        self.growth = ratio.clamp(min=1).sqrt()  # of the standard deviation, by the method

    def words(self, mean_error: Tensor, variance_ratio: Tensor, covariance_error: Tensor) -> str:
        """The largest errors that sampling does not explain, one by one or else jointly."""
        in_mean, in_covariance = self.in_mean(), self.in_covariance()
        in_variance = _diagonal(in_covariance)
        parts = []
        if bool(in_mean.any()):
            worst = _largest(mean_error.reshape(in_mean.shape)[in_mean])
            parts.append(f"mean off by {in_digits(worst, 2)} std")
        if bool(in_variance.any()):
            worst = _largest(variance_ratio.reshape(in_mean.shape)[in_variance] - 1)
            parts.append(f"variance off by {in_percent(worst)}")
        elif bool(in_covariance.any()):
            worst = _largest(covariance_error[in_covariance.any(-1).any(-1)])
            parts.append(f"covariance off by {in_percent(worst)}")
        if parts:
            return ", ".join(parts)
        times, significant = self.jointly()
        if not bool(significant.any()):
            return FINE
        worst = float(times[significant].max())
        return f"each moment {FINE}, but KL {in_digits(worst, 2)} times it"

    def in_mean(self) -> Tensor:
        """Which means differ significantly, (*batch, n).

        Without assumptions on the distribution, |mean - sampled mean| exceeds
        sqrt(variance / (N p)) with a probability of at most p (Chebyshev).
        """
        size = self.shift.abs()
        p = _shared(size)
        missed = self._missed(p) * self.sampled_variance.sqrt() * self.growth
        allowed = self.mean_stderr * self.growth * self._allowed(self.relative_stderr) + missed
        beyond = self.varied & (size > allowed) & (size > self.mean_rounding)
        impossible = size > (self.variance / (self.samples * p)).sqrt() + self.mean_rounding
        return beyond | impossible | self._should_vary(p)

    def in_covariance(self) -> Tensor:
        """Which covariances differ significantly, (*batch, n, n).

        Their standard error is at least that of independent outputs, sqrt(variances / N), since
        samples tell nothing of what rarely happens to two at once; where a unit is rarely active it
        is the most that those of the variances allow: E[a^2 b^2] <= sqrt(E[a^4] E[b^4]). A sampled
        variance exceeds variance / p with a probability of at most p (Markov).
        """
        difference = (self.covariance - self.sampled_covariance).abs()
        p = _shared(difference)
        relative = self.relative_stderr
        variance = self.sampled_variance * self.growth**2
        most = (relative.square() + 1 / self.samples).sqrt() * variance
        least = (relative / math.sqrt(2)).clamp(max=self.samples**-0.5) * variance
        larger = _pairs(torch.maximum, relative)
        rare = larger > RARE
        _diagonal(rare).fill_(False)
        stderr = self.covariance_stderr * _pairs(torch.mul, self.growth)
        stderr = torch.maximum(stderr, _pairs(torch.mul, least).sqrt())
        bound = torch.maximum(stderr, _pairs(torch.mul, most).sqrt())
        stderr = torch.where(rare, bound, stderr)
        deviation = self.sampled_variance.sqrt() * self.growth
        missed = KINK * self._missed(p) * _pairs(torch.mul, deviation)
        allowed = stderr * self._allowed(larger) + missed + self.covariance_rounding
        beyond = _pairs(torch.logical_and, self.varied) & (difference > allowed)
        rounding = _diagonal(self.covariance_rounding)
        impossible = (self.sampled_variance > self.variance / p + rounding) | self._constant()
        impossible |= self._should_vary(p) & (self.variance > rounding)
        return beyond | torch.diag_embed(impossible)

    def jointly(self) -> tuple[Tensor, Tensor]:
        """Divergences over those of Gaussian samples, and which are significant, (*batch).

        Of N Gaussian samples of rank k, 2 N KL has about a chi-squared distribution with
        k (k + 3) / 2 degrees of freedom; it is divided by the most that any entry of the covariance
        varies more than in Gaussian samples, by the standard errors. Those do not cover
        combinations of outputs that hardly vary, so this is a hint and no proof. Rarely active
        units and rounding errors are left out.
        """
        kept = self.varied & (self.relative_stderr <= UNRELIABLE)
        both = _pairs(torch.logical_and, kept)
        divergence = kl_divergence(
            self._only(kept, both, torch.zeros_like(self.shift), self.sampled_covariance),
            self._only(kept, both, self.shift, self.covariance),
        )
        expected = _pairs(torch.mul, self.sampled_variance) + self.sampled_covariance.square()
        expected = torch.where(both & (expected > 0), expected, math.inf)
        ratio = self.covariance_stderr.square() * self.samples / expected
        values = torch.linalg.eigvalsh(torch.where(both, self.sampled_covariance, 0))
        count = rank(values, self.dtype).double()
        freedom = (count * (count + 3) / 2).clamp(min=1)
        rounding = self._rounding_divergence(values, both, kept)
        statistic = (divergence.sqrt() - rounding.sqrt()).clamp(min=0).square()
        statistic = 2 * self.samples * statistic / ratio.amax((-2, -1)).clamp(min=1)
        finite = torch.isfinite(statistic)
        p = torch.special.gammaincc(freedom / 2, torch.where(finite, statistic, 0) / 2)
        times = divergence / (freedom / (2 * self.samples))
        return times, finite & (p < _shared(p))

    def _rounding_divergence(self, values: Tensor, both: Tensor, kept: Tensor) -> Tensor:
        """At most, to second order: (|dm|^2 / l + |dC|^2 / (2 l^2)) / 2, l the least eigenvalue."""
        rounded = torch.finfo(self.dtype).eps * values.shape[-1] * values[..., -1:]
        smallest = torch.where(values > rounded, values, math.inf).amin(-1)
        of_mean = torch.where(kept, self.mean_rounding, 0).square().sum(-1)
        of_covariance = torch.where(both, self.covariance_rounding, 0).square().sum((-2, -1))
        return (of_mean / smallest + of_covariance / (2 * smallest.square())) / 2

    def _only(self, kept: Tensor, both: Tensor, mean: Tensor, matrix: Tensor) -> Gaussian:
        """The kept outputs; the others become equal and independent, and add no divergence."""
        rest = torch.where(kept, 0, self.sampled_variance.amax(-1, keepdim=True))
        matrix = torch.where(both, matrix, 0) + torch.diag_embed(rest)
        return Gaussian(torch.where(kept, mean, 0), matrix, validate_args=False).to(self.dtype)

    def _missed(self, p: float) -> float:
        """Largest probability of an event that all samples miss with the probability p.

        A Gaussian that is cut off there, above its mean, has a mean that is lower by less than this
        probability, in standard deviations, and a variance that is smaller by less than twice it.
        """
        return min(1.0, -math.log(p) / self.samples)

    def _should_vary(self, p: float) -> Tensor:
        """Which outputs never varied in the samples, and surely would have, by the method.

        P(x != c) >= (mean - c)^2 / (variance + (mean - c)^2)           (Paley & Zygmund 1932)
        """
        square = (self.shift.abs() - self.mean_rounding).clamp(min=0).square()
        total = self.variance + square
        chance = torch.where(total > 0, square / torch.where(total > 0, total, 1), 0)
        return ~self.varied & (self.samples * chance > -math.log(p))

    def _constant(self) -> Tensor:
        """Which outputs never varied and have the method's very mean, but not its variance.

        A unit that is rarely active to one side has another mean, so this one is not just rare,
        unless the variance is so small that the difference of the means may be lost in rounding.
        """
        resolved = math.sqrt(torch.finfo(self.dtype).eps) * self.sampled_mean.square()
        centred = self.shift.abs() <= self.mean_rounding
        return ~self.varied & centred & (self.variance > resolved) & (self.variance > 0)

    def _allowed(self, relative: Tensor) -> Tensor:
        """Allowed standard errors of moments with these relative standard errors."""
        z = allowed_errors(TESTS * relative.numel())
        return z + SKEW * z**2 * torch.where(torch.isfinite(relative), relative, 1)


def allowed_errors(tests: int) -> float:
    """Standard errors that any of so many figures exceeds with the probability SIGNIFICANCE."""
    return -NormalDist().inv_cdf(SIGNIFICANCE / 2 / max(1, tests))


def rank(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Number of eigenvalues, in ascending order, that are more than rounding."""
    return (values > torch.finfo(dtype).eps * values.shape[-1] * values[..., -1:]).sum(-1)


def _shared(tests: Tensor) -> float:
    """The significance of each of so many tests (Bonferroni)."""
    return SIGNIFICANCE / TESTS / max(1, tests.numel())


def _pairs(function: Callable[[Tensor, Tensor], Tensor], values: Tensor) -> Tensor:
    """A function of every two outputs, (*batch, n, n)."""
    return function(values[..., :, None], values[..., None, :])


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _flat(x: Gaussian, values: Tensor) -> Tensor:
    """(*batch, n) in float64."""
    return values.double().reshape(*x.batch_shape, x.event_shape.numel())


def _largest(values: Tensor) -> float:
    """An output that should not vary is infinitely off."""
    return float(values.abs().nan_to_num(nan=math.inf).max())


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
