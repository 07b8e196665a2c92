"""The input and its noise, as a picture or as bars."""

from typing import Any

from covprop.gaussian import Gaussian
from covprop.report.page.choice import Choice, deviations
from covprop.report.page.markup import Section, beside, chart, folded, paragraph, rounded
from covprop.report.page.pictures import picture, plane
from covprop.report.page.pictures import sentence as left_out
from covprop.report.table import Table, in_digits

ROWS = 40
"""Rows of the table of inputs."""


def inputs_section(x: Gaussian, most: int) -> Section:
    """What the network was given; most: how many inputs of the batch."""
    choice = Choice.of(x, most=most)
    names = [name.replace("output", "element", 1) for name in choice.names]
    shape = plane(x.event_shape)
    if shape:
        wholes = [x[index].to("cpu") for index in choice.batch]
        elements: list[dict[str, Any]] = [
            {"mean_picture": picture(one.mean.reshape(shape)),
             "stddev_picture": picture(deviations(one).reshape(shape))}
            for one in wholes
        ]  # fmt: skip
        body = paragraph(left_out(*shape)) + beside(
            chart("inputs-mean", "Mean of the input as a picture", "Mean of the input"),
            chart("inputs-stddev", "Noise of the input as a picture",
                  "Standard deviation of its noise"),
        )  # fmt: skip
    else:
        elements = [{"mean": rounded(one.mean), "stddev": rounded(deviations(one))}
                    for one in choice.within(x)]  # fmt: skip
        body = chart("inputs-intervals", "Mean, 50 % and 95 % interval of every input element")
    body += folded("Numbers of the input", _table(x, choice, names))
    return Section("inputs", "What goes in", body, {"names": names, "elements": elements})


def _table(x: Gaussian, choice: Choice, names: list[str]) -> Table:
    """Of the first input."""
    one = choice.within(x)[0]
    rows = tuple(
        (name, in_digits(float(mean), 4), in_digits(float(stddev), 4))
        for name, mean, stddev in list(zip(names, one.mean, deviations(one), strict=True))[:ROWS]
    )
    said = [f"Of {choice.labels[0]}."] if choice.labels else []
    if len(rows) < choice.event_size:
        said.append(f"The first {len(rows)} of {choice.event_size:,} elements.")
    return Table(("element", "mean", "standard deviation"), rows, notes=(" ".join(said),))
