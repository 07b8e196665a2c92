"""What methods are compared with: samples, plain or with a control variate, and their errors."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from covprop.comparison import Reference
from covprop.errors import CovpropError, approximations_ignored
from covprop.footprint import BRIEF, Footprint, footprint, timed
from covprop.gaussian import Gaussian
from covprop.methods import ControlVariate, Exact, Linearized, Method, MonteCarlo
from covprop.methods.control import FEWEST
from covprop.plan import Plan
from covprop.verdict import rank

SAMPLES = 75_000
"""Plain ones, whose standard errors any reference has by default."""
PILOT = 1024
"""Samples, plain and with the control variate, that tell how many of the latter suffice."""
MARGIN = 1.25
"""More of them, since few samples do not know it well."""
LEAST = 4096
"""Of them, for what happens rarely."""
WORTHWHILE = 0.5
"""Share of the plain samples up to which a control variate takes their place."""
WIDEST = SAMPLES // 40
"""Units of a layer up to which `Exact` is the base: it costs about 2 samples for each."""
RESOLVED = 10.0
"""Standard errors that a mean has to be from zero for a ratio to it to say something."""
MOST = 1e15
"""Samples that any reference is worth: of a linear network a control variate knows everything."""

Run = Callable[[Method], Any]
FAILURES = (CovpropError, ValueError, RuntimeError)
"""What a method may raise on a network that samples go through."""


@final
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the reference is sampled, and why in this way, for the foot of the table."""

    method: MonteCarlo | ControlVariate
    reason: str = ""


@approximations_ignored()  # a base that is rough makes the reference no less right
def sampled(
    run: Run,
    method: MonteCarlo | ControlVariate | None,
    planned: Callable[[], Plan],
    generator: torch.Generator | None,
    device: torch.device,
) -> Reference:
    """The reference by a method, or else by the one that is chosen for the network.

    Two samples go first, to see what the module returns.
    """
    with _apart(device) as own:
        result = run(MonteCarlo(2, own))
    if not isinstance(result, Gaussian):
        raise TypeError(
            f"compare takes a module that returns one tensor, and this one returns a "
            f"{type(result).__name__}; wrap it in a function that picks one"
        )
    if method is not None:
        return figures(_measured(run, method, device), Sampling(method))
    sampling = chosen(run, planned, generator, device)
    return figures(_measured(run, sampling.method, device), sampling)


def chosen(
    run: Run, planned: Callable[[], Plan], generator: torch.Generator | None, device: torch.device
) -> Sampling:
    """A control variate if half of the plain samples, or fewer, have their standard errors with it.

    Which depends on the network, so both are tried, with few samples and a generator of their own:
    the same every time.
    """
    plain = MonteCarlo(SAMPLES, generator)
    with _apart(device) as own:
        tried = run(MonteCarlo(PILOT, own))
        for base in _bases(planned):
            try:
                found = run(ControlVariate(PILOT, base, own))
            except FAILURES:
                continue  # such as an operation without a rule, or a linear map that does not fit
            needed = _needed(found, tried)
            said = f"control variate by cp.{type(base).__name__}()"
            if math.isinf(needed):
                return Sampling(plain, f"plain samples, as few do not tell what a {said} saves")
            if needed > WORTHWHILE * SAMPLES:
                return Sampling(plain, f"plain samples, as a {said} would save less than half")
            return Sampling(
                ControlVariate(int(needed), base, generator),
                f"a {said}, unbiased even where that is wrong, for the standard errors of "
                f"{SAMPLES:,} plain samples",
            )
    return Sampling(plain, "plain samples, as neither cp.Exact() nor cp.Linearized() can control")


def _bases(planned: Callable[[], Plan]) -> Iterator[Method]:
    """`Exact` where it costs little beside samples, and what works nearly always."""
    try:
        widest = max((step.features for step in planned().steps), default=0)
    except FAILURES:
        widest = WIDEST + 1
    if widest <= WIDEST:
        yield Exact()
    yield Linearized()


def _needed(found: Gaussian, plain: Gaussian) -> float:
    """Samples for every standard error to be that of `SAMPLES` plain ones; infinite if unknown.

    An output that has not varied may do so rarely, which few samples do not see at all.
    """
    shares = []
    for ours, theirs in zip(_stderrs(found), _stderrs(plain), strict=True):
        share = (ours / theirs).square()
        if not share.numel() or not bool(torch.isfinite(share).all()):
            return math.inf
        shares.append(float(share.max()))
    trials = math.ceil(max(shares) * MARGIN * SAMPLES / PILOT)
    return max(LEAST, trials * PILOT)


