"""What an analysis found: numbers for people, for scripts and for reports."""

import math
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from covprop.report.table import Table, in_digits, in_percent, in_percent_unlike, plain
from covprop.robustness.adversary import Adversarial
from covprop.robustness.agreement import borne_out
from covprop.robustness.budget import FOUND, NoiseBudget
from covprop.robustness.probabilities import Probabilities

DISAGREES = "samples disagree"
SHOWN = 50
"""Inputs of a batch, or classes, that a table has a row for."""


@final
@dataclass(frozen=True)
class Robustness:
    """How a classifier decides under noise on its input; print it to see a table.

    Tensors have the batch first: for one input it is absent. classes are all classes, in the order
    of the logits; a model with one logit has two (0 and 1).
    """

    method: str
    """The method of propagation, as it is written."""
    input_shape: tuple[int, ...]
    """The event of the input: the shape of one heat map."""
    label: Tensor
    """The class that is to be kept, (*batch,)."""
    predicted: Tensor
    """The network's decision without noise, (*batch,)."""
    probabilities: Probabilities
    """P(class has the largest logit) by propagation, (*batch, classes), with standard errors."""
    sampled: Probabilities
    """The same by Monte Carlo through the network."""
    samples: int
    """Of that Monte Carlo run."""
    misclassification: Probabilities
    """P(another class than the label), (*batch,), by propagation."""
    sampled_misclassification: Probabilities
    """The same by Monte Carlo."""
    rivals: Tensor
    """Class numbers of the margins, (*batch, classes - 1)."""
    margin_mean: Tensor
    """E[y_label - y_rival], (*batch, classes - 1)."""
    margin_stddev: Tensor
    """The standard deviations of the same."""
    softmax: Probabilities
    """E[softmax(logits)], (*batch, classes)."""
    entropy: Tensor
    """Of the expected softmax, in nats, (*batch,)."""
    decision_entropy: Tensor
    """Of the class probabilities, in nats, (*batch,)."""
    sensitivity: Tensor
    """d P(misclassified) / d Var(element), (*batch, *input_shape)."""
    budget: NoiseBudget
    """The largest multiple of the given noise that keeps the label."""
    budget_sampled: Probabilities
    """P(label) at that level by Monte Carlo, (*batch,)."""
    adversary: Adversarial
    """Projected gradient descent; its ball is as large as the noise unless another was given."""

    @property
    def agrees(self) -> Tensor:
        """Whether samples and propagation tell the same probability of every class, (*batch,).

        To what chance explains, by the standard of `cp.compare`: samples make any input of a right
        result look wrong with a probability of about 0.01. Else the logits are not Gaussian enough,
        and the samples are right.
        """
        return borne_out(self.probabilities, self.sampled, self.samples).all(-1)

    @property
    def budget_agrees(self) -> Tensor:
        """Whether samples keep the label at the noise budget as often as it says, (*batch,).

        By the same standard as `agrees`. True where there is no noise to sample: the label is lost
        without any, or there is none to scale. A budget that ends at the largest level says "at
        least", and so samples may keep the label more often.
        """
        target = torch.full_like(self.budget_sampled.probability, self.budget.target)
        said = Probabilities(target, torch.zeros_like(target))
        more = self.budget.bounded & (self.budget_sampled.probability >= target)
        return borne_out(said, self.budget_sampled, self.samples) | more | ~self.budget.exists

    def budget_remark(self, place: tuple[int, ...] = ()) -> str:
        """What samples say of a noise budget that they do not bear out, else nothing."""
        if bool(self.budget_agrees[place]):
            return ""
        share = float(self.budget_sampled.probability[place])
        return f"samples keep it with {in_percent_unlike(share, self.budget.target)}"

    @property
    def differences(self) -> Tensor:
        """How far samples and propagation are apart, (*batch, classes)."""
        both = (self.probabilities.probability, self.sampled.probability)
        ours, theirs = (probability.double() for probability in both)
        return (ours - theirs).abs()

    @property
    def table(self) -> Table:
        """A row for each class of one input, or for each input of a batch."""
        if self.label.numel() == 1:
            return _of_one(self[(0,) * self.label.dim()])
        return _of_many(self)

    def __getitem__(self, index: int | tuple[int, ...]) -> "Robustness":
        """One input of a batch."""
        place = index if isinstance(index, tuple) else (index,)
        if len(place) != self.label.dim():
            raise IndexError(
                f"{len(place)} numbers do not pick one of a batch {tuple(self.label.shape)}"
            )
        changed: dict[str, Any] = {
            name: _picked(value, place)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Probabilities)
        }
        budget, adversary = self.budget.pick(place), self.adversary.pick(place)
        return replace(self, **changed, budget=budget, adversary=adversary)

    def __str__(self) -> str:
        """The table."""
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table.to_html()

    def record(self) -> dict[str, Any]:
        """Every field as plain numbers, lists and words, for JSON."""
        told = {
            "method": self.method, "input_shape": self.input_shape, "samples": self.samples,
            "label": self.label, "predicted": self.predicted, "agrees": self.agrees,
            "budget_agrees": self.budget_agrees,
        }  # fmt: skip
        pairs = ("probabilities", "sampled", "misclassification", "sampled_misclassification",
                 "softmax", "budget_sampled")  # fmt: skip
        told |= {name: _pair(getattr(self, name)) for name in pairs}
        singles = ("rivals", "margin_mean", "margin_stddev", "entropy", "decision_entropy",
                   "sensitivity")  # fmt: skip
        told |= {name: getattr(self, name) for name in singles}
        told["budget"] = self.budget.record()
        told["adversary"] = {
            "norm": self.adversary.ball.norm, "radius": self.adversary.ball.radius,
            "correct": self.adversary.correct, "robust": self.adversary.robust,
            "margin": self.adversary.margin,
        }  # fmt: skip
        return {key: plain(_listed(value)) for key, value in told.items()}


