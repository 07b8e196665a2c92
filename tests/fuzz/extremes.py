"""Activations at extreme moments: zero, tiny and huge deviations, knots, correlations of one."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Any

import torch
from torch import Tensor

import covprop as cp
from covprop.activations.moments import REACH
from tests.cases import CASES, EXACT, QUADRATURE, Case
from tests.fuzz import integrals
from tests.fuzz.outcomes import Refusal, Violation, Wrong, answer, compare, judged
from tests.layers import propagate

NAME = "extremes"
MEANS = [
    0.0,
    1e-300,
    -1e-300,
    1e-30,
    1e-3,
    -1e-3,
    0.3,
    -0.3,
    1.0,
    -1.0,
    4.0,
    -4.0,
    30.0,
    -30.0,
    1e4,
    -1e4,
]
STDDEVS = [0.0, 1e-160, 1e-30, 1e-8, 1e-3, 0.1, 1.0, 1.0, 3.0, 30.0, 1e4, 1e8]
RHOS = [0.0, 1e-9, 0.3, 0.3, 0.6, 0.9, 0.999999, 1.0]
STEEP = ("exp", "square", "pow(0)", "pow(3)", "pow(4)", "squared relu")
"""Functions whose moments overflow where the input's do not, or that have closed forms."""
WAVES = ("sin", "cos")
DIFFERENCES = ("tanhshrink",)
"""Functions that torch computes as the argument less something near it."""
INTEGRATED = 0.3
"""The part of pairs that are integrated in two dimensions."""


def _squared_relu(y: Tensor) -> Tensor:
    return torch.relu(y) ** 2


USERS: dict[str, Case] = {
    "user atan": Case(cp.activation(torch.atan), None, QUADRATURE, "user"),  # type: ignore[arg-type]
    "squared relu": Case(
        cp.activation(_squared_relu, kinks=(0.0,)), None, QUADRATURE, "user", (0.0,)  # type: ignore[arg-type]
    ),
}  # fmt: skip
FUNCTIONS = {**CASES, **USERS}
ODD = (
    "tanh",
    "erf",
    "sin",
    "softsign",
    "sign",
    "softshrink(0.5)",
    "hardshrink(0.5)",
    "hardtanh",
    "tanhshrink",
    "user atan",
)
BEYOND = math.erfc(REACH / 2**0.5)
"""The probability beyond the reach of quadrature; functions grow there no faster than their input,
but for those of closed form."""
ACCURACY = {EXACT: 1e-9, QUADRATURE: 1e-8}
"""Promised error of a covariance, relative to the standard deviations."""


