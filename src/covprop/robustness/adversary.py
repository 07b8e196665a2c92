"""Projected gradient descent, and how often random noise of the same size fools a classifier."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from covprop.gaussian import Gaussian
from covprop.methods import Method, as_method
from covprop.propagate import AUTO
from covprop.robustness.budget import scaled
from covprop.robustness.classifier import (
    Ball,
    Classifier,
    Model,
    check_inputs,
    label_share,
    refuse_inference_mode,
    widened,
)
from covprop.robustness.decisions import decide
from covprop.robustness.estimates import Probabilities
from covprop.robustness.logits import (
    BINARY,
    POINTS,
    Randomisation,
    check_count,
)
from covprop.text_table import Table, Tabular, in_digits, plain

STEPS = 40
STRIDE = 2.5
"""Radii that all steps together could go."""
RIVALS = 4
"""Classes that are attacked one by one, as the nearest may be out of reach."""
SAMPLES = 1000
"""For each input and noise level."""
LEVELS = (0.05, 0.1, 0.2, 0.5, 1.0)


@final
@dataclass(frozen=True)
class Adversarial:
    """The outcome of an attack.

    Attributes:
        ball: Where the attack could go.
        correct: Whether the label wins without an attack, (*batch,).
        robust: Whether the label also wins after the attack.
        margin: The smallest margin y_label - y_j that the attack reached.
        found: The inputs with that margin, (*batch, *event).

    Example:
        attack = cp.robustness.adversarial_accuracy(nn.Linear(4, 3), torch.ones(2, 4), 0, 0.1)
        print(attack.clean_accuracy, attack.accuracy)
    """

    ball: Ball
    correct: Tensor
    robust: Tensor
    margin: Tensor
    found: Tensor

    @property
    def accuracy(self) -> float:
        """The share of inputs that are classified correctly after the attack."""
        return float(self.robust.double().mean())

    @property
    def clean_accuracy(self) -> float:
        """The share of inputs that are classified correctly without an attack."""
        return float(self.correct.double().mean())

    def pick(self, place: tuple[int, ...]) -> "Adversarial":
        """One of a batch."""
        radius = self.ball.radius
        if isinstance(radius, Tensor) and radius.dim():
            radius = radius[place]
        tensors = (self.correct, self.robust, self.margin, self.found)
        return Adversarial(
            replace(self.ball, radius=radius), *(tensor[place] for tensor in tensors)
        )


def adversarial_accuracy(
    model: Model,
    inputs: Tensor,
    labels: int | Tensor,
    radius: float | Tensor,
    *,
    steps: int = STEPS,
    norm: float = 2.0,
    restarts: int = 1,
    bounds: tuple[float, float] | None = None,
    batch_dims: int = 1,
    generator: torch.Generator | None = None,
) -> Adversarial:
    """Measure accuracy under projected gradient descent on the margin (Madry et al. 2018).

    Each attack takes steps of length 2.5 radius / steps along the gradient. The first one starts at
    the input and follows min_j y_label - y_j. Four more follow y_label - y_j for each of the four
    nearest classes j, because the nearest class may be out of reach. An attack that fails proves
    nothing.

    Args:
        model: Returns logits; it is not changed.
        inputs: (*batch, *event).
        labels: One class number, or one for each of the batch.
        radius: The radius of the ball around each input: one number, or one for each input.
        steps: Number of steps of each attack.
        norm: 2 or math.inf.
        restarts: Number of attacks on the margin; all but the first start at random points.
        bounds: (low, high) of the inputs' elements.
        batch_dims: How many dimensions of the inputs are a batch.
        generator: Draws the random points; torch's global one by default.

    Example:
        attack = cp.robustness.adversarial_accuracy(nn.Linear(4, 3), torch.ones(2, 4), 0, 0.1)
        print(attack.accuracy)
    """
    refuse_inference_mode("adversarial_accuracy")
    ball = Ball(radius, norm, bounds)
    x = Gaussian.constant(inputs.detach(), batch_dims)
    check_inputs(x)
    classifier = Classifier(model, x)
    classifier.refuse_randomness()
    return attack(classifier, inputs, labels, ball, steps, restarts, generator)


def attack(
    classifier: Classifier,
    inputs: Tensor,
    labels: int | Tensor,
    ball: Ball,
    steps: int,
    restarts: int,
    generator: torch.Generator | None,
) -> Adversarial:
    """Run projected gradient descent as `adversarial_accuracy` describes it."""
    check_count("steps", steps)
    check_count("restarts", restarts)
    batch = classifier.network.batch_shape
    centre, dims = inputs.detach(), len(batch)
    ball.check(centre)
    length = STRIDE * ball.at(centre, dims) / steps
    labels = classifier.labels(labels)
    starts: list[tuple[Tensor, Tensor | None]] = [(centre, None)]
    starts += [(centre, rival) for rival in _nearest_rivals(classifier, centre, labels)]
    starts += [(ball.random(centre, dims, generator), None) for _ in range(restarts - 1)]
    best, least, correct = centre, None, None
    for point, rival in starts:
        for step in range(steps + 1):
            margin, gradient = _margin_and_gradient(classifier, point, labels, rival)
            if least is None or correct is None:
                least, correct = margin, margin > 0
            better = margin < least
            least = torch.where(better, margin, least)
            best = torch.where(better.reshape(*batch, *(1,) * (centre.dim() - dims)), point, best)
            if step < steps:
                move = length * ball.direction(-gradient, dims)
                point = ball.project(point + move, centre, dims)
    assert least is not None
    assert correct is not None
    return Adversarial(ball, correct, least > 0, least, best)


@torch.no_grad()
def _nearest_rivals(classifier: Classifier, centre: Tensor, labels: Tensor) -> list[Tensor]:
    """The classes other than the label with the largest logits, each (*batch,)."""
    if classifier.classes <= BINARY:
        return []  # the smallest margin is that to the only rival
    logits = classifier(centre).scatter(-1, labels[..., None], -math.inf)
    return list(logits.topk(min(RIVALS, classifier.classes - 1), dim=-1).indices.unbind(-1))


def _margin_and_gradient(
    classifier: Classifier, point: Tensor, labels: Tensor, rival: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The smallest margin min_j y_label - y_j, and the gradient of it, or of that to one rival."""
    with torch.enable_grad():
        leaf = point.detach().clone().requires_grad_()  # of one that inference_mode made, too
        logits = classifier(leaf)
        own = logits.gather(-1, labels[..., None])[..., 0]
        margin = own - logits.scatter(-1, labels[..., None], -math.inf).amax(-1)
        objective = margin
        if rival is not None:
            objective = own - logits.gather(-1, rival[..., None])[..., 0]
        (gradient,) = torch.autograd.grad(objective.sum(), leaf)
    return margin.detach(), gradient


