"""What must hold of a propagation through any program, whatever it is."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

import covprop as cp
from covprop.carriers import cross_covariance
from covprop.kernels.rounding import CANCELLATION
from tests.fuzz.outcomes import Refusal, Wrong, answer, compare
from tests.fuzz.programs import JUMPS, accuracy
from tests.fuzz.trial import (
    CANCELLED,
    DRAWS,
    SAFETY,
    STEP,
    Trial,
    deviations,
    flat_mean,
    near,
    perturbed,
    rounding,
    worst_of_rows,
)

ORDERS = (24, 48), (48, 96)
"""Of two series: the longer one has the greater part of what the shorter one lacks.

Terms that take turns in sign may leave two lengths equally far off by chance, hardly three.
"""
LACKING = 8.0
"""How much more than their difference the longer one may lack: coefficients at a kink fall so that
it lacks half of that at a correlation of one, where they take turns in sign a few times that."""
BEGUN = 0.9
"""Of every deviation, what a series has at least."""
SINGLE_OVER_DOUBLE = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
OTHERS = [cp.Unscented(), cp.MonteCarlo(64), cp.ControlVariate(128)]
"""Methods that call the program at points, whose results are all that is looked at."""


def sound(trial: Trial) -> None:
    """Finite, symmetric to the last bit, no negative variance, positive semi-definite."""
    y = trial.result
    if isinstance(y, Refusal):
        return
    matrix = y.covariance_matrix
    if not (bool(torch.isfinite(y.mean).all()) and bool(torch.isfinite(matrix).all())):
        raise Wrong("moments are not finite")
    if not torch.equal(matrix, matrix.mT):
        worst = float((matrix - matrix.mT).abs().max())
        raise Wrong(f"covariance is not symmetric: entries differ by {worst:.2e}")
    definite(trial, y, torch.float64)


def definite(trial: Trial, y: cp.Gaussian, dtype: torch.dtype) -> None:
    """Eigenvalues of the correlations are not negative, up to errors on the way."""
    matrix = y.covariance_matrix.double()
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
    unit = torch.where(scale > 0, scale, 1.0)
    lowest = torch.linalg.eigvalsh(matrix / unit[..., None, None])[..., 0]
    part = accuracy(trial.program, dtype)
    s = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    simple = SAFETY * part * s.sum(-1) * s.amax(-1) / unit
    if bool((lowest >= -simple).all()):
        return
    allowed = rounding(trial, y, part)[1].sum(-1).amax(-1) / unit  # by Gershgorin
    if bool((lowest >= -allowed).all()):
        return
    at = int((lowest + allowed).reshape(-1).argmin())
    raise Wrong(
        f"an eigenvalue is {float(lowest.reshape(-1)[at]):.3e} of the largest variance where "
        f"{-float(allowed.reshape(-1)[at]):.1e} is allowed"
    )


def batch_is_loop(trial: Trial) -> None:
    """Each of a batch alone has the same result; a sketch draws for all: the same seed.

    Not where a warning says that one of the batch made all take a rougher formula.
    """
    y = trial.result
    if isinstance(trial.method, cp.Sketched) and not isinstance(y, Refusal):
        same_seed(trial)
        return
    if not trial.input.batch_dims or isinstance(y, Refusal | type(None)):
        return
    index = trial.random.randrange(len(y))
    one = trial.input.element(index, keep=True)
    alone = trial.run(input=one)
    if isinstance(alone, Refusal):
        raise Wrong(f"element {index} alone is refused, the batch is not: {alone.message}")
    part = accuracy(trial.program, torch.float64)
    try:
        near(trial, "of a batch", y[index : index + 1], alone, part, input=one)
    except Wrong:
        if not any("taken one by one" in text for text in trial.warned):
            raise


def same_seed(trial: Trial) -> None:
    """A seed gives the same numbers, whatever was run before."""
    two = [
        trial.run(method=replace(trial.method, generator=torch.Generator().manual_seed(5)))
        for _ in range(2)
    ]
    if not torch.equal(two[0].covariance_matrix, two[1].covariance_matrix):
        raise Wrong("the same seed gives two covariances")


def series_is_exact(trial: Trial) -> None:
    """Of a series twice as long the difference from exact covariances is of the last step's size.

    Not asked of jumps, whose coefficients fall too slowly to say so, nor where the series has yet
    to begin: that of a cosine is largest at an order of the variance.
    """
    if JUMPS & set(trial.program.operations):
        return
    try:
        _series_is_exact(trial, *ORDERS[0])
    except Wrong:
        _series_is_exact(trial, *ORDERS[1])


def _series_is_exact(trial: Trial, *orders: int) -> None:
    """Of the longer of two series."""
    exact = replace(trial, method=cp.Exact())
    z = exact.result
    short, long = (trial.run(method=cp.Series(order=order)) for order in orders)
    if any(isinstance(one, Refusal) for one in (z, short, long)):
        return
    s = deviations(z)
    step = flat_mean(long) - flat_mean(short), long.covariance_matrix - short.covariance_matrix
    lacking = (
        LACKING * step[0].abs().amax(-1, keepdim=True),
        LACKING * worst_of_rows(step[1].abs(), s),
    )
    found = (flat_mean(long), flat_mean(z)), (long.covariance_matrix, z.covariance_matrix)
    part = accuracy(trial.program, torch.float64)
    own = (
        SAFETY * part * (flat_mean(z).abs() + s),
        SAFETY * part * s[..., :, None] * s[..., None, :],
    )
    try:
        compare("mean by a series", *found[0], lacking[0] + own[0])
        compare("covariance by a series", *found[1], lacking[1] + own[1])
    except Wrong:
        cut = trial.run(method=cp.Series(order=orders[1], exact_variance=False))
        if isinstance(cut, Refusal) or bool((deviations(cut) < BEGUN * s).any()):
            return
        mean, matrix = rounding(exact, z, part)
        compare("mean by a series", *found[0], lacking[0] + mean)
        # What a layer lacks is positive semi-definite: at most the roots of what variances lack.
        # Exact variances of a layer are covariances too behind a linear map: by how much, the
        # series without them tells.
        rest = (s.square() - deviations(cut).square()).clamp(min=0).sqrt()
        tail = rest[..., :, None] * rest[..., None, :]
        tail = tail + (long.covariance_matrix - cut.covariance_matrix).abs()
        compare("covariance by a series", *found[1], torch.maximum(lacking[1], tail) + matrix)


def other_methods(trial: Trial) -> None:
    """Sound, and right without noise, by methods that take the program as a function."""
    other = replace(trial, method=trial.random.choice(OTHERS))
    sound(other)
    still(other)


def default(trial: Trial) -> None:
    """What the library chooses, of single numbers behind the program too, and of an empty batch."""
    function, _ = trial.program.build(torch.float64)
    x = trial.input.gaussian(torch.float64)
    dims = trial.input.batch_dims

    def total(x: torch.Tensor) -> torch.Tensor:
        y = function(x)
        return (y.flatten(dims) if y.dim() > dims else y[..., None]).sum(-1)

    def chosen(call: Callable[[torch.Tensor], torch.Tensor], given: cp.Gaussian) -> cp.Gaussian:
        with torch.no_grad(), warnings.catch_warnings():
            # What torch says of a variance of no elements.
            warnings.filterwarnings("ignore", ".*degrees of freedom")
            return cp.propagate(call, given)

    for call in (function, total):
        for given in (x, x[:0]) if dims else (x,):
            y = answer(partial(chosen, call, given))
            expected = (*given.batch_shape, *call(x.mean).shape[dims:])
            if isinstance(y, Refusal):
                continue
            if y.mean.shape != expected or y.batch_shape != given.batch_shape:
                raise Wrong(f"shape {tuple(y.mean.shape)}, expected {tuple(expected)}")
            matrix = y.covariance_matrix
            if not (y.mean.isfinite().all() and matrix.isfinite().all()):
                raise Wrong("moments are not finite")
            if not torch.equal(matrix, matrix.mT):
                raise Wrong("covariance is not symmetric")


def single_is_double(trial: Trial) -> None:
    """float32 is as near float64 as its rounding allows."""
    y = trial.run(torch.float32)
    z = trial.result
    if isinstance(y, Refusal) or isinstance(z, Refusal):
        return  # what overflows float32 is refused in it alone
    if isinstance(trial.method, cp.Sketched | cp.Split):
        return  # directions are drawn in their dtype, or those of a decomposition, which may turn
    if JUMPS & set(trial.program.operations):
        return  # what rounds to the jump, or has no variance in float32, is on another side of it
    matrix = y.covariance_matrix
    if not torch.equal(matrix, matrix.mT):
        raise Wrong("covariance in float32 is not symmetric")
    part = accuracy(trial.program, torch.float32)
    try:
        near(trial, "in float32", y, z, part)
    except Wrong:
        if trial.rough:
            return
        # What cancels to the rounding of float32 is zero in it, and so are its covariances.
        with patch.object(cross_covariance, "CANCELLATION", CANCELLATION * SINGLE_OVER_DOUBLE):
            zeroed = trial.run()
            if isinstance(zeroed, Refusal):
                raise
            near(trial, "in float32", y, zeroed, part)


def _noted(sizes: list[float], value: torch.Tensor) -> torch.Tensor:
    """The value, whose size is written down."""
    sizes.append(float(value.abs().max()))
    return value


def still(trial: Trial) -> None:
    """Without noise the result is the program's, and does not vary."""
    y = trial.run(noise=0.0)
    if isinstance(y, Refusal):
        return
    generator = torch.Generator().manual_seed(3)
    mean = trial.input.mean
    with torch.no_grad():
        largest: list[float] = []
        function, _ = trial.program.build(torch.float64, partial(_noted, largest))
        expected = function(mean)
        values = []
        for _ in range(DRAWS):
            function, _ = trial.program.build(torch.float64, perturbed(generator))
            values.append((function(mean) - expected).abs())
    part = torch.finfo(torch.float64).eps
    change = torch.stack(values).amax() * SAFETY * part / STEP
    # A function of torch may cancel, as 1 + erf does far below zero: roundings of its argument.
    own = SAFETY * part * expected.abs() + CANCELLED * part * max(largest, default=0.0)
    compare("mean without noise", y.mean, expected, change + own)
    # Components or points that are equal, whose results are so up to rounding.
    rounded = isinstance(trial.method, cp.Split | cp.Unscented | cp.MonteCarlo | cp.ControlVariate)
    limit = (SAFETY * part * float(expected.abs().max()) + float(change)) ** 2 if rounded else 0.0
    if bool((y.covariance_matrix.abs() > limit).any()):
        worst = float(y.covariance_matrix.abs().max())
        raise Wrong(f"covariance without noise is {worst:.2e}, not zero")
