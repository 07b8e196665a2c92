"""`covprop compare`: methods against sampling, and whether the first is good enough."""

import sys
from collections.abc import Sequence

import torch

from covprop.cli.answers import Answer
from covprop.cli.question import Question, one, running
from covprop.cli.refusals import ExitCode
from covprop.compare import METHODS, compare
from covprop.comparison import Comparison, ComparisonRow
from covprop.methods import Method, MonteCarlo
from covprop.propagate import propagate
from covprop.remedy import SAMPLES as OFFERED
from covprop.report.table import Table

CONTROLLED = f"controlvariate:{OFFERED}"
__all__ = ["METHODS", "answer", "run"]


def run(
    question: Question, methods: Sequence[Method], samples: int | None, seed: int
) -> Comparison:
    """Every method against so many samples, or as many as are needed; a bar on a terminal."""
    with running():  # a model of several outputs is told here what to do
        one(propagate(question.module, question.x, method=MonteCarlo(2)))
    torch.manual_seed(seed)  # for models that draw random numbers themselves
    generator = torch.Generator(question.x.device).manual_seed(seed)
    with running():
        return compare(
            question.module, question.x, methods=methods or METHODS, samples=samples,
            generator=generator, show=False, progress=sys.stderr.isatty(),
        )  # fmt: skip


def answer(
    question: Question, comparison: Comparison, tolerance: float | None, as_json: bool
) -> Answer:
    """The table; no is the answer if the first method is further off than tolerated."""
    first = comparison.rows[0]
    told = {"model": question.name, **comparison.to_dict(), "tolerance": tolerance}
    parts: list[str | Table] = [comparison.table]
    if comparison.advice(first):
        parts.append(f"on the command line: covprop propagate ... --method {CONTROLLED}")
    code = ExitCode.FINE
    if tolerance is not None:
        error = worst(first)
        told |= {"error": error, "within_tolerance": error <= tolerance}
        code = ExitCode.FINE if error <= tolerance else ExitCode.NO
        word = "within" if error <= tolerance else "beyond"
        parts.append(
            f"{first.name} is off by {error:.3g} at most, {word} the tolerance {tolerance:g}"
        )
    return Answer(told, tuple(parts), as_json, code)


def worst(row: ComparisonRow) -> float:
    """The largest error of a method: of a mean in standard deviations, or of a covariance."""
    if row.agreement is None:
        return float("inf")
    means, matrices = row.agreement.mean_error, row.agreement.covariance_error
    known = torch.cat([means.flatten().abs(), matrices.flatten().abs()])
    known = known[~known.isnan()]
    return float(known.max()) if known.numel() else 0.0