@final
@dataclass(frozen=True)
class FoolingRate(Tabular):
    """The share of inputs and noises that a network misclassifies, level by level.

    Attributes:
        levels: Factors of the standard deviations, (levels,).
        rate: By propagation, (levels,), with standard errors.
        sampled: By Monte Carlo, likewise.
        samples: Number of samples of each input and level.
        each: P(misclassified) of every input by propagation, (levels, *batch).
        adversarial: The share that projected gradient descent fooled, (levels,), if it was run.
        radius: Within this radius on average, (levels,).

    Example:
        print(cp.robustness.fooling_rate(nn.Linear(4, 3), torch.ones(2, 4), samples=100))
    """

    levels: Tensor
    rate: Probabilities
    sampled: Probabilities
    samples: int
    each: Tensor
    adversarial: Tensor | None = None
    radius: Tensor | None = None

    @property
    def table(self) -> Table:
        """A row for each level."""
        head = ["level", "fooled", "sampled"]
        columns = [_digits(self.levels)]
        columns += [
            [estimate.written(i) for i in range(len(self.levels))]
            for estimate in (self.rate, self.sampled)
        ]
        notes = [
            f"level: of the given noise; {self.samples:,} samples of each of "
            f"{self.each[0].numel()} inputs"
        ]
        if self.adversarial is not None and self.radius is not None:
            head += ["radius", "fooled by PGD"]
            columns += [_digits(self.radius), _digits(self.adversarial)]
            notes.append("radius: the average root mean square of the noise, for PGD")
        return Table(tuple(head), tuple(zip(*columns, strict=True)), words=0, notes=tuple(notes))

    def record(self) -> dict[str, Any]:
        """Every field as plain numbers and lists, for JSON."""
        record: dict[str, Any] = {
            "levels": self.levels,
            "rate": self.rate.probability, "rate_stderr": self.rate.stderr,
            "rate_assumption": self.rate.assumption,
            "sampled": self.sampled.probability, "sampled_stderr": self.sampled.stderr,
            "samples": self.samples, "each": self.each,
        }  # fmt: skip
        if self.adversarial is not None:
            record |= {"adversarial": self.adversarial, "radius": self.radius}
        return {
            key: plain(value.tolist() if isinstance(value, Tensor) else value)
            for key, value in record.items()
        }


def _digits(values: Tensor) -> list[str]:
    return [in_digits(value) for value in values.tolist()]


