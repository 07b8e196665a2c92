"""The outputs: means with intervals, and how they vary together."""

import math
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from covprop.gaussian import Gaussian
from covprop.report.page.choice import MAP, Choice, deviations
from covprop.report.page.markup import Section, beside, chart, folded, paragraph, rounded
from covprop.report.page.pictures import picture, plane
from covprop.report.page.pictures import sentence as left_out
from covprop.report.table import Table, in_digits

LEVELS = {"50 %": NormalDist().inv_cdf(0.75), "95 %": NormalDist().inv_cdf(0.975)}
"""Central intervals, and how many standard deviations they reach to either side."""
ROWS = 100
"""Rows of a table of elements."""
PARTNERS = 3
"""The strongest correlations of an output that are named."""
DIGITS = 4


def outputs_section(y: Gaussian, choice: Choice, sampled: Gaussian | None) -> Section:
    """Mean and intervals of every output; sampled: what sampling found of the same."""
    chosen = choice.within(y)
    truth = choice.within(sampled) if sampled is not None else [None] * len(chosen)
    elements = [_element(one, other) for one, other in zip(chosen, truth, strict=True)]
    shape = plane(y.event_shape)
    if shape:
        for index, element in zip(choice.batch.indices, elements, strict=True):
            whole = y[index].to("cpu")
            element |= {
                "mean_picture": picture(whole.mean.reshape(shape)),
                "stddev_picture": picture(deviations(whole).reshape(shape)),
            }
    said = (
        "Each output is a Gaussian: half of its values fall in the thick bar, 95 of 100 in the "
        "thin one."
    )
    orange = "Orange is what sampling found." if sampled is not None else ""
    mixed = (
        f"The output is a mixture of {len(y.mixture.weights)} Gaussians; shown is the one with its "
        "mean and covariance."
        if y.mixture is not None
        else ""
    )
    body = paragraph(said, mixed, orange, choice.sentence, left_out(*shape) if shape else "")
    if shape:
        body += beside(
            chart("outputs-mean", "Mean of the outputs as a picture", "Mean"),
            chart("outputs-stddev", "Standard deviations as a picture", "Standard deviation"),
        )
    body += beside(
        chart("intervals", "Mean, 50 % and 95 % interval of every output"),
        chart("density", "Density of the chosen output"),
    )
    body += folded("Numbers of the outputs", _table(choice, chosen, truth))
    data = {"names": list(choice.names), "elements": elements}
    return Section("outputs", "Outputs", "What comes out", body, data)


def _element(one: Gaussian, sampled: Gaussian | None) -> dict[str, Any]:
    told = {"mean": rounded(one.mean), "stddev": rounded(deviations(one))}
    if sampled is not None:
        error, spread = _errors(sampled)
        told["sampled"] = {
            "mean": rounded(sampled.mean), "stddev": rounded(deviations(sampled)),
            "mean_stderr": rounded(error), "stddev_stderr": rounded(spread),
        }  # fmt: skip
    return told


def _errors(sampled: Gaussian) -> tuple[Tensor, Tensor]:
    """Standard errors of means and of standard deviations, NaN where there are none."""
    if sampled.mean_stderr is None or sampled.covariance_stderr is None:
        unknown = torch.full_like(sampled.mean, math.nan)
        return unknown, unknown
    # The standard deviation is the root of the variance: its error is that over 2 sigma.
    return sampled.mean_stderr, sampled.covariance_stderr.diagonal() / (2 * deviations(sampled))


def _table(choice: Choice, chosen: list[Gaussian], truth: list[Any]) -> Table:
    sampled = any(other is not None for other in truth)
    head = ["output", "mean", "standard deviation", *(f"{name} interval" for name in LEVELS)]
    head += ["sampled mean", "sampled standard deviation"] if sampled else []
    labels = choice.batch.labels
    rows: list[tuple[str, ...]] = []
    for place, (one, other) in enumerate(zip(chosen, truth, strict=True)):
        for i, name in enumerate(choice.names[: max(0, ROWS - len(rows))]):
            mean, stddev = float(one.mean[i]), float(deviations(one)[i])
            ends = [f"{_short(mean - k * stddev)} to {_short(mean + k * stddev)}"
                    for k in LEVELS.values()]  # fmt: skip
            cells = [name, _short(mean), _short(stddev), *ends]
            if other is not None:
                error, spread = _errors(other)
                cells += [_with_error(other.mean[i], error[i]),
                          _with_error(deviations(other)[i], spread[i])]  # fmt: skip
            rows.append((*labels[place : place + 1], *cells))
    words = 2 if labels else 1
    total = len(chosen) * len(choice.names)
    note = f"The first {ROWS} of {total:,} rows." if total > ROWS else ""
    return Table((*(["input"] if labels else []), *head), tuple(rows), words, notes=(note,))


