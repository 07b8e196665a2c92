"""Everything about one classifier under one noise."""

import torch
from torch import Tensor

from covprop.compare import method_name
from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.progress import StageBar
from covprop.propagate import EXACT, propagate
from covprop.robustness.adversary import STEPS, attack
from covprop.robustness.balls import Ball
from covprop.robustness.budget import noise_budget, scaled
from covprop.robustness.fooling import noise_length
from covprop.robustness.logits import class_numbers, margins, others
from covprop.robustness.probabilities import (
    Probabilities,
    class_probabilities,
    misclassification_probability,
)
from covprop.robustness.randomisation import POINTS
from covprop.robustness.result import Robustness
from covprop.robustness.sampled import (
    Classifier,
    Model,
    check_inputs,
    check_samples,
    label_share,
    refuse_inference_mode,
    wins,
)
from covprop.robustness.sensitivity import Misclassification, sensitivity
from covprop.robustness.softmax import entropy, expected_softmax

SAMPLES = 10_000
"""Of Monte Carlo through the network, unless the user says."""
STAGES = 8
"""Of an analysis, for the bar."""


def analyse(
    model: Model,
    x: Gaussian,
    label: int | Tensor | None = None,
    *,
    method: Method = EXACT,
    probability: float = 0.99,
    samples: int = SAMPLES,
    points: int = POINTS,
    radius: float | Tensor | None = None,
    norm: float = 2.0,
    steps: int = STEPS,
    bounds: tuple[float, float] | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Robustness:
    """How a classifier decides under Gaussian noise on its input, by every measure there is.

    model, x, method: as for `cp.propagate`; the model returns logits, so leave a last softmax out
    (`cp.ApproximationWarning` tells of one), and a single one is the log-odds of class 1. label:
    the class to keep, or one for each of the batch; the network's own decision by default.
    probability: with which the noise budget keeps the label; samples: of the check by Monte Carlo;
    points: of cubature; radius, norm, steps, bounds: of the attack by projected gradient descent,
    by default in a ball whose radius is the root of the mean square of the noise (its length, or
    for norm=math.inf that of an element); progress shows a bar. The model is left as it is, and
    nothing is recorded for autograd.
    """
    refuse_inference_mode("analyse")
    check_samples(samples)
    check_inputs(x)
    x = x.detach()
    classifier = Classifier(model, x)
    classifier.warn_of_probabilities(x)
    predicted = classifier.decision()
    chosen = predicted if label is None else class_numbers(
        label, x.batch_shape, classifier.classes, x.device
    )  # fmt: skip
    of = Misclassification(points, generator)
    ball = Ball(_reach(x, radius, norm), norm, bounds)
    with StageBar(STAGES, progress) as bar, torch.no_grad():
        bar.begin("sensitivity")
        heat = sensitivity(model, x, chosen, of, method=method)
        bar.begin("propagation")
        logits = propagate(model, x, method=method)
        margin = margins(logits, chosen)
        bar.begin("class probabilities")
        found = class_probabilities(logits, points=points, generator=generator)
        wrong = misclassification_probability(logits, chosen, points=points, generator=generator)
        bar.begin("expected softmax")
        softmax = expected_softmax(logits, points=points, generator=generator)
        bar.begin("noise budget")
        budget = noise_budget(
            model, x, chosen, probability, method=method, points=points, generator=generator
        )
        bar.begin("samples")
        sampled = wins(classifier, x, samples, generator)
        bar.begin("samples at the budget")
        kept = wins(classifier, scaled(x, budget.level.nan_to_num()), samples, generator)
        bar.begin("attack")
        adversary = attack(classifier, x.mean, chosen, ball, steps, 1, generator)
    return Robustness(
        method=method_name(method),
        input_shape=tuple(x.event_shape),
        label=chosen,
        predicted=predicted,
        probabilities=found,
        sampled=sampled,
        samples=samples,
        misclassification=wrong,
        sampled_misclassification=_complement(label_share(sampled, chosen)),
        rivals=_rivals(chosen, classifier.classes),
        margin_mean=margin.mean,
        margin_stddev=margin.stddev,
        softmax=softmax,
        entropy=entropy(softmax),
        decision_entropy=entropy(found),
        sensitivity=heat,
        budget=budget,
        budget_sampled=label_share(kept, chosen),
        adversary=adversary,
    )


def _reach(x: Gaussian, radius: float | Tensor | None, norm: float) -> Tensor:
    """The radius of each input, (*batch,)."""
    if radius is None:
        return noise_length(x, norm)
    return torch.as_tensor(radius, dtype=x.dtype, device=x.device).expand(x.batch_shape)


def _rivals(label: Tensor, classes: int) -> Tensor:
    return others(label.reshape(-1, 1), classes).reshape(*label.shape, classes - 1)


def _complement(found: Probabilities) -> Probabilities:
    return Probabilities(1 - found.probability, found.stderr)
