"""The head of the page: what was asked, what came out and how far to trust it, in plain words."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from covprop.comparison import FINE, Agreement
from covprop.gaussian import Gaussian
from covprop.report.page.budgets import budget_figure
from covprop.report.page.choice import Choice, deviations
from covprop.report.page.decision import CLOSE as CLOSE_PROBABILITY
from covprop.report.page.decision import decision_words
from covprop.report.page.findings import Findings
from covprop.report.table import in_digits, in_percent, in_seconds
from covprop.robustness.result import Robustness

CLOSE = 0.1
"""Largest error of a mean in standard deviations, and of a variance, that is called close."""
DIGITS = 3
MARKS = ("good", "fair", "poor")
"""Classes of the style sheet, from trust to doubt."""


@final
@dataclass(frozen=True)
class Trust:
    """How far to trust the result: a mark of the style sheet, a few words, and why."""

    mark: str
    words: str
    reason: str


def trust(found: Findings) -> Trust:
    """By sampling of the output and of the decision, or else of the steps on the way to them.

    The worst of what was found, with all reasons.
    """
    judged = [one for one in (_by_comparison(found), _by_decision(found)) if one is not None]
    for other in (_by_steps, _by_itself):
        judged = judged or [one for one in (other(found),) if one is not None]
    if judged:
        worst = max(judged, key=lambda one: MARKS.index(one.mark))
        return replace(worst, reason=" ".join(one.reason for one in judged))
    reason = (
        "Every operation is exact, or as accurate as covprop says, if its input is Gaussian, which "
        "behind a nonlinearity it is not. cp.compare(model, x) tells how much that matters here."
    )
    return Trust("unknown", "Not checked against sampling", reason)


def _by_comparison(found: Findings) -> Trust | None:
    row = found.row
    if found.comparison is None or row is None or row.agreement is None:
        return None
    verdict = row.agreement.verdict
    reason = f"{row.name} against {found.comparison.reference.words}: {verdict}."
    if row.agreement.fine:
        words = "Agrees" if verdict == FINE else "Each moment agrees"
        return Trust("good", f"{words} with sampling", reason)
    reason = f"{reason} {_sentence(found.comparison.advice(row))}"
    if _largest(row.agreement) <= CLOSE:
        return Trust("fair", "Close to sampling", reason)
    return Trust("poor", "Differs from sampling", reason)


def _by_decision(found: Findings) -> Trust | None:
    if found.robustness is None:
        return None
    agrees, apart = found.robustness.agrees.all(), float(found.robustness.differences.max())
    reason = (
        f"{found.robustness.method} against {found.robustness.samples:,} samples of the network: "
        f"probabilities of classes differ by {in_digits(apart, 2)} at most"
    )
    if agrees:
        return Trust("good", "Agrees with sampling", f"{reason}, which sampling explains.")
    close = apart <= CLOSE_PROBABILITY
    words = "Close to sampling" if close else "Differs from sampling"
    return Trust("fair" if close else "poor", words, f"{reason}, more than sampling explains.")


def _by_steps(found: Findings) -> Trust | None:
    trace = found.trace
    if trace is None or not trace.samples:
        return None
    wrong = trace.first_error()
    said = f"{trace.samples:,} samples through every step:"
    if wrong is None:
        reason = f"{said} no variance is off by more than sampling explains."
        return Trust("good", "Agrees with sampling, step by step", reason)
    reason = (
        f"{said} variances are off from “{wrong.name}” on; the section on layers says by how "
        f"much. {_sentence(trace.advice)}"
    )
    return Trust("fair", "Variances are off on the way", reason)


def _by_itself(found: Findings) -> Trust | None:
    """An output that was sampled is as good as its samples are many."""
    if found.y is None or found.y.samples is None:
        return None
    reason = (
        f"Mean and covariance are those of {found.y.samples:,} samples of the network: each mean "
        f"is known to about {in_digits(found.y.samples**-0.5, 2)} standard deviations."
    )
    return Trust("good", "Sampled", reason)


def _sentence(advice: str) -> str:
    return f"{advice[0].upper()}{advice[1:]}."


def _largest(found: Agreement) -> float:
    errors = torch.cat([found.mean_error.flatten(), found.variance_ratio.flatten() - 1]).abs()
    known = errors[~errors.isnan()]
    return float(known.max()) if len(known) else math.inf


def lead(found: Findings) -> str:
    """What went in and what came out."""
    said = [_network(found), _noise(found.x, found.inputs)]
    if found.y is not None and found.outputs is not None:
        said.append(_result(found.y, found.outputs, found.robustness is None))
    if found.robustness is not None:
        said.append(decision_words(found.robustness, found.names))
    return " ".join(said)


def _network(found: Findings) -> str:
    x, y = found.x, found.y
    outputs = f" to {_shape(y.event_shape)}" if y is not None else ""
    if found.robustness is not None:
        outputs = f" to {found.robustness.probabilities.probability.shape[-1]:,} classes"
    count = math.prod(x.batch_shape)
    many = f", for {count:,} inputs" if x.batch_shape and count != 1 else ""
    steps = f" in {len(found.trace.steps) - 1} operations" if found.trace is not None else ""
    return f"The network maps {_shape(x.event_shape)}{outputs}{steps}{many}."


def _shape(shape: torch.Size) -> str:
    count = shape.numel()
    numbers = "one number" if count == 1 else f"{count:,} numbers"
    sizes = [size for size in shape if size > 1]
    return numbers + (f" ({' × '.join(map(str, sizes))})" if len(sizes) > 1 else "")


def _noise(x: Gaussian, choice: Choice) -> str:
    low, high = _range(deviations(x))
    if high == 0:
        return "Its input is a constant, without noise."
    linked = _largest_correlation(choice.within(x)[0])
    alike = "independent" if linked == 0 else f"correlated up to {in_digits(linked, 2)}"
    return f"Its input carries noise with a standard deviation of {span(low, high)}, {alike}."


def _largest_correlation(one: Gaussian) -> float:
    matrix = one.correlation_matrix
    off = matrix - torch.diag(matrix.diagonal())
    return float(off.abs().max()) if off.numel() else 0.0


def _result(y: Gaussian, choice: Choice, at_length: bool) -> str:
    low, high = _range(deviations(y))
    if high == 0:
        return "The output does not vary."
    said = f"The output then varies with a standard deviation of {span(low, high)}"
    if len(choice.outputs) == 1 or not at_length:
        return f"{said}."
    widest = int(deviations(choice.within(y)[0]).nan_to_num(-1).argmax())
    where = f" of {choice.batch.labels[0]}" if choice.batch.labels else ""
    return f"{said}; the most uncertain{where} is {choice.names[widest]}."


def _range(stddev: Tensor) -> tuple[float, float]:
    known = stddev[stddev.isfinite()]
    if not known.numel():
        return math.nan, math.nan
    return float(known.min()), float(known.max())


def span(low: float, high: float) -> str:
    """A range in words, or one number where both ends read the same."""
    first, last = in_digits(low, DIGITS), in_digits(high, DIGITS)
    return first if first == last else f"{first} to {last}"


def figures(found: Findings) -> list[tuple[str, str, str]]:
    """Cards: a name, a number and a remark."""
    told = []
    if found.robustness is not None:
        told += _decision_figures(found.robustness)
    noise = span(*_range(deviations(found.x)))
    told.append(("noise in", noise, "standard deviation of the input"))
    if found.y is not None:
        noise = span(*_range(deviations(found.y)))
        told.append(("noise out", noise, "standard deviation of the output"))
    if found.trace is not None and found.robustness is None:
        seconds = sum(step.seconds for step in found.trace.steps)
        told.append(("time", in_seconds(seconds), f"for {len(found.trace.steps) - 1} operations"))
    if found.comparison is not None and found.row is not None and found.row.agreement is not None:
        error, sampling = (
            in_percent(float(part.covariance_error.double().nanmean()))
            for part in (found.row.agreement, found.comparison.reference)
        )
        remark = f"error of the covariance; sampling has {sampling} of its own"
        told.append(("against sampling", error, remark))
    return told


def _decision_figures(found: Robustness) -> list[tuple[str, str, str]]:
    wrong = found.misclassification.probability.double()
    sampled = found.sampled_misclassification.probability.double()
    many = " on average" if found.label.numel() > 1 else ""
    return [
        ("wrong decisions", in_percent(float(wrong.mean())),
         f"probability{many}; samples: {in_percent(float(sampled.mean()))}"),
        ("noise budget", *budget_figure(found)),
    ]  # fmt: skip