@dataclass(frozen=True)
class Corner:
    """An activation, and the Gaussian that it is applied to."""

    name: str
    mean: Tensor
    stddev: Tensor
    signs: Tensor
    rho: float
    dtype: torch.dtype
    random: Random

    @property
    def case(self) -> Case:
        return FUNCTIONS[self.name]

    @property
    def function(self) -> Callable[[Any], Any]:
        return self.case.function

    @cached_property
    def covariance(self) -> Tensor:
        """In the dtype of the case: (1 - rho) diag(s^2) + rho (s o signs) (s o signs)^T."""
        vector = self.signs * self.stddev
        matrix = self.rho * vector[..., :, None] * vector[..., None, :]
        matrix = torch.diagonal_scatter(matrix, self.stddev.square(), dim1=-2, dim2=-1)
        matrix = matrix.to(self.dtype)
        varies = matrix.diagonal(dim1=-2, dim2=-1) > 0  # small variances are zero in float32
        return matrix * (varies[..., :, None] & varies[..., None, :])

    @property
    def semidefinite(self) -> bool:
        """Whether the covariance is, as numbers: those near the smallest ones have few digits.

        The last of 1e-320 is 5e-4 of it, and correlations with it are off by half of that.
        """
        matrix = self.covariance.double()
        inverse = matrix.diagonal(dim1=-2, dim2=-1).rsqrt()
        inverse = torch.where(inverse.isfinite(), inverse, 0)
        correlation = inverse[..., :, None] * matrix * inverse[..., None, :]
        eps = torch.finfo(self.dtype).eps
        return float(torch.linalg.eigvalsh(correlation).min()) > -matrix.shape[-1] * eps

    def gaussian(self) -> Any:
        return answer(lambda: cp.Gaussian(self.mean.to(self.dtype), self.covariance))

    def run(self, method: Any = None, dtype: torch.dtype | None = None) -> Any:
        """A Gaussian, or a refusal, of the numbers in the dtype of the case."""
        x = self.gaussian()
        if isinstance(x, Refusal):
            return x
        x = x if dtype is None else x.to(dtype)
        with torch.no_grad():
            return answer(lambda: propagate(self.function, x, method=method or cp.Exact()))

    @cached_property
    def result(self) -> Any:
        return self.run()

    @property
    def part(self) -> float:
        """What a covariance is promised to, relative to the deviations.

        What a unit far beyond a kink has left is by a^2 smaller than what it is the difference of.
        """
        rounding = 64 * torch.finfo(self.dtype).eps
        if self.dtype == torch.float32:
            places = torch.tensor(self.case.kinks or [0.0], dtype=torch.float64)
            distance = (self.mean[..., None] - places).abs().amin(-1)
            beyond = (distance / self.stddev.clamp(min=1e-30)).clamp(max=12.0)  # or underflow
            rounding *= 1 + float(beyond.max()) ** 2 / 4
        steep = bool(self.case.jumps) or float(self.stddev.max()) > 10  # wide: as good as a jump
        if steep and abs(self.rho) > 0.99:  # d arcsin(rho) = d rho / sqrt(1 - rho^2)
            rounding = torch.finfo(self.dtype).eps ** 0.5 * 4
        return max(rounding, ACCURACY[self.case.family])

    @property
    def marginal_part(self) -> float:
        """What means and variances are promised to."""
        return max(64 * torch.finfo(self.dtype).eps, ACCURACY[self.case.family])

    def deviations(self, y: cp.Gaussian) -> tuple[Tensor, Tensor]:
        """Those of a result (*batch, n), and below which of them they are rounding or underflow."""
        flat = (*y.batch_shape, y.event_shape.numel())
        s, level = (t.double().reshape(flat) for t in (y.stddev, y.mean.abs()))
        if self.case.declaration in ("elu", "selu", "celu"):  # exp(y) - 1, also in closed form
            level = level.clamp(min=1.0)
        rounded = 16 * torch.finfo(torch.float64).eps * level
        return s, rounded.clamp(min=torch.finfo(self.dtype).tiny ** 0.5)

    def allowed(self, y: cp.Gaussian) -> Tensor:
        """Errors of a covariance: promised, and from the rounding of the function itself."""
        s, rounded = self.deviations(y)
        s = torch.maximum(s, rounded)
        both = s[..., :, None] * rounded[..., None, :]
        return self.part * s[..., :, None] * s[..., None, :] + both + both.mT

    def text(self) -> str:
        return "\n".join([
            "import torch, covprop as cp; from tests.fuzz.extremes import FUNCTIONS",
            f"mean = torch.tensor({self.mean.tolist()}, dtype={self.dtype})",
            f"covariance = torch.tensor({self.covariance.tolist()}, dtype={self.dtype})",
            f"y = cp.propagate(FUNCTIONS[{self.name!r}].function, cp.Gaussian(mean, covariance))",
        ])  # fmt: skip


def random_corner(random: Random) -> Corner:
    name = random.choice(list(FUNCTIONS))
    size, batch = random.randint(1, 4), random.choice([(), (), (2,)])
    shape = (*batch, size)
    count = torch.Size(shape).numel()
    kinks = FUNCTIONS[name].kinks
    places = [
        *MEANS,
        *kinks,
        *kinks,
        *(kink + step for kink in kinks for step in (1e-9, -0.5, 2.0)),
    ]
    one_mean, one_width = random.choice(places), random.choice(STDDEVS)
    alike = random.random()
    means = [one_mean if alike < 0.4 else random.choice(places) for _ in range(count)]
    widths = [one_width if alike < 0.8 else random.choice(STDDEVS) for _ in range(count)]
    signs = [1.0 if random.random() < 0.7 else -1.0 for _ in range(count)]

    def tensor(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64).reshape(shape)

    dtype = random.choice([torch.float64, torch.float64, torch.float32])
    return Corner(
        name, tensor(means), tensor(widths), tensor(signs), random.choice(RHOS), dtype, random
    )


