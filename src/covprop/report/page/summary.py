"""The head of the page: what was asked, what came out and how far to trust it, in plain words."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.comparison import Agreement, Comparison
from covprop.gaussian import Gaussian
from covprop.report.page.choice import Choice, deviations
from covprop.report.page.sampling import row_of
from covprop.report.table import in_digits, in_percent, in_seconds
from covprop.steps import Trace
from covprop.verdict import FINE

CLOSE = 0.1
"""Largest error of a mean in standard deviations, and of a variance, that is called close."""
DIGITS = 3


@final
@dataclass(frozen=True)
class Trust:
    """How far to trust the result: a mark of the style sheet, a few words, and why."""

    mark: str
    words: str
    reason: str


def trust(comparison: Comparison | None, trace: Trace | None, y: Gaussian | None) -> Trust:
    """By sampling of the output, or else of the steps on the way to it."""
    row = row_of(comparison, y) if comparison is not None else None
    if comparison is not None and row is not None and row.agreement is not None:
        against = f"{row.name} against {comparison.reference.samples:,} samples of the network"
        verdict = row.agreement.verdict
        if FINE in verdict:  # at least of each moment
            words = "Agrees" if verdict == FINE else "Each moment agrees"
            return Trust("good", f"{words} with sampling", f"{against}: {verdict}.")
        if _largest(row.agreement) <= CLOSE:
            return Trust("fair", "Close to sampling", f"{against}: {verdict}.")
        return Trust("poor", "Differs from sampling", f"{against}: {verdict}.")
    if trace is not None and trace.samples:
        wrong = trace.first_error()
        if wrong is None:
            reason = (
                f"{trace.samples:,} samples through every step: no variance is off by more than "
                "sampling explains."
            )
            return Trust("good", "Agrees with sampling, step by step", reason)
        reason = (
            f"{trace.samples:,} samples through every step: variances are off from “{wrong.name}” "
            "on; the section on layers says by how much."
        )
        return Trust("fair", "Variances are off on the way", reason)
    reason = (
        "Every operation is exact, or as accurate as covprop says, if its input is Gaussian, which "
        "behind a nonlinearity it is not. cp.compare(model, x) tells how much that matters here."
    )
    return Trust("unknown", "Not checked against sampling", reason)


def _largest(found: Agreement) -> float:
    errors = torch.cat([found.mean_error.flatten(), found.variance_ratio.flatten() - 1]).abs()
    known = errors[~errors.isnan()]
    return float(known.max()) if len(known) else math.inf


def lead(x: Gaussian, y: Gaussian | None, trace: Trace | None, choice: Choice | None) -> str:
    """What went in and what came out."""
    said = [_network(x, y, trace), _noise(x)]
    if y is not None and choice is not None:
        said.append(_result(y, choice))
    return " ".join(said)


def _network(x: Gaussian, y: Gaussian | None, trace: Trace | None) -> str:
    inputs = _shape(x.event_shape)
    outputs = f" to {_shape(y.event_shape)}" if y is not None else ""
    count = math.prod(x.batch_shape)
    many = f", for {count:,} inputs" if x.batch_shape and count != 1 else ""
    steps = f" in {len(trace.steps) - 1} operations" if trace is not None else ""
    return f"The network maps {inputs}{outputs}{steps}{many}."


def _shape(shape: torch.Size) -> str:
    count = shape.numel()
    numbers = "one number" if count == 1 else f"{count:,} numbers"
    sizes = [size for size in shape if size > 1]
    return numbers + (f" ({' × '.join(map(str, sizes))})" if len(sizes) > 1 else "")


def _noise(x: Gaussian) -> str:
    low, high = _range(deviations(x))
    if high == 0:
        return "Its input is a constant, without noise."
    linked = largest_correlation(x)
    alike = "independent" if linked == 0 else f"correlated up to {in_digits(linked, 2)}"
    return f"Its input carries noise with a standard deviation of {span(low, high)}, {alike}."


def largest_correlation(x: Gaussian) -> float:
    """Between two elements of the first input of a batch, of those the page shows."""
    (one,) = Choice.of(x, most=1).within(x)
    matrix = one.correlation_matrix
    off = matrix - torch.diag(matrix.diagonal())
    return float(off.abs().max()) if off.numel() else 0.0


def _result(y: Gaussian, choice: Choice) -> str:
    low, high = _range(deviations(y))
    if high == 0:
        return "The output does not vary."
    said = f"The output then varies with a standard deviation of {span(low, high)}"
    if len(choice.outputs) == 1:
        return f"{said}."
    widest = int(deviations(choice.within(y)[0]).nan_to_num(-1).argmax())
    where = f" of {choice.labels[0]}" if choice.labels else ""
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


def figures(
    x: Gaussian, y: Gaussian | None, trace: Trace | None, comparison: Comparison | None
) -> list[tuple[str, str, str]]:
    """Cards: a name, a number and a remark."""
    told = [("noise in", span(*_range(deviations(x))), "standard deviation of the input")]
    if y is not None:
        told.append(("noise out", span(*_range(deviations(y))), "standard deviation of the output"))
    if trace is not None:
        seconds = sum(step.seconds for step in trace.steps)
        told.append(("time", in_seconds(seconds), f"for {len(trace.steps) - 1} operations"))
    row = row_of(comparison, y) if comparison is not None else None
    if row is not None and row.agreement is not None:
        error = float(row.agreement.covariance_error.double().nanmean())
        assert comparison is not None
        sampling = float(comparison.reference.covariance_error.double().nanmean())
        remark = f"error of the covariance; sampling has {in_percent(sampling)} of its own"
        told.append(("against sampling", in_percent(error), remark))
    return told
