"""Everything about one classifier under one noise: the analysis, and its result as a table."""

import math
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from covprop.diagnostics.compare import method_name
from covprop.error_estimate import ErrorEstimate
from covprop.gaussian import Gaussian
from covprop.methods import Auto, Method, QuasiMonteCarlo, as_method
from covprop.methods.progress import StageBar
from covprop.propagate import AUTO, GAUSSIAN_LAYERS
from covprop.robustness.adversary import STEPS, Adversarial, attack, noise_radius
from covprop.robustness.budget import FOUND, NoiseBudget, noise_budget, scaled
from covprop.robustness.classifier import (
    Ball,
    Classifier,
    Model,
    agrees_with_samples,
    check_inputs,
    label_share,
    refuse_inference_mode,
    widened,
)
from covprop.robustness.decisions import decide
from covprop.robustness.estimates import Probabilities
from covprop.robustness.logits import (
    POINTS,
    Randomisation,
    check_count,
    entropy,
    margins,
    others,
)
from covprop.robustness.sensitivity import Misclassification, sensitivity
from covprop.text_table import Table, Tabular, in_digits, in_percent, in_percent_unlike, plain

SAMPLES = 10_000
"""Of Monte Carlo through the network, by default."""
STAGES = 8
"""Of an analysis, for the progress bar."""
ROWS = 50
"""Inputs of a batch, or classes, that a table has a row for."""
RECORDED = (
    "method", "error", "notes", "counted", "input_shape", "samples", "label", "predicted", "agrees",
    "budget_agrees", "probabilities", "sampled", "misclassification", "sampled_misclassification",
    "softmax", "budget_sampled", "rivals", "margin_mean", "margin_stddev", "entropy",
    "decision_entropy", "sensitivity", "budget", "adversary",
)  # fmt: skip


