"""How often noise of a level fools a classifier, and how often an attack of the same size does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.propagate import EXACT, propagate
from covprop.report.table import Table, in_digits, plain
from covprop.robustness.adversary import STEPS, attack
from covprop.robustness.balls import Ball
from covprop.robustness.budget import scaled
from covprop.robustness.logits import Logits, class_numbers
from covprop.robustness.probabilities import Probabilities, misclassification
from covprop.robustness.randomisation import POINTS, Randomisation
from covprop.robustness.sampled import (
    Classifier,
    Model,
    check_inputs,
    check_samples,
    label_share,
    refuse_inference_mode,
    wins,
)

SAMPLES = 1000
"""For each input and level."""


@final
@dataclass(frozen=True)
class FoolingRate:
    """The share of inputs and noises for which a network does not say the label, level by level.

    levels (levels,): what the standard deviations were multiplied with; rate, sampled: by
    propagation and by Monte Carlo, (levels,), with standard errors; each (levels, *batch): the
    probability of misclassification of every input, by propagation; adversarial: the share that
    projected gradient descent fooled within `radius` (levels,), or None if it was not asked for.
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
        columns = [
            [in_digits(level) for level in self.levels.tolist()],
            _estimates(self.rate),
            _estimates(self.sampled),
        ]
        notes = [
            f"level: of the given noise; {self.samples:,} samples of each of "
            f"{self.each[0].numel()} inputs"
        ]
        if self.adversarial is not None and self.radius is not None:
            head += ["radius", "fooled by PGD"]
            columns += [[in_digits(value) for value in self.radius.tolist()]]
            columns += [[in_digits(value) for value in self.adversarial.tolist()]]
            notes.append("radius: the average root mean square of the noise, for PGD")
        return Table(tuple(head), tuple(zip(*columns, strict=True)), words=0, notes=tuple(notes))

    def __str__(self) -> str:
        """The table."""
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table.to_html()

    def record(self) -> dict[str, Any]:
        """Every field as plain numbers and lists, for JSON."""
        told: dict[str, Any] = {
            "levels": self.levels.tolist(),
            "rate": self.rate.probability.tolist(),
            "rate_stderr": self.rate.stderr.tolist(),
            "sampled": self.sampled.probability.tolist(),
            "sampled_stderr": self.sampled.stderr.tolist(),
            "samples": self.samples,
            "each": self.each.tolist(),
        }
        if self.adversarial is not None and self.radius is not None:
            told |= {"adversarial": self.adversarial.tolist(), "radius": self.radius.tolist()}
        return {key: plain(value) for key, value in told.items()}


@torch.no_grad()
def fooling_rate(
    model: Model,
    inputs: Gaussian | Tensor,
    labels: int | Tensor | None = None,
    levels: Sequence[float] = (0.05, 0.1, 0.2, 0.5, 1.0),
    *,
    batch_dims: int = 1,
    method: Method = EXACT,
    samples: int = SAMPLES,
    points: int = POINTS,
    generator: torch.Generator | None = None,
) -> FoolingRate:
    """Fooling rates under noise of each level (Bibi et al. 2018), and by sampling.

    inputs: Gaussians, whose standard deviations are multiplied with the levels; or a tensor, of
    whose dimensions batch_dims are a batch, for isotropic noise with the levels as its standard
    deviations. labels: the network's own decisions by default, so that the rate is the share of
    decisions that the noise changes. The standard error by propagation is that of cubature, the
    sampled one that of samples; neither has the choice of the inputs.
    """
    x, numbers = _settled(inputs, levels, batch_dims, samples)
    classifier = Classifier(model, x)
    chosen = _labels(classifier, x, labels)
    fixed = Randomisation.draw(points, generator)
    found, counted = [], []
    for level in numbers.tolist():
        noisy = scaled(x, torch.full(x.batch_shape, level, dtype=x.dtype, device=x.device))
        given = Logits.of(propagate(model, noisy, method=method))
        found.append(misclassification(given, chosen, fixed))
        counted.append(label_share(wins(classifier, noisy, samples, generator), chosen))
    each = torch.stack([one.probability for one in found])
    errors = torch.stack([one.stderr.double().mean() for one in found])  # as all have their points
    kept = torch.stack([one.probability.double().mean() for one in counted])
    spread = torch.stack([_stderr_of_average(one.stderr) for one in counted])
    average = each.double().flatten(1).mean(1)
    return FoolingRate(
        numbers, Probabilities(average, errors), Probabilities(1 - kept, spread), samples, each
    )


