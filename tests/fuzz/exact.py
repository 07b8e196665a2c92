"""Programs whose moments are known: at small noise, of second degree, or one layer deep."""

import torch
from torch import Tensor

import covprop as cp
from tests.fuzz.outcomes import Refusal, Wrong, compare
from tests.fuzz.programs import JUMPS, accuracy
from tests.fuzz.trial import SAFETY, Trial, deviations, rounding

SMALL = 2.0**-13
"""Noise at which a program is its Jacobian."""
REACH = 2.0
"""In steps of one standard deviation and more, how far around the mean a Jacobian is looked at."""
SAMPLES, SELDOM = 2**14, 200
MORE = 16
"""Times as many samples, to confirm what they say."""
UNSEEN = 20.0
"""Samples that are expected where chance may leave out all: one in exp(20) times."""
NUDGE, UNSTEADY = 1e-14, 1e-3
"""A relative change of samples that is of rounding, and what it may change a result by."""
DRAWN = 16
"""Choices of signs for what values on the way have of curvature."""
SKETCHED = 0.7
"""Six standard errors of a sketch of 64 directions, relative to the deviations."""


def jacobians(trial: Trial, points: Tensor) -> tuple[Tensor, Tensor]:
    """Values (k, m) and Jacobians (k, m, n) of the program at points (k, *event)."""
    function, _ = trial.program.build(torch.float64)
    points = points.clone().requires_grad_()
    values = function(points).reshape(len(points), -1)
    rows = [
        torch.autograd.grad(column.sum(), points, retain_graph=True, allow_unused=True)[0]
        if column.requires_grad else None
        for column in values.unbind(-1)
    ]  # fmt: skip
    still = torch.zeros_like(points)
    matrix = torch.stack([still if row is None else row for row in rows], 1)
    return values.detach(), matrix.detach().reshape(*values.shape, -1)


def linear_at_small_noise(trial: Trial) -> None:
    """Cov -> J S J^T: a wrong dependence between branches shows at any small noise.

    What is wrong at one noise and right at a smaller one is the tail of a kink beyond `REACH`.
    """
    try:
        _linear_at(trial, SMALL)
    except Wrong:
        _linear_at(trial, SMALL / 100)


def _linear_at(trial: Trial, noise: float) -> None:
    """The covariance at one noise.

    The rest r = f(m + d) - f(m) - J d has deviations of at most sup |J(m + d) - J(m)| |d|.
    """
    if isinstance(trial.method, cp.AssumedDensity) or JUMPS & set(trial.program.operations):
        return  # variances alone; or no Jacobian
    one = trial.first
    y = trial.run(noise=noise, input=one)
    if isinstance(y, Refusal):
        return
    x = one.gaussian(torch.float64, noise)
    event = trial.program.event
    mean = x.mean.reshape(event)
    matrix = x.covariance_matrix.reshape(-1, mean.numel(), mean.numel())[0]
    width = matrix.diagonal().sqrt()
    generator = torch.Generator().manual_seed(5)
    directions = torch.randn((10, *event), generator=generator, dtype=torch.float64)
    directions = REACH * width.reshape(event) * directions.sign() * (directions.abs() + 1)
    values, jacobian = jacobians(trial, torch.cat([mean[None], mean + directions]))
    here = jacobian[0]
    rest = ((jacobian - here).abs().amax(0) * width).sum(-1)
    jumped = values[1:] - values[0] - directions.reshape(10, -1) @ here.mT
    rest = rest + jumped.abs().amax(0)
    expected = here @ matrix @ here.mT
    s = expected.diagonal().clamp(min=0).sqrt()
    allowed = 4 * (torch.outer(s, rest) + torch.outer(rest, s) + torch.outer(rest, rest))
    part = accuracy(trial.program, torch.float64)
    own = SKETCHED if isinstance(trial.method, cp.Sketched) else SAFETY * part
    found = y.covariance_matrix.reshape(-1, len(s), len(s))[0]
    try:
        compare(
            f"covariance at noise {noise:g}", found, expected, allowed + own * torch.outer(s, s)
        )
        compare(f"mean at noise {noise:g}", y.mean.reshape(-1), values[0], 4 * rest + own * s)
    except Wrong:
        mean_rest, matrix_rest = rounding(trial, y, part, noise=noise, input=one)
        rest = rest + carried(trial, mean, directions)
        allowed = 4 * (torch.outer(s, rest) + torch.outer(rest, s) + torch.outer(rest, rest))
        allowed = allowed + own * torch.outer(s, s) + matrix_rest.reshape(expected.shape)
        compare(f"covariance at noise {noise:g}", found, expected, allowed)
        allowed = 4 * rest + own * s + mean_rest.reshape(-1)
        compare(f"mean at noise {noise:g}", y.mean.reshape(-1), values[0], allowed)