@torch.no_grad()
def fooling_rate(
    model: Model,
    inputs: Gaussian | Tensor,
    labels: int | Tensor | None = None,
    levels: Sequence[float] = LEVELS,
    *,
    batch_dims: int = 1,
    method: Method | str = AUTO,
    samples: int = SAMPLES,
    points: int = POINTS,
    generator: torch.Generator | None = None,
) -> FoolingRate:
    """Fooling rates under noise of each level (Bibi et al. 2018), by propagation and by sampling.

    The rate by propagation has the standard error of the integration and the estimated error from
    assumptions about the logits; the sampled rate has the standard error of sampling. Neither
    includes the choice of the inputs.

    Args:
        model: Returns logits; a single one is the log-odds of class 1.
        inputs: Gaussians, whose standard deviations are multiplied with the levels; or a tensor,
            for isotropic noise with the levels as its standard deviations.
        labels: A class number or one for each of the batch; by default the network's own decisions,
            so that the rate is the share of decisions that the noise changes.
        levels: Noise levels from 0.
        batch_dims: How many dimensions of a tensor are a batch.
        method: As for `cp.propagate`.
        samples: Number of samples of each input and level.
        points: Number of Sobol points in all, rounded up.
        generator: Draws samples and scramblings; torch's global one by default.

    Example:
        print(cp.robustness.fooling_rate(nn.Linear(4, 3), torch.ones(2, 4), levels=[0.1, 1.0]))
    """
    x, numbers = _noisy_inputs(inputs, levels, batch_dims, samples)
    method = as_method(method)
    classifier = Classifier(model, x)
    chosen = classifier.labels(labels)
    fixed = Randomisation.draw(points, generator)
    propagated, sampled = [], []
    for level in numbers.tolist():
        noisy = scaled(x, torch.full(x.batch_shape, level, dtype=x.dtype, device=x.device))
        decisions = decide(model, noisy, method, fixed, with_error=True)
        found = decisions.misclassification(chosen)
        share = label_share(classifier.sampled(noisy, samples, generator), chosen)
        if not decisions.counted:
            found = widened(found, Probabilities(1 - share.probability, share.stderr))
        propagated.append(found)
        sampled.append(share)
    each = torch.stack([one.probability for one in propagated])
    # All inputs share their points, so that errors add up; samples are independent.
    errors = torch.stack([one.stderr.double().mean() for one in propagated])
    assumed = [one.assumption for one in propagated]
    assumption = None
    if all(one is not None for one in assumed):
        assumption = torch.stack([one.double().mean() for one in assumed if one is not None])
    kept = torch.stack([one.probability.double().mean() for one in sampled])
    squares = torch.stack([one.stderr.double().square().sum() for one in sampled])
    spread = squares.sqrt() / x.batch_shape.numel()
    average = each.double().flatten(1).mean(1)
    return FoolingRate(
        numbers, Probabilities(average, errors, assumption), Probabilities(1 - kept, spread),
        samples, each,
    )  # fmt: skip


def fooling_and_adversary(
    model: Model, inputs: Gaussian | Tensor, labels: int | Tensor | None = None,
    levels: Sequence[float] = LEVELS, *, norm: float = 2.0, steps: int = STEPS,
    bounds: tuple[float, float] | None = None, batch_dims: int = 1, method: Method | str = AUTO,
    samples: int = SAMPLES, points: int = POINTS, generator: torch.Generator | None = None,
) -> FoolingRate:  # fmt: skip
    """`fooling_rate`, and the share that projected gradient descent fools in a ball of that size.

    The radius for each input is the root of the mean square of the noise: of its length for norm 2,
    of an element for math.inf.

    Args:
        model: As for `fooling_rate`.
        inputs: As for `fooling_rate`.
        labels: As for `fooling_rate`.
        levels: Noise levels from 0.
        norm: The norm of the ball, 2 or math.inf.
        steps: Number of steps of each attack.
        bounds: (low, high) of the inputs' elements.
        batch_dims: How many dimensions of a tensor are a batch.
        method: As for `cp.propagate`.
        samples: Number of samples of each input and level.
        points: Number of Sobol points in all, rounded up.
        generator: Draws samples and scramblings; torch's global one by default.

    Example:
        inputs = torch.ones(2, 4)
        print(cp.robustness.fooling_and_adversary(nn.Linear(4, 3), inputs, samples=100, steps=5))
    """
    refuse_inference_mode("fooling_and_adversary")
    rates = fooling_rate(
        model, inputs, labels, levels, batch_dims=batch_dims, method=method, samples=samples,
        points=points, generator=generator,
    )  # fmt: skip
    x, _ = _noisy_inputs(inputs, levels, batch_dims, samples)
    classifier = Classifier(model, x)
    chosen = classifier.labels(labels)
    fooled, radii = [], []
    for level in rates.levels.tolist():
        radius = level * noise_radius(x, norm)
        ball = Ball(radius, norm, bounds)
        fooled.append(1 - attack(classifier, x.mean, chosen, ball, steps, 1, generator).accuracy)
        radii.append(float(radius.double().mean()))
    return replace(
        rates,
        adversarial=torch.tensor(fooled, dtype=torch.float64),
        radius=torch.tensor(radii, dtype=torch.float64),
    )


def noise_radius(x: Gaussian, norm: float) -> Tensor:
    """The root of the mean square of the noise, (*batch,): of its length, or of an element."""
    variance = x.covariance.diagonal()
    return (variance.mean(-1) if norm == math.inf else variance.sum(-1)).sqrt()


def _noisy_inputs(
    inputs: Gaussian | Tensor, levels: Sequence[float], batch_dims: int, samples: int
) -> tuple[Gaussian, Tensor]:
    numbers = torch.as_tensor(levels, dtype=torch.float64)
    if numbers.dim() != 1 or not len(numbers) or not bool((numbers >= 0).all()):
        raise ValueError(f"levels are numbers from 0, not {levels!r}")
    check_count("samples", samples)
    x = (
        inputs
        if isinstance(inputs, Gaussian)
        else Gaussian.isotropic(inputs, stddev=1.0, batch_dims=batch_dims)
    )
    check_inputs(x)
    return x.detach(), numbers