# The checks


def sound(corner: Corner) -> None:
    """Refused for a reason; else finite, symmetric, within Cauchy-Schwarz, semi-definite."""
    y = corner.result
    if isinstance(y, Refusal):
        if y.kind == "InvalidGaussian":  # denormal variances beside the covariances rounded to them
            return
        reach = float((corner.mean.abs() + 14 * corner.stddev).max()) ** 2
        if corner.name not in STEEP and reach < 1e-4 * torch.finfo(corner.dtype).max:
            raise Wrong(f"refused, and nothing overflows: {y.kind}: {y.message}")
        return
    matrix = y.covariance_matrix.double()
    if not (bool(torch.isfinite(y.mean).all()) and bool(torch.isfinite(matrix).all())):
        raise Wrong("moments are not finite")
    if not torch.equal(matrix, matrix.mT):
        raise Wrong("covariance is not symmetric")
    variance = matrix.diagonal(dim1=-2, dim2=-1)
    if bool((variance < 0).any()):
        raise Wrong(f"a variance is {float(variance.min())!r}")
    s, rounded = corner.deviations(y)
    varies = (s > rounded).double()
    s = torch.maximum(s, rounded)
    bound = s[..., :, None] * s[..., None, :]
    allowed = 2 * corner.allowed(y)  # the covariance is off, and so are the deviations
    compare("|covariance| beside the deviations", matrix, matrix.clamp(-bound, bound), allowed)
    correlation = torch.diagonal_scatter(matrix / bound, varies, dim1=-2, dim2=-1)
    both = varies[..., :, None] * varies[..., None, :]
    # A symmetric error and the sums of its rows, as a diagonal, are positive semi-definite.
    errors = torch.diag_embed((both * allowed / bound).sum(-1))
    lowest = torch.linalg.eigvalsh(correlation * both + errors)[..., 0].min()
    least = -64 * matrix.shape[-1] * torch.finfo(torch.float64).eps
    if float(lowest) < least and corner.semidefinite:
        raise Wrong(f"an eigenvalue of the correlations is {float(lowest):.2e}")


def marginals(corner: Corner) -> None:
    """Mean and variance against panels, or the closed form of exp."""
    y = corner.result
    if isinstance(y, Refusal):
        return
    eps = torch.finfo(corner.dtype).eps
    least = torch.finfo(corner.dtype).tiny
    variances = corner.covariance.diagonal(dim1=-2, dim2=-1).double().sqrt().reshape(-1).tolist()
    means = corner.mean.to(corner.dtype).double().reshape(-1).tolist()
    at = corner.random.randrange(len(means))
    mean, stddev = means[at], variances[at]
    if corner.name in WAVES and stddev > 50:
        return
    if corner.case.family == QUADRATURE and stddev < 1e-15 * abs(mean):  # on one floating number
        return
    if corner.name == "exp":
        level, spread = integrals.log_normal(mean, stddev)
        expected = integrals.Moments(level, spread, 1e-9 * level, 1e-9 * spread)
    else:
        expected = integrals.marginal(
            corner.function,
            mean,
            stddev,
            corner.case.kinks,
            corner.case.jumps,
            cancels=corner.name in DIFFERENCES,
        )
    s = expected.variance**0.5
    accuracy = max(8 * eps, 1e-8)
    size = max(abs(expected.mean), abs(mean), *map(abs, corner.case.kinks or (0.0,)))
    allowed = expected.mean_error + accuracy * s + 8 * eps * size + least
    found = float(y.mean.reshape(-1)[at]), float(y.variance.reshape(-1)[at])
    what = f"of {corner.name} at N({mean!r}, {stddev!r}^2)"
    number = partial(torch.tensor, dtype=torch.float64)
    compare(f"mean {what}", number(found[0]), number(expected.mean), number(allowed))
    allowed = expected.variance_error + 2 * accuracy * expected.variance + least
    compare(f"variance {what}", number(found[1]), number(expected.variance), number(allowed))