def _stderrs(found: Gaussian) -> tuple[Tensor, Tensor]:
    """Of means and of variances."""
    assert found.mean_stderr is not None
    assert found.covariance_stderr is not None
    return found.mean_stderr, found.covariance_stderr.diagonal(dim1=-2, dim2=-1)


def _measured(run: Run, method: MonteCarlo | ControlVariate, device: torch.device) -> Footprint:
    """A run; its memory is that of another one, of as many samples as are brief."""
    result, seconds = timed(lambda: run(method), device)
    brief = max(2, min(method.samples, int(method.samples * BRIEF / max(seconds, BRIEF))))
    with _apart(device) as own:
        again: Method = MonteCarlo(brief, own)
        if isinstance(method, ControlVariate):
            again = dataclasses.replace(method, samples=max(brief, FEWEST), generator=own)
        second = footprint(lambda: run(again), device, repeat=False)
    return Footprint(result, seconds, second.peak_bytes)


@contextmanager
def _apart(device: torch.device) -> Iterator[torch.Generator]:
    """A generator of its own, and the global one as it was, whatever the network draws."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        yield torch.Generator(device).manual_seed(0)


def figures(call: Footprint, sampling: Sampling) -> Reference:
    """The sampled Gaussian, and what sampling does to every figure.

    A control variate is worth many plain samples, but not for the divergence: that weighs every
    combination of outputs by its own variance, and those that hardly vary are hardly linear.
    """
    truth: Gaussian = call.result
    assert truth.samples is not None
    assert truth.mean_stderr is not None
    assert truth.covariance_stderr is not None
    samples = truth.samples
    mean, variance = truth.mean.double(), truth.variance.double()
    error, spread = truth.mean_stderr.double(), truth.covariance_stderr.double()
    resolved = mean.abs() > RESOLVED * error
    varies = variance > 0
    of_variance = spread.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
    matrix = truth.covariance_matrix.double()
    values = torch.linalg.eigvalsh(matrix).clamp(min=0)
    freedom = rank(values, truth.dtype)
    plain = isinstance(sampling.method, MonteCarlo)
    worth = samples if plain else _worth(variance, of_variance, samples)
    return Reference(
        f"{type(sampling.method).__name__}({samples:,})", truth, call.seconds, call.peak_bytes,
        samples,
        divided(error, mean.abs(), resolved),
        divided(of_variance, variance, varies),
        divided(error, variance.sqrt(), varies),
        spread.square().sum((-2, -1)).sqrt() / norm(matrix),
        wasserstein_of_sampling(values, worth),
        freedom * (freedom + 3) / (4 * samples),
        sampling.reason,
    )  # fmt: skip


def _worth(variance: Tensor, error: Tensor, samples: int) -> int:
    """How many plain samples of a Gaussian know its variances as well, by the median output."""
    known = (variance > 0) & (error > 0)
    if not bool(known.any()):
        return samples
    median = float((2 * (variance[known] / error[known]).square()).median())
    return max(samples, int(min(median, MOST)))


def wasserstein_of_sampling(values: Tensor, samples: int) -> Tensor:
    """The root of E[W2^2] between a Gaussian with these eigenvalues and what N samples give of it.

    sum_i l_i / N for the mean; for the covariance (1/2) sum_ij E[D_ij^2] / (l_i + l_j), to second
    order, with E[D_ij^2] = l_i l_j (1 + delta_ij) / N.
    """
    left, right = values[..., :, None], values[..., None, :]
    total = left + right
    pairs = torch.where(total > 0, left * right / torch.where(total > 0, total, 1), 0)
    covariance = (pairs.sum((-2, -1)) + pairs.diagonal(dim1=-2, dim2=-1).sum(-1)) / 2
    return ((values.sum(-1) + covariance) / samples).sqrt()


def divided(numerator: Tensor, denominator: Tensor, known: Tensor) -> Tensor:
    """A ratio where it is known, NaN elsewhere."""
    return torch.where(known, numerator / torch.where(known, denominator, 1), math.nan)


def norm(matrix: Tensor) -> Tensor:
    """The Frobenius norm of each matrix."""
    return matrix.square().sum((-2, -1)).sqrt()