def _short(value: float) -> str:
    return in_digits(value, DIGITS)


def _with_error(value: Tensor, error: Tensor) -> str:
    return f"{_short(float(value))} ± {in_digits(float(error), 2)}"


def maps_section(y: Gaussian, choice: Choice) -> Section:
    """Covariances and correlations of every two outputs, by blocks where there are many."""
    block = math.ceil(len(choice.outputs) / MAP)
    elements = [_maps(one, block) for one in choice.within(y)]
    blocks = (
        f"There are {len(choice.outputs):,} outputs, so each cell stands for {block} × {block} "
        "pairs and shows the strongest of them; of correlations without the diagonal."
        if block > 1
        else ""
    )
    body = paragraph(
        "Orange: two outputs rise and fall together. Blue: one rises where the other falls.",
        blocks,
    )
    body += paragraph(
        "Point at a cell, or focus a map and use the arrow keys, to read its value.", kind="screen"
    )
    body += beside(
        chart("correlation", "Correlations of every two outputs", "Correlation"),
        chart("covariance", "Covariances of every two outputs", "Covariance"),
    )
    body += folded("Strongest correlations", _strongest(choice, elements))
    return Section(
        "maps",
        "Correlations",
        "How outputs vary together",
        body,
        {"block": block, "elements": elements},
    )


def _maps(one: Gaussian, block: int) -> dict[str, Any]:
    correlation, covariance = one.correlation_matrix, one.covariance_matrix
    off = correlation - torch.diag(correlation.diagonal())
    count = min(PARTNERS, max(0, len(off) - 1))
    partners = off.abs().topk(count, -1).indices if count else off.new_zeros(len(off), 0).long()
    told: dict[str, Any] = {
        "partners": partners.tolist(), "partner_correlations": rounded(off.gather(-1, partners)),
    }  # fmt: skip
    if block > 1:
        correlation, covariance = _strongest_of(off, block), _strongest_of(covariance, block)
    rows, columns = torch.triu_indices(*correlation.shape)
    told |= {
        "rows": len(correlation), "correlation": rounded(correlation[rows, columns]),
        "covariance": rounded(covariance[rows, columns]),
    }  # fmt: skip
    return told


def _strongest_of(matrix: Tensor, block: int) -> Tensor:
    """Of each block of rows and columns the entry that is farthest from zero."""
    short = -len(matrix) % block
    padded = torch.nn.functional.pad(matrix, (0, short, 0, short))
    count = len(padded) // block
    blocks = padded.reshape(count, block, count, block).transpose(1, 2).flatten(2)
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]


def _strongest(choice: Choice, elements: list[dict[str, Any]]) -> Table:
    """The partners of each output of the first input."""
    head = ("output", *(f"{place + 1}." for place in range(PARTNERS)))
    found = elements[0]
    rows = []
    pairs = zip(found["partners"], found["partner_correlations"], strict=True)
    for name, (partners, values) in list(zip(choice.names, pairs, strict=True))[:ROWS]:
        cells = [f"{choice.names[j]}: {_short(math.nan if v is None else v)}"
                 for j, v in zip(partners, values, strict=True)]  # fmt: skip
        rows.append((name, *cells, *("-",) * (PARTNERS - len(cells))))
    said = [f"Of {choice.batch.labels[0]}."] if choice.batch.labels else []
    if len(choice.names) > ROWS:
        said.append(f"The first {ROWS} of {len(choice.names):,} outputs.")
    return Table(head, tuple(rows), words=len(head), notes=(" ".join(said),))
