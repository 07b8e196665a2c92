"""Sections on Gaussians: the input and its noise, the outputs, and how outputs vary together."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from covprop.attribution import UncertaintyBudget
from covprop.gaussian import Gaussian
from covprop.report.content import (
    MAP,
    Section,
    Selection,
    beside,
    chart,
    folded,
    paragraph,
    picture,
    picture_note,
    plane,
    rounded,
    tabulated,
)
from covprop.robustness import Robustness
from covprop.text_table import Table, in_digits

LEVELS = {"50 %": NormalDist().inv_cdf(0.75), "95 %": NormalDist().inv_cdf(0.975)}
"""Central intervals, and how many standard deviations they reach to either side."""
ROWS = 100
"""Rows of a table of elements."""
PARTNERS = 3
"""The strongest correlations of an output that are named."""


def inputs_section(x: Gaussian, choice: Selection, robustness: Robustness | None) -> Section:
    """The input of the network, and which of it matters to its decision."""
    names = [name.replace("output", "element", 1) for name in choice.names]
    shape = plane(x.event_shape)
    elements = []
    for index in choice.batch.indices:
        values = {"mean": x[index].mean, "stddev": x[index].stddev}
        if robustness is not None:
            values["sensitivity"] = robustness.sensitivity[index]
        values = {name: value.detach().to("cpu", torch.float64) for name, value in values.items()}
        if shape:
            elements.append(_pictures(values, shape))
        else:
            elements.append({
                name: rounded(value.flatten()[choice.outputs]) for name, value in values.items()
            })  # fmt: skip
    title, meaning = "What goes in", ""
    if robustness is not None:
        title = "What goes in, and what of it matters"
        meaning = (
            "The sensitivity says where noise hurts: how fast the probability of a wrong decision "
            "rises with the variance of an element. Blue: noise there makes the decision safer."
        )
    body = paragraph(meaning, picture_note(shape))
    body += beside(*_input_charts(shape is not None, robustness is not None))
    body += folded("Numbers of the input", _input_table(x, choice, names))
    return Section("inputs", "Input", title, body, {"names": names, "elements": elements})


def _pictures(values: dict[str, Tensor], shape: tuple[int, int, int]) -> dict[str, Any]:
    return {f"{name}_picture": picture(value.reshape(shape)) for name, value in values.items()}


def _input_charts(image: bool, analysed: bool) -> list[str]:
    if image:
        charts = [
            chart("inputs-mean", "Mean of the input as a picture", "Mean of the input"),
            chart("inputs-stddev", "Noise of the input as a picture",
                  "Standard deviation of its noise"),
        ]  # fmt: skip
        if analysed:
            charts.insert(1, chart("sensitivity", "Sensitivity as a picture", "Sensitivity"))
        return charts
    charts = [chart("inputs-intervals", "Mean, 50 % and 95 % interval of every input element")]
    if analysed:
        charts.append(chart("sensitivities", "Sensitivity of every element", "Sensitivity"))
    return charts


def _input_table(x: Gaussian, choice: Selection, names: list[str]) -> Table:
    """Of the first input."""
    one = choice.within(x)[0]
    rows = tuple(
        (name, _short(mean), _short(stddev))
        for name, mean, stddev in list(zip(names, one.mean, one.stddev, strict=True))[:ROWS]
    )
    notes = choice.first_note
    if len(rows) < choice.size:
        notes.append(f"The first {len(rows)} of {choice.size:,} elements.")
    return Table(("element", "mean", "standard deviation"), rows, notes=(" ".join(notes),))


def budget_section(budget: UncertaintyBudget, names: Sequence[str]) -> Section:
    """Which input the uncertainty comes from; names: of the outputs, or none."""
    meaning = (
        "The contribution is what an input adds to the standard deviation of an output in a linear "
        "model. Shares are parts of the variance of the network as it is, and sum to 100 %: what "
        "interactions and correlations give to several inputs is divided among them."
    )
    title = "Where the uncertainty comes from"
    body = paragraph(meaning) + tabulated(title, budget.tabulated(names))
    return Section("budget", "Uncertainty budget", title, body)


def outputs_section(y: Gaussian, choice: Selection, sampled: Gaussian | None) -> Section:
    """Mean and intervals of every output; sampled: the same by sampling."""
    chosen = choice.within(y)
    truth = choice.within(sampled) if sampled is not None else [None] * len(chosen)
    elements = [_element(one, other) for one, other in zip(chosen, truth, strict=True)]
    shape = plane(y.event_shape)
    if shape:
        for index, element in zip(choice.batch.indices, elements, strict=True):
            whole = y[index].to("cpu")
            element |= _pictures({"mean": whole.mean, "stddev": whole.stddev}, shape)
    mixture = ""
    if y.mixture is not None:
        mixture = (
            f"The output is a mixture of {len(y.mixture.weights)} Gaussians; shown is the one with "
            "its mean and covariance."
        )
    body = paragraph(
        f"Each output is taken as a {'Gaussian' if y.skewness is None else 'skewed Gaussian'}: "
        "half of its values fall in the thick bar, 95 of 100 in the thin one.",
        mixture,
        "Orange is what sampling found." if sampled is not None else "",
        choice.note,
        picture_note(shape),
    )
    if shape:
        body += beside(
            chart("outputs-mean", "Mean of the outputs as a picture", "Mean"),
            chart("outputs-stddev", "Standard deviations as a picture", "Standard deviation"),
        )
    body += beside(
        chart("intervals", "Mean, 50 % and 95 % interval of every output"),
        chart("density", "Density of the chosen output"),
    )
    body += folded("Numbers of the outputs", _output_table(choice, chosen, truth))
    data = {"names": list(choice.names), "elements": elements}
    return Section("outputs", "Outputs", "What comes out", body, data)


def _element(one: Gaussian, sampled: Gaussian | None) -> dict[str, Any]:
    data = {"mean": rounded(one.mean), "stddev": rounded(one.stddev)}
    if sampled is not None:
        mean_error, stddev_error = _errors(sampled)
        data["sampled"] = {
            "mean": rounded(sampled.mean), "stddev": rounded(sampled.stddev),
            "mean_stderr": rounded(mean_error), "stddev_stderr": rounded(stddev_error),
        }  # fmt: skip
    return data


def _errors(sampled: Gaussian) -> tuple[Tensor, Tensor]:
    """Standard errors of means and of standard deviations, NaN where there are none."""
    if sampled.mean_stderr is None or sampled.covariance_stderr is None:
        unknown = torch.full_like(sampled.mean, math.nan)
        return unknown, unknown
    # The standard deviation is the root of the variance: its error is that over 2 sigma.
    return sampled.mean_stderr, sampled.covariance_stderr.diagonal() / (2 * sampled.stddev)


def _output_table(choice: Selection, chosen: list[Gaussian], truth: list[Any]) -> Table:
    labels = choice.batch.labels
    head = ["input"] if labels else []
    head += ["output", "mean", "standard deviation", *(f"{name} interval" for name in LEVELS)]
    if truth[0] is not None:
        head += ["sampled mean", "sampled standard deviation"]
    rows: list[tuple[str, ...]] = []
    for place, (one, other) in enumerate(zip(chosen, truth, strict=True)):
        intervals = [one.interval(2 * NormalDist().cdf(k) - 1) for k in LEVELS.values()]
        for i, name in enumerate(choice.names[: max(0, ROWS - len(rows))]):
            mean, stddev = float(one.mean[i]), float(one.stddev[i])
            ends = [f"{_short(low[i])} to {_short(high[i])}" for low, high in intervals]
            cells = [*labels[place : place + 1], name, _short(mean), _short(stddev), *ends]
            if other is not None:
                errors = _errors(other)
                cells += [
                    f"{_short(value[i])} ± {in_digits(float(error[i]), 2)}"
                    for value, error in zip((other.mean, other.stddev), errors, strict=True)
                ]
            rows.append(tuple(cells))
    total = len(chosen) * len(choice.names)
    note = f"The first {ROWS} of {total:,} rows." if total > ROWS else ""
    return Table(tuple(head), tuple(rows), 2 if labels else 1, notes=(note,))


def _short(value: float | Tensor) -> str:
    return in_digits(float(value), 4)


def maps_section(y: Gaussian, choice: Selection) -> Section:
    """Covariances and correlations of every two outputs, by blocks where there are many."""
    block = math.ceil(len(choice.outputs) / MAP)
    elements = [_maps(one, block) for one in choice.within(y)]
    blocks = (
        f"There are {len(choice.outputs):,} outputs, so each cell stands for {block} × {block} "
        "pairs and shows the strongest of them; of correlations without the diagonal."
    )
    body = paragraph(
        "Orange: two outputs rise and fall together. Blue: one rises where the other falls.",
        blocks if block > 1 else "",
    )
    body += paragraph(
        "Point at a cell, or focus a map and use the arrow keys, to read its value.", kind="screen"
    )
    body += beside(
        chart("correlation", "Correlations of every two outputs", "Correlation"),
        chart("covariance", "Covariances of every two outputs", "Covariance"),
    )
    body += folded("Strongest correlations", _partner_table(choice, elements[0]))
    data = {"block": block, "elements": elements}
    return Section("maps", "Correlations", "How outputs vary together", body, data)


def _maps(one: Gaussian, block: int) -> dict[str, Any]:
    correlation, covariance = one.correlation_matrix, one.covariance_matrix
    off = correlation - torch.diag(correlation.diagonal())
    partners = off.abs().topk(min(PARTNERS, max(0, len(off) - 1)), -1).indices
    if block > 1:
        correlation, covariance = _strongest(off, block), _strongest(covariance, block)
    rows, columns = torch.triu_indices(*correlation.shape)
    return {
        "partners": partners.tolist(), "partner_correlations": rounded(off.gather(-1, partners)),
        "rows": len(correlation), "correlation": rounded(correlation[rows, columns]),
        "covariance": rounded(covariance[rows, columns]),
    }  # fmt: skip


def _strongest(matrix: Tensor, block: int) -> Tensor:
    """Of each block of rows and columns the entry that is farthest from zero."""
    short = -len(matrix) % block
    padded = torch.nn.functional.pad(matrix, (0, short, 0, short))
    count = len(padded) // block
    blocks = padded.reshape(count, block, count, block).transpose(1, 2).flatten(2)
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0]


def _partner_table(choice: Selection, first: dict[str, Any]) -> Table:
    """The strongest correlations of each output of the first input."""
    head = ("output", *(f"{place + 1}." for place in range(PARTNERS)))
    rows = []
    columns = (choice.names, first["partners"], first["partner_correlations"])
    for name, partners, values in list(zip(*columns, strict=True))[:ROWS]:
        cells = [f"{choice.names[j]}: {_short(math.nan if v is None else v)}"
                 for j, v in zip(partners, values, strict=True)]  # fmt: skip
        rows.append((name, *cells, *("-",) * (PARTNERS - len(cells))))
    notes = choice.first_note
    if len(choice.names) > ROWS:
        notes.append(f"The first {ROWS} of {len(choice.names):,} outputs.")
    return Table(head, tuple(rows), words=len(head), notes=(" ".join(notes),))
