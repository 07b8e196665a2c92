"""Independent answers, and the one comparison; nothing here imports covprop."""

import csv
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import mpmath as mp
import numpy as np
import torch
from torch import Tensor

WORST = 5
"""Entries that a failed comparison prints."""
DIGITS = 40
"""Decimal digits of the mpmath oracles."""
REACH = 14.0
"""Standard deviations on either side that quadrature covers: 1e-43 of the mass is left out."""


def assert_close(
    actual: Tensor, expected: Tensor, rtol: float | None = None, atol: float | None = None
) -> None:
    """Same shape and dtype, and |actual - expected| <= atol + rtol |expected| everywhere.

    Both tolerances are sqrt(eps) of the dtype; where one is given, the other is 0.
    """
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    default = math.sqrt(torch.finfo(actual.dtype).eps) if rtol is None and atol is None else 0.0
    rtol, atol = default if rtol is None else rtol, default if atol is None else atol
    got, want = actual.detach().double().reshape(-1), expected.detach().double().reshape(-1)
    excess = (got - want).abs() - (atol + rtol * want.abs())
    excess = torch.where(got == want, -1.0, excess)  # equal infinities
    bad = ~(excess <= 0)  # NaN is never close
    if not bool(bad.any()):
        return
    order = torch.where(bad, excess.nan_to_num(nan=math.inf), -math.inf).argsort(descending=True)
    lines = [
        f"  {tuple(int(i) for i in np.unravel_index(int(flat), actual.shape or (1,)))}: "
        f"{float(got[flat])!r}, expected {float(want[flat])!r}"
        for flat in order[: min(WORST, int(bad.sum()))]
    ]
    raise AssertionError(
        f"{int(bad.sum())} of {bad.numel()} entries differ by more than rtol {rtol:.1e}, atol "
        f"{atol:.1e}; the worst:\n" + "\n".join(lines)
    )


def assert_gradients(
    function: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    atol: float,
    step: float = 1e-6,
) -> None:
    """Autograd agrees with central differences along two random lines through the inputs.

    What is compared is w^T J v, |w| and |v| from 1 to 2 in every element: an entry of J that is
    wrong by more than the tolerance shows as it does in a comparison of all entries, each of which
    would take two calls of the function. A part of the sum is not allowed beside it: a sum of many
    entries would hide what is wrong in a small one.
    """
    generator = torch.Generator().manual_seed(11)

    def weights(like: Tensor) -> Tensor:
        uniform = 2 * torch.rand(like.shape, generator=generator, dtype=like.dtype) - 1
        return uniform + uniform.sign()

    def results(values: Sequence[Tensor]) -> Sequence[Tensor]:
        found = function(*values)
        return [found] if isinstance(found, Tensor) else found

    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    outputs = results(leaves)
    for _ in range(2):
        sides = [weights(output) for output in outputs]
        lines = [weights(leaf) for leaf in leaves]
        total = sum((w * y).sum() for w, y in zip(sides, outputs, strict=True))
        slope = 0.0  # of what is constant
        if total.requires_grad:
            found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
            terms = [(g, v) for g, v in zip(found, lines, strict=True) if g is not None]
            slope = sum(float((gradient * line).sum()) for gradient, line in terms)
        ends = []
        with torch.no_grad():
            for sign in (1, -1):
                moved = [x + sign * step * v for x, v in zip(leaves, lines, strict=True)]
                ends.append(results(moved))
        # The difference of each output before their sum, which would round what is left of it.
        rises = [(up - down) / (2 * step) for up, down in zip(*ends, strict=True)]
        expected = sum(float((w * rise).sum()) for w, rise in zip(sides, rises, strict=True))
        # Four roundings of every value, over the step.
        size = sum(float((w * y.detach()).abs().sum()) for w, y in zip(sides, outputs, strict=True))
        rounding = 4 * torch.finfo(leaves[0].dtype).eps * size / step
        assert abs(slope - expected) <= atol + rounding, (
            f"the derivative along a line is {slope!r}, differences give {expected!r}"
        )


@cache
def _legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(count)


