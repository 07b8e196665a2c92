"""The input and its noise, as a picture or as bars."""

from typing import Any

import torch
from torch import Tensor

from covprop.gaussian import Gaussian
from covprop.report.page.choice import Choice, deviations
from covprop.report.page.markup import Section, beside, chart, folded, paragraph, rounded
from covprop.report.page.outputs import ROWS
from covprop.report.page.pictures import picture, plane
from covprop.report.page.pictures import sentence as left_out
from covprop.report.table import Table, in_digits
from covprop.robustness.result import Robustness


def inputs_section(x: Gaussian, choice: Choice, robustness: Robustness | None) -> Section:
    """What the network was given, and which of it matters to its decision."""
    names = [name.replace("output", "element", 1) for name in choice.names]
    shape = plane(x.event_shape)
    elements = [_drawn(x[index].to("cpu"), choice.outputs, shape) for index in choice.batch.indices]
    if robustness is not None:
        for index, element in zip(choice.batch.indices, elements, strict=True):
            heat = robustness.sensitivity[index].detach().to("cpu", torch.float64)
            if shape:
                element["sensitivity_picture"] = picture(heat.reshape(shape))
            else:
                element["sensitivity"] = rounded(heat.flatten()[choice.outputs])
    body = paragraph(_matters(robustness), left_out(*shape) if shape else "")
    body += beside(*_charts(shape is not None, robustness is not None))
    body += folded("Numbers of the input", _table(x, choice, names))
    title = "What goes in" if robustness is None else "What goes in, and what of it matters"
    return Section("inputs", "Input", title, body, {"names": names, "elements": elements})


def _drawn(one: Gaussian, chosen: Tensor, shape: tuple[int, int, int] | None) -> dict[str, Any]:
    """Mean and noise of one input, as pictures or in a row."""
    mean, stddev = one.mean.double(), deviations(one).double()
    if shape:
        return {
            "mean_picture": picture(mean.reshape(shape)),
            "stddev_picture": picture(stddev.reshape(shape)),
        }
    return {
        "mean": rounded(mean.flatten()[chosen]), "stddev": rounded(stddev.flatten()[chosen])
    }  # fmt: skip


def _matters(robustness: Robustness | None) -> str:
    if robustness is None:
        return ""
    return (
        "The sensitivity says where noise hurts: how fast the probability of a wrong decision "
        "rises with the variance of an element. Blue: noise there makes the decision safer."
    )


def _charts(image: bool, analysed: bool) -> list[str]:
    if image:
        made = [
            chart("inputs-mean", "Mean of the input as a picture", "Mean of the input"),
            chart("inputs-stddev", "Noise of the input as a picture",
                  "Standard deviation of its noise"),
        ]  # fmt: skip
        if analysed:
            made.insert(1, chart("sensitivity", "Sensitivity as a picture", "Sensitivity"))
        return made
    made = [chart("inputs-intervals", "Mean, 50 % and 95 % interval of every input element")]
    if analysed:
        made.append(chart("sensitivities", "Sensitivity of every element", "Sensitivity"))
    return made


def _table(x: Gaussian, choice: Choice, names: list[str]) -> Table:
    """Of the first input."""
    one = choice.within(x)[0]
    rows = tuple(
        (name, in_digits(float(mean), 4), in_digits(float(stddev), 4))
        for name, mean, stddev in list(zip(names, one.mean, deviations(one), strict=True))[:ROWS]
    )
    said = [f"Of {choice.batch.labels[0]}."] if choice.batch.labels else []
    if len(rows) < choice.size:
        said.append(f"The first {len(rows)} of {choice.size:,} elements.")
    return Table(("element", "mean", "standard deviation"), rows, notes=(" ".join(said),))