def carried(trial: Trial, mean: Tensor, directions: Tensor) -> Tensor:
    """What the curvature of values on the way does to the result, if it has any sign.

    A kink at the mean takes the curvature of its argument for noise that may be on either side,
    where the argument itself is on one: of min(x^2, x^4) at 0. Signs at random would cancel where
    a value is only moved on, so all are also taken alike.
    """
    found: list[Tensor] = []

    def bend(value: Tensor) -> Tensor:
        here, ahead, behind = value[:1], *value[1:].chunk(2)
        found.append((ahead + behind - 2 * here).abs().amax(0, keepdim=True) / 2)
        return value

    generator = torch.Generator().manual_seed(9)

    def shifted(value: Tensor) -> Tensor:
        size = found[len(seen)]
        seen.append(size)
        signs = 2 * torch.randint(0, 2, (DRAWN, *size.shape[1:]), generator=generator) - 1
        signs[:2] = torch.tensor([1, -1]).reshape(2, *(1,) * (size.dim() - 1))
        return value + size * signs

    points = torch.cat([mean[None], mean + directions, mean - directions])
    seen: list[Tensor] = []
    with torch.no_grad():
        trial.program.build(torch.float64, bend)[0](points)
        expected = trial.program.build(torch.float64)[0](mean[None])
        values = trial.program.build(torch.float64, shifted)[0](mean.expand(DRAWN, *mean.shape))
    return (values - expected).abs().amax(0).reshape(-1)


def quadratic(trial: Trial) -> None:
    """A polynomial of second degree has moments in closed form."""
    if not isinstance(trial.method, cp.Exact) or isinstance(trial.result, Refusal):
        return
    one = trial.first
    y = trial.run(input=one)
    mean, matrix, scale = second_degree(trial, one.gaussian(torch.float64))
    found = y.mean.reshape(-1), y.covariance_matrix.reshape(matrix.shape)
    eps = torch.finfo(torch.float64).eps
    own = SAFETY * eps * scale
    try:
        compare("mean of a quadratic", found[0], mean, torch.tensor(own))
        compare("covariance of a quadratic", found[1], matrix, torch.tensor(own * scale))
    except Wrong:
        mean_rest, rest = rounding(trial, y, eps, input=one)
        compare("mean of a quadratic", found[0], mean, mean_rest.reshape(-1) + own)
        rest = rest.reshape(matrix.shape) + own * scale
        compare("covariance of a quadratic", found[1], matrix, rest)


