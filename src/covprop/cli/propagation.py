"""`covprop propagate`: the moments of the output, in a table, an object or a file."""

import math
import sys
from typing import Any

import torch

from covprop.cli import output
from covprop.cli.answers import Answer
from covprop.cli.question import Question, one, running
from covprop.cli.shares import bare, one_batch, shared
from covprop.compare import method_name
from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.propagate import propagate
from covprop.ranks import Ranks
from covprop.report.table import Table, in_digits

SHOWN = 20
"""Outputs in the table."""
LARGEST_SEARCH = 2000
"""Outputs whose correlations are searched for the strongest."""
DIGITS = 5
WIDTH = 1.959963984540054
"""Standard deviations on both sides that hold 95 % of a Gaussian: ndtri(0.975)."""


def run(question: Question, method: Method, seed: int, ranks: Ranks) -> Gaussian:
    """The Gaussian of the output, with a bar on a terminal."""
    torch.manual_seed(seed + ranks.rank)  # for models that draw random numbers themselves

    def work(question: Question, part: slice) -> Gaussian:
        del part
        with running(), torch.no_grad():
            bar = sys.stderr.isatty() and not ranks.rank
            y = one(propagate(question.module, question.x, method=method, progress=bar))
        return y if ranks.size == 1 else bare(y)

    return shared(question, ranks, work, lambda parts: one_batch(parts, method))


def told(question: Question, y: Gaussian) -> dict[str, Any]:
    """Everything, for scripts."""
    output.check_dense(y)
    found: dict[str, Any] = {
        "model": question.name,
        "method": method_name(y.method),
        "dtype": str(y.dtype).removeprefix("torch."),
        "batch_shape": list(y.batch_shape),
        "event_shape": list(y.event_shape),
        "mean": y.mean.tolist(),
        "stddev": y.stddev.tolist(),
        "covariance": y.covariance_matrix.tolist(),
    }
    if y.mean_stderr is not None and y.covariance_stderr is not None:
        found["samples"] = y.samples
        found["mean_stderr"] = y.mean_stderr.tolist()
        found["covariance_stderr"] = y.covariance_stderr.tolist()
    return found


def answer(question: Question, y: Gaussian, as_json: bool) -> Answer:
    """For scripts or for people, and nothing computed for the other."""
    if as_json:
        return Answer(told(question, y), (), True)
    inputs = "x".join(map(str, question.x.mean.shape)) or "1"
    head = f"{question.name}: {inputs} in, {_shape(y)} out, by {method_name(y.method)}"
    return Answer({}, (head, table(y)), False)


def table(y: Gaussian) -> Table:
    """A row for each output, as many as one reads."""
    columns = [y.mean.flatten(), y.stddev.flatten()]
    rows = []
    for number in range(min(SHOWN, y.mean.numel())):
        mean, stddev = (float(column[number]) for column in columns)
        low, high = mean - WIDTH * stddev, mean + WIDTH * stddev
        cells = (mean, stddev, low, high)
        rows.append((_index(number, y.mean.shape), *(in_digits(cell, DIGITS) for cell in cells)))
    notes = []
    rest = y.mean.numel() - SHOWN
    if rest > 0:
        notes.append(f"and {rest:,} more: --out and --json have them all")
    none = columns[1].isnan().nonzero()[:, 0].tolist()
    if none:
        names = ", ".join(_index(number, y.mean.shape) for number in none[:SHOWN])
        least = in_digits(float(y.variance.min()), DIGITS)
        notes.append(
            f"no standard deviation for {len(none):,} with a negative variance (the least is "
            f"{least}; outputs {names}): the method does not suit this model, take another"
        )
    strongest = _strongest(y)
    if strongest:
        notes.append(strongest)
    return Table(("output", "mean", "stddev", "2.5 %", "97.5 %"), tuple(rows), notes=tuple(notes))


def _strongest(y: Gaussian) -> str:
    size = y.event_shape.numel()
    if y.batch_shape or not 1 < size <= LARGEST_SEARCH:
        return ""
    matrix = y.correlation_matrix.triu(1)
    place = int(matrix.abs().argmax())
    first, second = divmod(place, size)
    value = float(matrix[first, second])
    if value == 0 or math.isnan(value):
        return "no two outputs are correlated"
    names = " and ".join(_index(number, y.event_shape) for number in (first, second))
    return f"strongest correlation: outputs {names}, {value:.3f}"


def _shape(y: Gaussian) -> str:
    return "x".join(map(str, y.mean.shape)) or "1"


def _index(number: int, shape: torch.Size) -> str:
    """`3`, or `0,3` where there are more dimensions."""
    place = torch.unravel_index(torch.tensor(number), tuple(shape)) if shape else ()
    return ",".join(str(int(part)) for part in place) or "0"
