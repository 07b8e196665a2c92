"""How a classifier decides under noise: probabilities, margins, noise budget, attack."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covprop.report.page.budgets import budget_sentence
from covprop.report.page.choice import Batch
from covprop.report.page.markup import Section, beside, chart, folded, paragraph, rounded
from covprop.report.table import in_digits, in_percent, in_percent_unlike
from covprop.robustness.probabilities import Probabilities
from covprop.robustness.result import Robustness

CLASSES = 20
"""Classes of an input that are drawn: all, or the likeliest."""
RISKIEST = 200
"""Inputs of a batch in the chart of all of them."""
CLOSE = 0.02
"""Difference of two probabilities that is called close."""


def decision_section(found: Robustness, batch: Batch, output_names: Sequence[str]) -> Section:
    """The section, for some inputs of the batch."""
    names = class_names(found, output_names)
    count = len(names)
    elements = [_element(found, index) for index in batch.indices]
    target = in_percent(found.budget.target)
    body = paragraph(
        f"Blue is what covprop finds, orange what {found.samples:,} samples of the network find, "
        "with two standard errors.",
        f"Of {count:,} classes, each input shows its {CLASSES} likeliest."
        if count > CLASSES
        else "",
        batch.sentence,
    )
    if batch.labels:
        body += chart("risks", "Probability of a wrong decision for every input",
                      "Probability of a wrong decision, input by input")  # fmt: skip
    body += beside(
        chart("classes", "Probability of every class", "Which class wins"),
        chart("margins", "Margins of the label over every other class",
              "How far ahead the label is: its logit less that of each rival"),
    )  # fmt: skip
    body += beside(
        chart("budget", "Probability of keeping the label over the size of the noise",
              f"Noise budget: the noise that keeps the label with {target}"),
        chart("verdict", "The decision in words"),
    )  # fmt: skip
    body += folded("Numbers of the decision", found.table)
    data: dict[str, Any] = {
        "names": names, "samples": found.samples, "target": found.budget.target,
        "elements": elements, "risks": _risks(found, batch),
    }  # fmt: skip
    return Section("decision", "Decision", "Does the decision hold?", body, data)


def _element(found: Robustness, index: tuple[int, ...]) -> dict[str, Any]:
    place = _flat(index, found.label)
    likeliest = found.probabilities.probability[index].argsort(descending=True)[:CLASSES]
    classes = likeliest.sort().values
    distance = found.margin_mean[index] / found.margin_stddev[index].clamp(min=0)
    nearest = distance.nan_to_num(math.inf).argsort()[:CLASSES]
    budget, ball = found.budget, found.adversary.ball
    tried = budget.levels.reshape(len(budget.levels), -1)[:, place]
    kept = budget.probabilities.reshape(len(budget.probabilities), -1)[:, place]
    known = ~(tried.isnan() | kept.isnan())
    return {
        "label": int(found.label[index]), "predicted": int(found.predicted[index]),
        "classes": classes.tolist(),
        "probabilities": _pair(found.probabilities, (*index, classes)),
        "sampled": _pair(found.sampled, (*index, classes)),
        "softmax": rounded(found.softmax.probability[index][classes].double()),
        "wrong": _pair(found.misclassification, index),
        "wrong_sampled": _pair(found.sampled_misclassification, index),
        "rivals": found.rivals[index][nearest].tolist(),
        "margin_mean": rounded(found.margin_mean[index][nearest].double()),
        "margin_stddev": rounded(found.margin_stddev[index][nearest].double()),
        "entropy": rounded(float(found.decision_entropy[index])),
        "level": rounded(float(budget.level[index])),
        "stddev": rounded(float(budget.stddev[index])),
        "found": bool(budget.found[index]), "reason": budget.reason[place],
        "written": budget.written(index) if bool(budget.exists[index]) else "",
        "doubt": found.budget_remark(index),
        "curve": rounded([tried[known].double(), kept[known].double()]),
        "kept_sampled": _pair(found.budget_sampled, index),
        "robust": bool(found.adversary.robust[index]),
        "radius": rounded(float(torch.as_tensor(ball.radius).expand(found.label.shape)[index])),
        "norm": "∞" if ball.norm == math.inf else in_digits(ball.norm),
    }  # fmt: skip


def _flat(index: tuple[int, ...], label: Tensor) -> int:
    """The place of an input in the flattened batch."""
    place = 0
    for at, length in zip(index, label.shape, strict=True):
        place = place * length + at
    return place


def _pair(found: Probabilities, index: tuple[Any, ...]) -> list[Any]:
    """[probability, standard error]."""
    return [rounded(found.probability[index].double()), rounded(found.stderr[index].double())]


def _risks(found: Robustness, batch: Batch) -> dict[str, Any]:
    """Of every input of the batch, the likeliest to be wrong first."""
    wrong = found.misclassification.probability.flatten()
    order = wrong.argsort(descending=True)[:RISKIEST]
    names = list(itertools.product(*(range(length) for length in found.label.shape)))
    sampled = found.sampled_misclassification
    shown = {place: i for i, place in enumerate(batch.places)}
    return {
        "names": [f"input {', '.join(map(str, names[i]))}" for i in order.tolist()],
        "shown": [shown.get(place, -1) for place in order.tolist()], "of": len(wrong),
        "probability": rounded(wrong[order].double()),
        "sampled": rounded(sampled.probability.flatten()[order].double()),
        "stderr": rounded(sampled.stderr.flatten()[order].double()),
    }  # fmt: skip


def class_names(found: Robustness, names: Sequence[str]) -> list[str]:
    """Names of the outputs where every class has one, else their numbers."""
    count = found.probabilities.probability.shape[-1]
    return list(map(str, names)) if len(names) == count else [f"class {i}" for i in range(count)]


def decision_words(found: Robustness, output_names: Sequence[str]) -> str:
    """What the analysis says in a sentence or two."""
    names = class_names(found, output_names)
    wrong = found.misclassification.probability.double().flatten()
    sampled = found.sampled_misclassification.probability.double().flatten()
    if found.label.numel() == 1:
        name = names[int(found.label)]
        again = "" if bool(found.label == found.predicted) else (
            f" (without noise it says {names[int(found.predicted)]})"
        )  # fmt: skip
        return (
            f"It keeps to {name}{again} with a probability of {_of_all(1 - float(wrong))}; "
            f"samples say {_of_all(1 - float(sampled))}. {budget_sentence(found, name)}"
        )
    worst = int(wrong.argmax())
    return (
        f"A decision is wrong with a probability of {in_percent(float(wrong.mean()))} on average "
        f"(samples: {in_percent(float(sampled.mean()))}) and of {in_percent(float(wrong[worst]))} "
        f"at worst. {budget_sentence(found, '')}"
    )


def _of_all(share: float) -> str:
    """99.7 % is not rounded to 100 %."""
    return in_percent_unlike(share, 1.0)