@final
@dataclass(frozen=True)
class Robustness(Tabular):
    """How a classifier decides under noise on its input; print it to see a table.

    Tensors have the batch first; classes are in the order of the logits, and a model with one logit
    has two (0 and 1).

    Attributes:
        method: The method of propagation that was used, as it is written.
        input_shape: The event of the input: the shape of one heat map.
        label: The class that is to be kept, (*batch,).
        predicted: The network's decision without noise, (*batch,).
        probabilities: P(class has the largest logit) by propagation, (*batch, classes).
        sampled: The same by Monte Carlo through the network.
        samples: Of that Monte Carlo run.
        misclassification: P(another class than the label), (*batch,), by propagation.
        sampled_misclassification: The same by Monte Carlo.
        rivals: Class numbers of the margins, (*batch, classes - 1).
        margin_mean: E[y_label - y_rival], (*batch, classes - 1).
        margin_stddev: The standard deviations of the same.
        softmax: E[softmax(logits)], (*batch, classes).
        entropy: Of the expected softmax, in nats, (*batch,).
        decision_entropy: Of the class probabilities, in nats, (*batch,).
        sensitivity: d P(misclassified) / d Var(element), (*batch, *input_shape).
        budget: The largest multiple of the given noise that keeps the label.
        budget_sampled: P(label) at that level by Monte Carlo, (*batch,).
        adversary: Projected gradient descent in a ball.
        error: The estimated error of means and standard deviations of the logits, if it is known.
        notes: What the method did and why, in sentences.
        counted: Whether decisions were counted at points, which assumes nothing about the logits.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(2, 4), stddev=0.1, batch_dims=1)
        result = cp.robustness.analyse(nn.Linear(4, 3), x)
        print(result[0], result.record()["agrees"])
    """

    method: str
    input_shape: tuple[int, ...]
    label: Tensor
    predicted: Tensor
    probabilities: Probabilities
    sampled: Probabilities
    samples: int
    misclassification: Probabilities
    sampled_misclassification: Probabilities
    rivals: Tensor
    margin_mean: Tensor
    margin_stddev: Tensor
    softmax: Probabilities
    entropy: Tensor
    decision_entropy: Tensor
    sensitivity: Tensor
    budget: NoiseBudget
    budget_sampled: Probabilities
    adversary: Adversarial
    error: ErrorEstimate | None = None
    notes: tuple[str, ...] = ()
    counted: bool = False

    @property
    def agrees(self) -> Tensor:
        """Whether samples and propagation give the same probability of every class, (*batch,).

        Differences that chance explains are ignored, as in `cp.compare`: a correct result disagrees
        with a probability of about 0.01. If they disagree, the logits are not Gaussian enough, and
        the samples are right.
        """
        return agrees_with_samples(self.probabilities, self.sampled, self.samples).all(-1)

    @property
    def budget_agrees(self) -> Tensor:
        """Whether samples keep the label at the noise budget as often as intended, (*batch,).

        The comparison is that of `agrees`. It is True if there is no noise to sample, because the
        label is lost without noise or the input does not vary. A budget at the largest level is a
        lower bound, so samples may keep the label more often.
        """
        target = torch.full_like(self.budget_sampled.probability, self.budget.target)
        exact = Probabilities(target, torch.zeros_like(target))
        agrees = agrees_with_samples(exact, self.budget_sampled, self.samples)
        more = self.budget.bounded & (self.budget_sampled.probability >= target)
        return agrees | more | ~self.budget.exists

    def budget_remark(self, place: tuple[int, ...] = ()) -> str:
        """The sampled probability, if samples contradict the noise budget; else an empty text."""
        if bool(self.budget_agrees[place]):
            return ""
        share = float(self.budget_sampled.probability[place])
        return f"samples keep it with {in_percent_unlike(share, self.budget.target)}"

    @property
    def differences(self) -> Tensor:
        """Absolute differences of sampled and propagated probabilities, (*batch, classes)."""
        return (self.probabilities.probability.double() - self.sampled.probability.double()).abs()

    @property
    def table(self) -> Table:
        """A row for each class of one input, or for each input of a batch."""
        if self.label.numel() == 1:
            return _table_of_classes(self[(0,) * self.label.dim()])
        return _table_of_inputs(self)

    def __getitem__(self, index: int | tuple[int, ...]) -> "Robustness":
        """One input of a batch."""
        place = index if isinstance(index, tuple) else (index,)
        if len(place) != self.label.dim():
            raise IndexError(
                f"{len(place)} numbers do not pick one of a batch {tuple(self.label.shape)}"
            )
        changed: dict[str, Any] = {
            name: value[place]
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Probabilities)
        }
        budget, adversary = self.budget.pick(place), self.adversary.pick(place)
        error = None if self.error is None else self.error.map(lambda tensor: tensor[place])
        return replace(self, **changed, budget=budget, adversary=adversary, error=error)

    def record(self) -> dict[str, Any]:
        """Every field as plain numbers, lists and words, for JSON."""
        return {name: plain(_listed(getattr(self, name))) for name in RECORDED}


