"""Methods against sampling, from a comparison."""

from typing import Any

import torch
from torch import Tensor

from covprop.comparison import Comparison, ComparisonRow
from covprop.report.page.markup import Section, chart, folded, paragraph, rounded

POINTS = 200
"""Outputs of a method that are shown as points; of more, evenly spaced ones."""
AMOUNTS = ("covariance_error", "wasserstein", "kl")
LONGEST = 160
"""Letters of a refusal."""


def sampling_section(comparison: Comparison) -> Section:
    """Errors of every method beside those of sampling, its time and its verdict."""
    reference = comparison.reference
    outputs = reference.gaussian.mean.numel()
    body = paragraph(
        f"Found by {reference.words}. Points are outputs; the grey band is two standard errors of "
        "sampling itself, so what lies in it cannot be told from the truth. The "
        "lines of the small charts are what sampling alone would give.",
        f"Of {outputs:,} outputs of all inputs, {POINTS} that are evenly spaced are drawn."
        if outputs > POINTS
        else "",
    )
    body += chart("sampling", "Errors of mean and variance of every method against sampling")
    body += chart("amounts", "Distances from the sampled Gaussian, and time, of every method")
    body += folded("Numbers of the comparison", comparison.table)
    data = {
        "reference": _figures(reference) | {
            "name": reference.name, "seconds": rounded(reference.seconds),
            "mean_error": rounded(_average(reference.mean_error)),
            "variance_ratio": rounded(_average(reference.variance_ratio)),
        },
        "rows": [_row(row) for row in comparison.rows],
    }  # fmt: skip
    return Section("sampling", "Sampling", "Against sampling", body, data)


def _row(row: ComparisonRow) -> dict[str, Any]:
    if row.agreement is None:
        return {"name": row.name, "refusal": row.refusal[:LONGEST]}
    found = row.agreement
    return _figures(found) | {
        "name": row.name, "verdict": found.verdict, "seconds": rounded(row.seconds),
        "mean_error": rounded(_points(found.mean_error)),
        "variance_ratio": rounded(_points(found.variance_ratio)),
    }  # fmt: skip


def _figures(found: Any) -> dict[str, Any]:
    return {name: rounded(_average(getattr(found, name))) for name in AMOUNTS}


def _points(values: Tensor) -> Tensor:
    flat = values.detach().flatten().cpu()
    if len(flat) <= POINTS:
        return flat
    return flat[torch.linspace(0, len(flat) - 1, POINTS).round().long()]


def _average(values: Tensor) -> float:
    """Of what is known."""
    return float(values.double().nanmean())