def second_degree(trial: Trial, x: cp.Gaussian) -> tuple[Tensor, Tensor, float]:
    """The moments of y = c + b d + d^T A d, which its values tell; the size of what was added."""
    size = x.event_shape.numel()
    mean, matrix = x.mean.reshape(size), x.covariance_matrix.reshape(-1, size, size)[0]
    eye = torch.eye(size, dtype=torch.float64)
    steps = torch.cat([0 * eye[:1], eye, -eye, (eye[:, None] + eye[None]).reshape(-1, size)])
    function, _ = trial.program.build(torch.float64)
    with torch.no_grad():
        values = function((mean + steps).reshape(-1, *trial.program.event)).reshape(len(steps), -1)
    centre, up, down = values[0], values[1 : size + 1], values[size + 1 : 2 * size + 1]
    both = values[2 * size + 1 :].reshape(size, size, -1)
    b = (up - down).mT / 2
    a = (both - up[:, None] - up[None] + centre).movedim(-1, 0) / 2
    a = a - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1))
    a = a + torch.diag_embed(((up + down) / 2 - centre).mT)
    spread = a @ matrix
    expected = b @ matrix @ b.mT + 2 * torch.einsum("iab,jba->ij", spread, spread)
    scale = float(values.abs().max()) * (1 + float(matrix.diagonal().max()))
    return centre + spread.diagonal(dim1=-2, dim2=-1).sum(-1), expected, scale


def sampled(trial: Trial) -> None:
    """One layer of activations and linear maps around it: exact at any noise."""
    if not isinstance(trial.method, cp.Exact) or isinstance(trial.result, Refusal):
        return
    if {"exp", "pow"} & set(trial.program.operations) and trial.input.noise > 1:
        return  # moments of events that are in no sample
    y = trial.run(input=trial.first)
    generator = torch.Generator().manual_seed(trial.random.randrange(2**31))
    try:
        _near_samples(trial, y, SAMPLES, generator, 0.0)
    except Wrong:  # of rare events, errors of samples are often too small; a real error stays
        _near_samples(trial, y, MORE * SAMPLES, generator, UNSEEN)


def _near_samples(
    trial: Trial, y: cp.Gaussian, count: int, generator: torch.Generator, chance: float
) -> None:
    size = trial.program.result.size
    draws = trial.first.gaussian(torch.float64).sample(count, generator)
    function, _ = trial.program.build(torch.float64)
    middle = draws.mean(0)
    nudge = torch.randn(draws.shape, generator=generator, dtype=draws.dtype)
    with torch.no_grad():
        values, wide, nudged = (
            function(points.reshape(count, *trial.program.event)).reshape(count, size)
            for points in (draws, middle + 2 * (draws - middle), draws * (1 + NUDGE * nudge))
        )
    # Where the argument of a jump is zero but for rounding, samples are on either side of it.
    steady = (nudged - values).abs().mean(0) <= UNSTEADY * (1 + values.abs().amax(0))
    centred = values - values.mean(0)
    # What happens in none of the samples, as a sign that is turned at 4.4 standard deviations, has
    # at most the size of what happens twice as far, in as many samples as chance may leave out.
    unseen = (wide - values.mean(0)).abs().amax(0)
    s = torch.maximum(centred.std(0), deviations(y).reshape(-1))
    # a sum that cancels has a variance of eps, whose root is the mean of an activation of it
    width = float(draws.std(0).max())
    rounded = 1e-8 * s + 1e-13 * values.abs().amax(0) + 1e-7 * width
    compare(
        "mean of samples",
        y.mean.reshape(-1)[steady],
        values.mean(0)[steady],
        (6 * s / count**0.5 + chance / count * unseen + rounded)[steady],
    )
    # what happens in too few samples is not in their own error
    often = (centred.abs() > 0.01 * centred.abs().amax(0)).sum(0) > SELDOM
    often &= steady & (centred.abs().amax(0) > rounded)
    if not bool(often.any()):
        return
    centred, s, unseen = centred[:, often], s[often], unseen[often]
    products, squares = (t.mT @ t / count for t in (centred, centred.square()))
    error = (squares - products.square()).clamp(min=0).sqrt() / count**0.5
    allowed = 6 * error + (1e-8 + 20 / count) * torch.outer(s, s) + rounded[often].square().max()
    allowed = allowed + chance / count * torch.outer(unseen, unseen)
    found = y.covariance_matrix.reshape(size, size)[often][:, often]
    compare("covariance of samples", found, products, allowed)