def pairs(corner: Corner) -> None:
    """The covariance of two elements against panels in both."""
    y = corner.result
    if isinstance(y, Refusal) or corner.mean.shape[-1] < 2 or not 1e-8 < corner.rho < 0.99:
        return
    if corner.random.random() > INTEGRATED:
        return
    widths = corner.stddev.reshape(-1, corner.stddev.shape[-1])[0, :2].tolist()
    means = corner.mean.to(corner.dtype).double().reshape(-1, corner.mean.shape[-1])[0, :2].tolist()
    if min(widths) < 1e-3 or corner.name in STEEP or (corner.name in WAVES and max(widths) > 3):
        return
    if any(width < 1e-5 * abs(mean) for mean, width in zip(means, widths, strict=True)):
        return
    matrix = y.covariance_matrix.double().reshape(-1, *corner.covariance.shape[-2:])[0]
    rho = corner.rho * float(corner.signs.reshape(-1)[0] * corner.signs.reshape(-1)[1])
    expected = integrals.pair(corner.function, means, widths, rho, corner.case.kinks)
    scale = float((matrix[0, 0] * matrix[1, 1]).sqrt())
    what = f"covariance of {corner.name} at means {means}, stddevs {widths}, correlation {rho}"
    allowed = (corner.part + 1e-8) * scale + 1e-15 * (1 + max(map(abs, means)) + max(widths)) ** 2
    compare(what, matrix[0, 1], torch.tensor(expected, dtype=torch.float64), torch.tensor(allowed))


def copies(corner: Corner) -> None:
    """At a correlation of one, elements of the same moments have their variance in common."""
    y = corner.result
    if isinstance(y, Refusal) or corner.rho != 1.0:
        return
    matrix = y.covariance_matrix.double()
    variance = matrix.diagonal(dim1=-2, dim2=-1)
    given = torch.stack([corner.mean, corner.stddev, corner.signs])
    same = (given[..., :, None] == given[..., None, :]).all(0)
    expected = torch.where(same, variance[..., :, None].expand_as(matrix), matrix)
    compare("covariance of copies", matrix, expected, corner.allowed(y))


def alone(corner: Corner) -> None:
    """Each of a batch, and each method that has the same marginals, gives the same."""
    y = corner.result
    if isinstance(y, Refusal):
        return
    assumed = corner.run(cp.AssumedDensity())
    if isinstance(assumed, Refusal):
        raise Wrong(f"refused by AssumedDensity alone: {assumed.message}")
    eps, least = corner.marginal_part, torch.finfo(corner.dtype).tiny
    if corner.case.family == QUADRATURE:  # which leaves what is beyond its reach
        size = corner.mean.abs() + corner.stddev
        least = least + BEYOND * size.reshape(y.mean.shape)
    compare("mean by AssumedDensity", assumed.mean, y.mean, eps * (y.mean.abs() + y.stddev) + least)
    allowed = corner.allowed(y).diagonal(dim1=-2, dim2=-1)
    compare("variance by AssumedDensity", assumed.variance, y.variance, allowed)
    if y.batch_shape:
        x = corner.gaussian()
        with torch.no_grad():
            one = answer(lambda: propagate(corner.function, x[0]))
        if isinstance(one, Refusal):
            raise Wrong(f"refused alone, and not in a batch: {one.message}")
        allowed = (eps * (y.mean.abs() + y.stddev) + least)[0]
        compare("mean alone", one.mean, y.mean[0], allowed)
        matrix = one.covariance_matrix
        compare("covariance alone", matrix, y.covariance_matrix[0], corner.allowed(one))


