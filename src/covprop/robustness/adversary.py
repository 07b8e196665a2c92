"""Projected gradient descent: the usual, coarser measure of robustness."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from covprop.gaussian import Gaussian
from covprop.robustness.balls import Ball
from covprop.robustness.logits import class_numbers
from covprop.robustness.sampled import Classifier, Model, check_inputs, refuse_inference_mode

STEPS = 40
STRIDE = 2.5
"""Radii that all steps together could go."""
PAIR = 2
RIVALS = 4
"""Classes that are led to one by one: the nearest may be one that cannot be reached."""


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
    takes so many steps of 2.5 radius / steps along the gradient of min_j y_label - y_j; and again
    from the input along that of y_label - y_j for each of the four nearest classes j, as a nearest
    class that is out of reach would hold the first one back. bounds: of the inputs' elements. An
    attack that fails proves nothing. The model is left as it is.
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
    starts: list[tuple[Tensor, Tensor | None]] = [(centre, None)]
    starts += [(centre, rival) for rival in _nearest(classifier, centre, chosen)]
    starts += [(ball.random(centre, dims, generator), None) for _ in range(restarts - 1)]
    for start, rival in starts:
        point = start
        for step in range(steps + 1):
            margin, gradient = _margin_and_gradient(classifier, point, chosen, rival)
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
def _nearest(classifier: Classifier, centre: Tensor, chosen: Tensor) -> list[Tensor]:
    """The classes beside the label with the largest logits, each (*batch,); none if one is left."""
    if classifier.classes <= PAIR:
        return []
    logits = classifier(centre).scatter(-1, chosen[..., None], -math.inf)
    return list(logits.topk(min(RIVALS, classifier.classes - 1), dim=-1).indices.unbind(-1))


def _margin_and_gradient(
    classifier: Classifier, point: Tensor, chosen: Tensor, rival: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The smallest margin, and the gradient of it, or of that to one rival."""
    with torch.enable_grad():
        leaf = point.detach().clone().requires_grad_()  # of one that inference_mode made, too
        logits = classifier(leaf)
        margin = smallest_margin(logits, chosen)
        way = margin if rival is None else _apart(logits, chosen, rival)
        (gradient,) = torch.autograd.grad(way.sum(), leaf)
    return margin.detach(), gradient


def _apart(logits: Tensor, label: Tensor, rival: Tensor) -> Tensor:
    """y_label - y_rival, (*batch,)."""
    both = logits.gather(-1, torch.stack([label, rival], dim=-1))
    return both[..., 0] - both[..., 1]


def smallest_margin(logits: Tensor, label: Tensor) -> Tensor:
    """min_j y_label - y_j, (*batch,)."""
    own = logits.gather(-1, label[..., None])
    rivals = logits.scatter(-1, label[..., None], -math.inf)
    return (own - rivals.amax(-1, keepdim=True))[..., 0]