def _picked(value: Tensor | Probabilities, place: tuple[int, ...]) -> Tensor | Probabilities:
    if isinstance(value, Tensor):
        return value[place]
    return Probabilities(value.probability[place], value.stderr[place])


def _pair(found: Probabilities) -> dict[str, Tensor]:
    return {"probability": found.probability, "stderr": found.stderr}


def _listed(value: Any) -> Any:
    """Tensors as lists or numbers."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, Tensor) else value


def _of_one(found: Robustness) -> Table:
    head = ("class", "probability", "sampled", "margin", "expected softmax")
    label = int(found.label)
    margins = {
        int(rival): f"{in_digits(float(mean))} ± {in_digits(float(width), 2)}"
        for rival, mean, width in zip(
            found.rivals, found.margin_mean, found.margin_stddev, strict=True
        )
    }
    order = found.probabilities.probability.argsort(descending=True, stable=True)[:SHOWN].tolist()
    rows = tuple(
        (
            f"{number}{' *' if number == label else ''}",
            _estimate(found.probabilities, number), _estimate(found.sampled, number),
            margins.get(number, "-"), in_digits(float(found.softmax.probability[number])),
        )
        for number in order
    )  # fmt: skip
    left = len(found.probabilities.probability) - len(rows)
    notes = [f"and {left} less probable classes"] if left else []
    notes += [
        f"* the label; without noise the network says {int(found.predicted)}",
        f"misclassified with probability {_estimate(found.misclassification)}; in {found.samples:,}"
        f" samples {_estimate(found.sampled_misclassification)}"
        + ("" if bool(found.agrees) else ", which is more than chance: the samples are right"),
        f"entropy {in_digits(float(found.entropy))} nats of the expected softmax, "
        f"{in_digits(float(found.decision_entropy))} of the decision",
        _budget_note(found),
        _adversary_note(found),
        "margin: the label's logit less that of the class, mean ± standard deviation",
    ]
    return Table(head, rows, notes=tuple(notes))


def _budget_note(found: Robustness) -> str:
    budget = found.budget
    said = f"{in_percent(budget.target)} noise budget: {budget.reason[0]}"
    if not bool(budget.exists):
        return said
    remark = found.budget_remark()
    return (
        f"{said}, {budget.written()} times this noise (standard deviation "
        f"{in_digits(float(budget.stddev))} of an element); sampled there "
        f"{_estimate(found.budget_sampled)}"
        + (f", off by more than chance: {remark}" if remark else "")
    )


def _adversary_note(found: Robustness) -> str:
    ball = found.adversary.ball
    name = "inf" if ball.norm == math.inf else "2"
    held = bool(found.adversary.robust)
    verdict = "found no other class" if held else "found another class"
    return f"PGD in the {name}-norm within {in_digits(float(ball.radius))}: {verdict}"


def _of_many(found: Robustness) -> Table:
    head = ("input", "label", "says", "misclassified", "sampled", "entropy", "noise budget",
            "PGD", "")  # fmt: skip
    shape = found.label.shape
    places = [tuple(place) for place in torch.ones(shape).nonzero().tolist()]
    rows = tuple(
        (
            ",".join(map(str, place)), str(int(found.label[place])),
            str(int(found.predicted[place])), _estimate(found.misclassification, place),
            _estimate(found.sampled_misclassification, place),
            in_digits(float(found.entropy[place])), found.budget.written(place),
            "holds" if bool(found.adversary.robust[place]) else "fooled",
            _remarks(found, place, reason),
        )
        for place, reason in zip(places[:SHOWN], found.budget.reason, strict=False)
    )  # fmt: skip
    left = len(places) - len(rows)
    wrong = found.misclassification.probability.double().mean()
    notes = [f"and {left} more inputs"] if left else []
    notes += [
        f"average probability of misclassification {in_digits(float(wrong))}; "
        f"accuracy without noise {in_percent(found.adversary.clean_accuracy)}, under PGD "
        f"{in_percent(found.adversary.accuracy)}",
        f"noise budget: the multiple of this noise that keeps the label with probability "
        f"{found.budget.target:g}",
    ]
    return Table(head, rows, remarks=2, notes=tuple(notes))


def _remarks(found: Robustness, place: tuple[int, ...], reason: str) -> str:
    said = [
        "" if reason == FOUND else reason,
        "" if bool(found.agrees[place]) else DISAGREES,
        found.budget_remark(place) and f"at the budget {found.budget_remark(place)}",
    ]
    return "; ".join(word for word in said if word)


def _estimate(found: Probabilities, place: Any = ()) -> str:
    value, error = float(found.probability[place]), float(found.stderr[place])
    return in_digits(value) + ("" if error == 0 else f" ± {in_digits(error, 1)}")