def doubled(corner: Corner) -> None:
    """float32 against float64 of the same numbers."""
    y = corner.result
    if isinstance(y, Refusal) or corner.dtype != torch.float32:
        return
    z = corner.run(dtype=torch.float64)
    if isinstance(z, Refusal):
        raise Wrong(f"refused in float64, and not in float32: {z.message}")
    least = 4 * torch.finfo(torch.float32).tiny
    eps = torch.finfo(torch.float32).eps
    compare("mean in float32", y.mean, z.mean, 4 * eps * (z.mean.abs() + z.stddev) + least)
    compare("covariance in float32", y.covariance_matrix, z.covariance_matrix,
            2 * corner.allowed(z))  # fmt: skip


def series(corner: Corner) -> None:
    """A long series is exact for moderate correlations."""
    y = corner.result
    if isinstance(y, Refusal) or corner.rho > 0.3:
        return
    z = corner.run(cp.Series(order=30))
    if isinstance(z, Refusal):
        raise Wrong(f"refused by Series alone: {z.message}")
    compare("covariance by Series(30)", z.covariance_matrix, y.covariance_matrix, corner.allowed(y))


def mirrored(corner: Corner) -> None:
    """An odd function of the negated input."""
    y = corner.result
    if isinstance(y, Refusal) or corner.name not in ODD:
        return
    x = corner.gaussian()
    with torch.no_grad():
        z = answer(lambda: propagate(lambda t: corner.function(-t), x))
    if isinstance(z, Refusal):
        raise Wrong(f"refused when negated: {z.message}")
    eps, least = 64 * torch.finfo(corner.dtype).eps, torch.finfo(corner.dtype).tiny
    s = y.stddev.double()
    size = y.mean.abs().double() + max(map(abs, corner.case.kinks), default=0.0)
    compare("mean when negated", z.mean, -y.mean, max(eps, 1e-9) * s + eps * size + least)
    compare("covariance when negated", z.covariance_matrix, y.covariance_matrix, corner.allowed(y))


def gradients(corner: Corner) -> None:
    """Finite with respect to mean and covariance."""
    y = corner.result
    if isinstance(y, Refusal):
        return
    if corner.case.jumps and bool((corner.stddev < 1e-100).any()):  # so are they, as 1 / variance
        return
    size = float(y.covariance_matrix.abs().max()) * float(corner.stddev.max())
    if size > 1e-2 * torch.finfo(corner.dtype).max:  # of the gradient by a standard deviation
        return
    mean = corner.mean.to(corner.dtype).requires_grad_()
    matrix = corner.covariance.clone().requires_grad_()
    y = answer(lambda: propagate(corner.function, cp.Gaussian(mean, matrix)))
    if isinstance(y, Refusal):
        raise Wrong(f"refused with gradients alone: {y.message}")
    loss = y.mean.sum() + y.covariance_matrix.sum()
    if not loss.requires_grad:
        return
    found = torch.autograd.grad(loss, [mean, matrix], allow_unused=True)
    for name, gradient in zip(["mean", "covariance"], found, strict=True):
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            raise Wrong(f"the gradient with respect to the {name} is not finite")


CHECKS: dict[str, Callable[[Corner], None]] = {
    "extremes: marginals": marginals,
    "extremes: pairs": pairs,
    "extremes: copies": copies,
    "extremes: alone": alone,
    "extremes: float32": doubled,
    "extremes: series": series,
    "extremes: mirrored": mirrored,
    "extremes: gradients": gradients,
}


def run(random: Random, only: str | None, tally: Any) -> Iterator[Violation]:
    """The violations of one random corner."""
    corner = random_corner(random)
    todo = {"extremes: sound": sound, **CHECKS}
    for name in todo if only is None else [only] if only in todo else []:
        tally.count(name)
        found = judged(name, partial(todo[name], corner), corner.text)
        if found is not None:
            yield found
            if found.check.startswith("extremes: sound"):
                return
        if name == "extremes: sound" and isinstance(corner.result, Refusal):
            tally.refuse(corner.result)
