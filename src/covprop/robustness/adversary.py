"""Projected gradient descent: the usual, coarser measure of robustness."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from covprop.gaussian import Gaussian
from covprop.robustness.balls import Ball
from covprop.robustness.logits import class_numbers
from covprop.robustness.sampled import Classifier, Model

STEPS = 40
STRIDE = 2.5
"""Radii that all steps together could go."""


@final
@dataclass(frozen=True)
class Adversarial:
    """What an attack did: everything (*batch,), found (*batch, *event) the inputs it ended at.

    correct: the label wins without an attack; robust: also after it; margin: the smallest
    y_label - y_j that the attack came to.
    """

    ball: Ball
    correct: Tensor
    robust: Tensor
    margin: Tensor
    found: Tensor

    @property
    def accuracy(self) -> float:
        """The share of inputs that no attack changed, of all of them."""
        return float(self.robust.double().mean())

    @property
    def clean_accuracy(self) -> float:
        """The share that is right without an attack."""
        return float(self.correct.double().mean())

    def pick(self, place: tuple[int, ...]) -> "Adversarial":
        """One of a batch."""
        radius = self.ball.radius
        if isinstance(radius, Tensor) and radius.dim():
            radius = radius[place]
        return Adversarial(
            replace(self.ball, radius=radius), self.correct[place], self.robust[place],
            self.margin[place], self.found[place],
        )  # fmt: skip


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
    """Accuracy under projected gradient descent on the margin (Madry et al. 2018).

    inputs (*batch, *event); radius: of a ball in the norm 2 or math.inf around each; the first
    attack starts at the input itself, further ones (restarts) at random points of the ball, each
    takes so many steps of 2.5 radius / steps along the gradient of min_j y_label - y_j. bounds: of
    the inputs' elements. An attack that fails proves nothing. The model is left as it is.
    """
    ball = Ball(radius, norm, bounds)
    classifier = Classifier(model, Gaussian.constant(inputs.detach(), batch_dims))
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
    """The same for a classifier that has been looked at."""
    for name, count in (("steps", steps), ("restarts", restarts)):
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} is a whole number from 1, not {count!r}")
    batch = classifier.network.batch_shape
    centre, dims = inputs.detach(), len(batch)
    ball.check(centre)
    length = STRIDE * ball.at(centre, dims) / steps
    best, least, correct = centre, None, None
    chosen = class_numbers(labels, batch, classifier.classes, centre.device)
    for restart in range(restarts):
        point = ball.random(centre, dims, generator) if restart else centre
        for step in range(steps + 1):
            margin, gradient = _margin_and_gradient(classifier, point, chosen)
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


def _margin_and_gradient(
    classifier: Classifier, point: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = point.detach().requires_grad_()
        margin = smallest_margin(classifier(leaf), chosen)
        (gradient,) = torch.autograd.grad(margin.sum(), leaf)
    return margin.detach(), gradient


def smallest_margin(logits: Tensor, label: Tensor) -> Tensor:
    """min_j y_label - y_j, (*batch,)."""
    own = logits.gather(-1, label[..., None])
    rivals = logits.scatter(-1, label[..., None], -math.inf)
    return (own - rivals.amax(-1, keepdim=True))[..., 0]