def _listed(value: Any) -> Any:
    """Lists, numbers and dictionaries in place of tensors and results."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, NoiseBudget):
        return value.record()
    if isinstance(value, Probabilities):
        known = {name: part for name, part in vars(value).items() if part is not None}
        return {name: part.tolist() for name, part in known.items()}
    if isinstance(value, ErrorEstimate):
        return {"mean": value.mean.tolist(), "stddev": value.stddev.tolist(), "basis": value.basis}
    if isinstance(value, Adversarial):
        names = ("correct", "robust", "margin")
        return {"norm": value.ball.norm, "radius": _listed(value.ball.radius)} | {
            name: getattr(value, name).tolist() for name in names
        }
    return value


def analyse(
    model: Model,
    x: Gaussian,
    label: int | Tensor | None = None,
    *,
    method: Method | str = AUTO,
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
    """Analyse the decisions of a classifier under Gaussian noise on its input.

    The model is not changed, and there are no gradients.

    Args:
        model: Returns logits, without a final softmax; a single logit is the log-odds of class 1.
        x: The Gaussian input.
        label: A class number or one for each of the batch; by default the network's own decision.
        method: As for `cp.propagate`; the sensitivity, a gradient, uses layers in place of points.
        probability: The probability with which the noise budget keeps the label.
        samples: The number of samples of the check.
        points: Number of Sobol points in all, rounded up.
        radius: The radius of the ball for projected gradient descent; by default the root mean
            square of the noise (of its length, or for norm=math.inf of an element).
        norm: The norm of that ball, 2 or math.inf.
        steps: The number of steps of the descent.
        bounds: (low, high) of the inputs' elements for the descent.
        generator: Draws samples and scramblings; torch's global one by default.
        progress: Whether to show a progress bar.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(4), stddev=0.1)
        print(cp.robustness.analyse(nn.Linear(4, 3), x))
    """
    refuse_inference_mode("analyse")
    check_count("samples", samples)
    check_inputs(x)
    x, method = x.detach(), as_method(method)
    classifier = Classifier(model, x)
    classifier.warn_of_probabilities(x)
    predicted = classifier.decision()
    labels = predicted if label is None else classifier.labels(label)
    if radius is None:
        radius = noise_radius(x, norm)
    radius = torch.as_tensor(radius, dtype=x.dtype, device=x.device).expand(x.batch_shape)
    ball = Ball(radius, norm, bounds)
    drawn: Any = {"points": points, "generator": generator}
    smooth = GAUSSIAN_LAYERS if isinstance(method, Auto | QuasiMonteCarlo) else method
    with StageBar(STAGES, progress) as bar, torch.no_grad():
        bar.begin("sensitivity")
        heat = sensitivity(model, x, labels, Misclassification(**drawn), method=smooth)
        bar.begin("propagation")
        fixed = Randomisation.draw(points, generator)
        found = decide(model, x, method, fixed, with_error=True)
        logits = found.output
        margin = margins(logits, labels)
        bar.begin("class probabilities")
        classes, wrong = found.classes(), found.misclassification(labels)
        bar.begin("expected softmax")
        softmax = found.softmax()
        bar.begin("noise budget")
        budget = noise_budget(model, x, labels, probability, method=method, **drawn)
        bar.begin("samples")
        sampled = classifier.sampled(x, samples, generator)
        bar.begin("samples at the budget")
        at_budget = classifier.sampled(scaled(x, budget.level.nan_to_num()), samples, generator)
        bar.begin("attack")
        adversary = attack(classifier, x.mean, labels, ball, steps, 1, generator)
    kept = label_share(sampled, labels)
    lost = Probabilities(1 - kept.probability, kept.stderr)
    if not found.counted:
        classes, wrong = widened(classes, sampled), widened(wrong, lost)
    rivals = others(labels.reshape(-1, 1), classifier.classes)
    return Robustness(
        method=method_name(logits.method or method), input_shape=tuple(x.event_shape), label=labels,
        predicted=predicted, probabilities=classes, sampled=sampled,
        samples=samples, misclassification=wrong, sampled_misclassification=lost,
        rivals=rivals.reshape(*labels.shape, -1), margin_mean=margin.mean,
        margin_stddev=margin.stddev, softmax=softmax, entropy=entropy(softmax),
        decision_entropy=entropy(classes), sensitivity=heat, budget=budget,
        budget_sampled=label_share(at_budget, labels), adversary=adversary, error=logits.error,
        notes=logits.notes, counted=found.counted,
    )  # fmt: skip


def _table_of_classes(result: Robustness) -> Table:
    head = ("class", "probability", "sampled", "margin", "expected softmax")
    label = int(result.label)
    margin = {
        int(rival): f"{in_digits(float(mean))} ± {in_digits(float(width), 2)}"
        for rival, mean, width in zip(
            result.rivals, result.margin_mean, result.margin_stddev, strict=True
        )
    }
    order = result.probabilities.probability.argsort(descending=True, stable=True)[:ROWS].tolist()
    rows = tuple(
        (
            f"{number}{' *' if number == label else ''}",
            result.probabilities.written(number), result.sampled.written(number),
            margin.get(number, "-"), in_digits(float(result.softmax.probability[number])),
        )
        for number in order
    )  # fmt: skip
    left = len(result.probabilities.probability) - len(rows)
    notes = [f"and {left} less probable classes"] if left else []
    notes += [
        f"* the label; without noise the network says {int(result.predicted)}",
        f"misclassified with probability {result.misclassification.explained()}; in "
        f"{result.samples:,} samples {result.sampled_misclassification.written()}"
        + ("" if bool(result.agrees) else ", which is more than chance: the samples are right"),
        f"entropy {in_digits(float(result.entropy))} nats of the expected softmax, "
        f"{in_digits(float(result.decision_entropy))} of the decision",
        _budget_note(result),
        _adversary_note(result),
        "margin: the label's logit less that of the class, mean ± standard deviation",
        *_error_notes(result),
    ]
    return Table(head, rows, notes=tuple(notes))


def _error_notes(result: Robustness) -> list[str]:
    """What the errors are, and which method the logits are from."""
    found = result.misclassification
    if found.assumption is None:
        what = "integration alone; nothing is known of the error of Gaussian logits"
    elif result.counted:
        what = (
            "evaluations at points, where decisions are counted; nothing is assumed of the logits"
        )
    else:
        what = "the distribution that is assumed of the logits, and of integration"
    notes = [f"± of probabilities: estimated error of {what}"]
    return notes if result.error is None else [*notes, f"{result.method}: {result.error.sentence}"]


def _budget_note(result: Robustness) -> str:
    budget = result.budget
    text = f"{in_percent(budget.target)} noise budget: {budget.reason[0]}"
    if not bool(budget.exists):
        return text
    remark = result.budget_remark()
    return (
        f"{text}, {budget.written()} times this noise (standard deviation "
        f"{in_digits(float(budget.stddev))} of an element); sampled there "
        f"{result.budget_sampled.written()}"
        + (f", off by more than chance: {remark}" if remark else "")
    )


def _adversary_note(result: Robustness) -> str:
    ball = result.adversary.ball
    name = "inf" if ball.norm == math.inf else "2"
    held = bool(result.adversary.robust)
    verdict = "found no other class" if held else "found another class"
    return f"PGD in the {name}-norm within {in_digits(float(ball.radius))}: {verdict}"


def _table_of_inputs(result: Robustness) -> Table:
    head = ("input", "label", "says", "misclassified", "sampled", "entropy", "noise budget",
            "PGD", "")  # fmt: skip
    shape = result.label.shape
    places = [tuple(place) for place in torch.ones(shape).nonzero().tolist()]
    rows = tuple(
        (
            ",".join(map(str, place)), str(int(result.label[place])),
            str(int(result.predicted[place])), result.misclassification.written(place),
            result.sampled_misclassification.written(place),
            in_digits(float(result.entropy[place])), result.budget.written(place),
            "holds" if bool(result.adversary.robust[place]) else "fooled",
            _remarks(result, place, reason),
        )
        for place, reason in zip(places[:ROWS], result.budget.reason, strict=False)
    )  # fmt: skip
    left = len(places) - len(rows)
    wrong = result.misclassification.probability.double().mean()
    notes = [f"and {left} more inputs"] if left else []
    notes += [
        f"average probability of misclassification {in_digits(float(wrong))}; "
        f"accuracy without noise {in_percent(result.adversary.clean_accuracy)}, under PGD "
        f"{in_percent(result.adversary.accuracy)}",
        f"noise budget: the multiple of this noise that keeps the label with probability "
        f"{result.budget.target:g}",
        *_error_notes(result),
    ]
    return Table(head, rows, remarks=2, notes=tuple(notes))


def _remarks(result: Robustness, place: tuple[int, ...], reason: str) -> str:
    remarks = [
        "" if reason == FOUND else reason,
        "" if bool(result.agrees[place]) else "samples disagree",
        result.budget_remark(place) and f"at the budget {result.budget_remark(place)}",
    ]
    return "; ".join(word for word in remarks if word)