def fooling_and_adversary(
    model: Model,
    inputs: Gaussian | Tensor,
    labels: int | Tensor | None = None,
    levels: Sequence[float] = (0.05, 0.1, 0.2, 0.5, 1.0),
    *,
    norm: float = 2.0,
    steps: int = STEPS,
    bounds: tuple[float, float] | None = None,
    batch_dims: int = 1,
    method: Method = EXACT,
    samples: int = SAMPLES,
    points: int = POINTS,
    generator: torch.Generator | None = None,
) -> FoolingRate:
    """`fooling_rate` beside the share that projected gradient descent fools in a ball of that size.

    The radius for each input is the root of the mean square of the noise: of its length for norm 2,
    of an element for math.inf.
    """
    refuse_inference_mode("fooling_and_adversary")
    rates = fooling_rate(
        model, inputs, labels, levels, batch_dims=batch_dims, method=method, samples=samples,
        points=points, generator=generator,
    )  # fmt: skip
    x, _ = _settled(inputs, levels, batch_dims, samples)
    classifier = Classifier(model, x)
    chosen = _labels(classifier, x, labels)
    size = noise_length(x, norm)
    fooled, radii = [], []
    for level in rates.levels.tolist():
        ball = Ball(level * size, norm, bounds)
        done = attack(classifier, x.mean, chosen, ball, steps, 1, generator)
        fooled.append(1 - done.accuracy)
        radii.append(float((level * size).double().mean()))
    adversarial = torch.tensor(fooled, dtype=torch.float64)
    return FoolingRate(
        rates.levels, rates.rate, rates.sampled, rates.samples, rates.each, adversarial,
        torch.tensor(radii, dtype=torch.float64),
    )  # fmt: skip


def noise_length(x: Gaussian, norm: float) -> Tensor:
    """The root of the mean square of the noise, (*batch,): of its length, or of an element."""
    variance = x.covariance.diagonal()
    return (variance.mean(-1) if norm == math.inf else variance.sum(-1)).sqrt()


def _settled(
    inputs: Gaussian | Tensor, levels: Sequence[float], batch_dims: int, samples: int
) -> tuple[Gaussian, Tensor]:
    numbers = torch.as_tensor(levels, dtype=torch.float64)
    if numbers.dim() != 1 or not len(numbers) or not bool((numbers >= 0).all()):
        raise ValueError(f"levels are numbers from 0, not {levels!r}")
    check_samples(samples)
    x = inputs if isinstance(inputs, Gaussian) else Gaussian.isotropic(inputs, 1.0, batch_dims)
    check_inputs(x)
    return x.detach(), numbers


def _labels(classifier: Classifier, x: Gaussian, labels: int | Tensor | None) -> Tensor:
    if labels is None:
        return classifier.decision()
    return class_numbers(labels, x.batch_shape, classifier.classes, x.device)


def _stderr_of_average(errors: Tensor) -> Tensor:
    """Of independent estimates."""
    return errors.double().square().sum().sqrt() / errors.numel()


def _estimates(found: Probabilities) -> list[str]:
    return [
        f"{in_digits(value)} ± {in_digits(error, 1)}" if error else in_digits(value)
        for value, error in zip(found.probability.tolist(), found.stderr.tolist(), strict=True)
    ]