def panels(edges: np.ndarray, count: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes and weights on consecutive panels (..., edges) -> (..., nodes)."""
    nodes, weights = _legendre(count)
    half = np.diff(edges, axis=-1)[..., None] / 2
    middle = (edges[..., 1:] + edges[..., :-1])[..., None] / 2
    shape = (*edges.shape[:-1], -1)
    return (middle + half * nodes).reshape(shape), (half * weights).reshape(shape)


def normal_rule(
    mean: float, stddev: float, kinks: Sequence[float] = (), width: float = 0.25
) -> tuple[np.ndarray, np.ndarray]:
    """Standardised nodes and probability weights, panels of `width` cut at the kinks."""
    step = min(1.0, width * 4 / max(stddev, width))  # features of the function have unit size
    cuts = [(kink - mean) / stddev for kink in kinks] if stddev > 0 else []
    even = np.linspace(-REACH, REACH, 2 * math.ceil(REACH / step) + 1)
    edges = np.sort(np.concatenate([even, [c for c in cuts if abs(c) < REACH]]))
    nodes, weights = panels(edges)
    return nodes, weights * np.exp(-(nodes**2) / 2) / math.sqrt(2 * math.pi)


def hermite(x: np.ndarray, order: int) -> np.ndarray:
    """He_k(x) / sqrt(k!) for k = 1 ... order, by numpy's own polynomials."""
    rows = [np.polynomial.hermite_e.hermeval(x, [0.0] * k + [1.0]) for k in range(1, order + 1)]
    return np.stack([row / math.sqrt(math.factorial(k + 1)) for k, row in enumerate(rows)])


def evaluate(function: Callable[[Tensor], Tensor], y: np.ndarray) -> np.ndarray:
    """A torch function on numpy numbers."""
    with torch.no_grad():
        return function(torch.from_numpy(np.ascontiguousarray(y))).numpy()


def moments(
    function: Callable[[Tensor], Tensor],
    mean: float,
    stddev: float,
    order: int = 1,
    kinks: Sequence[float] = (),
) -> tuple[float, float, np.ndarray]:
    """Mean, variance and a_1 ... a_order of g(y) by quadrature of g itself (no derivative)."""
    x, weight = normal_rule(mean, stddev, kinks)
    value = evaluate(function, mean + stddev * x)
    centre = float(evaluate(function, np.array([mean]))[0])
    deviation = value - centre
    shift = float(np.sum(weight * deviation))
    deviation = deviation - shift
    coefficients = (weight * deviation * hermite(x, order)).sum(-1)
    return centre + shift, float(np.sum(weight * deviation**2)), coefficients


def pair_covariance(
    function: Callable[[Tensor], Tensor],
    means: Sequence[float],
    stddevs: Sequence[float],
    rho: float,
    kinks: Sequence[float] = (),
) -> float:
    """Cov[g(y1), g(y2)] by brute force: panels in y1, and for each node panels in y2 given y1.

    Every panel of y2 is cut at the kinks. Panels of y1 are narrow enough for |rho| <= 0.99.
    """
    q = math.sqrt((1 - rho) * (1 + rho))
    x, outer = normal_rule(means[0], stddevs[0], kinks, width=0.05 if kinks else 0.25)
    first = evaluate(function, means[0] + stddevs[0] * x)
    keep = outer > 1e-30
    x, outer, first = x[keep], outer[keep], first[keep]
    centre = means[1] + stddevs[1] * rho * x
    even = np.linspace(-9.0, 9.0, 2 * math.ceil(9 * max(1.0, stddevs[1] * q)) + 1)
    edges = np.broadcast_to(even, (len(x), len(even)))
    if kinks and q * stddevs[1] > 0:
        cuts = np.stack([(kink - centre) / (stddevs[1] * q) for kink in kinks], axis=-1)
        edges = np.sort(np.concatenate([edges, cuts.clip(-9.0, 9.0)], axis=-1), axis=-1)
    z, inner = panels(edges)
    inner = inner * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    second = (inner * evaluate(function, centre[:, None] + stddevs[1] * q * z)).sum(-1)
    first, second = first - np.sum(outer * first), second - np.sum(outer * second)
    return float(np.sum(outer * first * second))


def normal_cdf(x: float | mp.mpf) -> mp.mpf:
    """Phi(x) in high precision."""
    with mp.workdps(DIGITS):
        return _cdf(mp.mpf(x))


def normal_pdf(x: float | mp.mpf) -> mp.mpf:
    """phi(x) in high precision."""
    with mp.workdps(DIGITS):
        return _pdf(mp.mpf(x))


def _cdf(x: mp.mpf) -> mp.mpf:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def _pdf(x: mp.mpf) -> mp.mpf:
    return mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi)


def rectified_mean(x: float) -> mp.mpf:
    """E relu(x + xi) = x Phi(x) + phi(x), with digits to spare for its cancellation."""
    with mp.workdps(DIGITS + 2 * math.ceil(x * x / 4)):
        z = mp.mpf(x)
        return z * _cdf(z) + _pdf(z)


@cache
def plackett(a: float, b: float, rho: float) -> tuple[mp.mpf, mp.mpf]:
    """K0 and K1 from what they are: covariances of steps and of ramps of x + a and y + b.

    One integral over x; y given x is Gaussian, so that its mean step and ramp are closed. Digits
    to spare for what cancels in a tail.
    """
    with mp.workdps(DIGITS // 2 + math.ceil((a * a + b * b) / 4)):
        a, b, rho = mp.mpf(a), mp.mpf(b), mp.mpf(rho)
        q = mp.sqrt((1 - rho) * (1 + rho))
        kink, blur = (-b / rho, q / abs(rho)) if rho else (mp.mpf(0), mp.mpf(1))

        def step(z: mp.mpf) -> mp.mpf:
            return _cdf(z / q) if q else mp.mpf(z > 0)

        def ramp(z: mp.mpf) -> mp.mpf:
            return z * _cdf(z / q) + q * _pdf(z / q) if q else max(z, mp.mpf(0))

        def integral(function: Callable[[mp.mpf], mp.mpf]) -> mp.mpf:
            start, stop = max(-a, -mp.mpf(REACH)), mp.mpf(REACH) + max(-a, 0)
            places = [kink + offset * blur for offset in (-9, -3, -1, 0, 1, 3, 9)]
            places += [start + step for step in range(2, 2 * math.ceil(REACH), 2)]
            edges = [start, *sorted(p for p in places if start < p < stop), stop]
            rule = {"method": "gauss-legendre", "maxdegree": 5}
            return mp.quad(lambda x: _pdf(x) * function(x), edges, **rule)

        both_step = integral(lambda x: step(b + rho * x))
        both_ramp = integral(lambda x: (x + a) * ramp(b + rho * x))
        means = (a * _cdf(a) + _pdf(a)) * (b * _cdf(b) + _pdf(b))
        product = _cdf(a) * _cdf(b)
        return both_step - product, both_ramp - means - rho * product


@cache
def oracle_rows(path: Path) -> list[dict[str, str | float]]:
    """The rows of an oracle table, numbers as float."""
    with path.open(newline="") as file:
        return [
            {key: text if key == "activation" else float(text) for key, text in row.items()}
            for row in csv.DictReader(file)
        ]
