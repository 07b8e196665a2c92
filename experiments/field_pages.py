"""Tables and figures of `field`, from its record alone.

`python -m experiments.field_pages docs/experiments.md` writes its overview into a page, in place of
the table below the line `<!-- numbers: field -->`.
"""

import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import drawing
from experiments.field_networks import CLASS_OF, CLASSES, NOISES
from experiments.options import RESULTS
from experiments.record import read
from experiments.rivals import OURS, RIVALS, WITHOUT_ROW
from experiments.table import Table

MEASURES = ("mean", "stddev", "worst stddev", "covariance", "KL", "W2")
SAMPLED = ("Monte Carlo", "quasi-Monte Carlo")
FLOOR = 1e-6
"""An error that is drawn at least."""
TRUTH = "the truth's own error"
NEAR = (0.04, 0.06)
"""Shares of a panel's width and height within which marks have one label."""
PLACE = re.compile(r"(<!-- numbers: field -->\n\n)(?:\|.*\n)+")
"""The table of a page that the overview takes the place of."""

Rows = dict[tuple[str, str, str, str], dict[str, Any]]
"""Results by network, noise, point and method."""


def rows_of(record: dict[str, Any]) -> Rows:
    """By the parts of their keys."""
    found = {}
    for key, row in record["results"].items():
        network, noise, index, method = key.split("/")
        found[network, noise, index, method] = row
    return found


def chosen(
    rows: Rows, label: str, method: str | None = None, noise: float | None = None
) -> list[dict[str, Any]]:
    """Those of a class of networks, a method, a noise."""
    return [
        row for (network, level, _, name), row in rows.items()
        if CLASS_OF[network] == label and method in (None, name)
        and (noise is None or float(level) == noise)
    ]  # fmt: skip


def methods_of(rows: Rows, label: str) -> list[str]:
    """The methods that were run on a class, in the order of the registry."""
    run = {name for (network, _, _, name) in rows if CLASS_OF[network] == label}
    return [name for name in (*OURS, *RIVALS) if name in run]


def median(rows: Iterable[dict[str, Any]], measure: str) -> float:
    """Of the cases that a method has an answer for; what is not finite counts as infinite."""
    answered = [row for row in rows if "refused" not in row]
    values = [math.inf if row[measure] is None else row[measure] for row in answered]
    return float(np.median(values)) if values else math.nan


def tables(record: dict[str, Any]) -> list[Table]:
    """Errors by class, the frontiers, and what was refused."""
    rows = rows_of(record)
    labels = [label for label in CLASSES if chosen(rows, label)]
    return [
        overview(rows, labels), *(_errors(rows, label) for label in labels),
        _frontiers(rows, labels), _refusals(rows, labels), _without(),
    ]  # fmt: skip


def overview(rows: Rows, labels: Sequence[str]) -> Table:
    """Error of standard deviations and time, by method and class."""
    lines = []
    for method in (*OURS, *RIVALS):
        cells = [_cell(chosen(rows, label, method)) for label in labels]
        if any(cells):
            lines.append([method, *cells])
    truths = [median((row["truth"] for row in chosen(rows, label)), "stddev") for label in labels]
    lines.append([TRUTH, *(f"{truth:.1e}" for truth in truths)])
    note = (
        "Medians over the cases of a class: the error of standard deviations, relative, root mean "
        "square over outputs, and CPU time, with the conversion of the network for packages. In "
        "brackets: how many cases were answered, if not all."
    )
    return Table("All methods", ["method", *labels], lines, note)


def _cell(own: Sequence[dict[str, Any]]) -> str:
    answered = [row for row in own if "refused" not in row]
    if not answered:
        return "refused" if own else ""
    some = f" ({len(answered)} of {len(own)})" if len(answered) < len(own) else ""
    error, seconds = median(answered, "stddev"), median(answered, "seconds")
    return f"{error:.1e}, {_milliseconds(seconds)}{some}"


def _milliseconds(seconds: float) -> str:
    """Two digits, without an exponent."""
    return f"{float(f'{1e3 * seconds:.2g}'):g} ms"


def _errors(rows: Rows, label: str) -> Table:
    lines = []
    for method in methods_of(rows, label):
        own = chosen(rows, label, method)
        answered = [row for row in own if "refused" not in row]
        if not answered:
            lines.append([method, f"0 of {len(own)}", *[""] * (len(MEASURES) + 2)])
            continue
        memory = [row["bytes"] for row in answered if row["bytes"] is not None]
        lines.append([
            method, f"{len(answered)} of {len(own)}",
            *(_measure(answered, measure) for measure in MEASURES),
            f"{1e3 * median(answered, 'seconds'):.3g}",
            f"{np.median(memory) / 1e6:.3g}" if memory else "",
        ])  # fmt: skip
    truths = [row["truth"] for row in chosen(rows, label)]
    lines.append([TRUTH, "", *(_measure(truths, measure) for measure in MEASURES), "", ""])
    header = ["method", "answered", "mean", "std", "std, worst output", "covariance", "KL",
              "W2", "ms", "MB"]  # fmt: skip
    names = sorted({network for network, *_ in rows if CLASS_OF[network] == label})
    note = (
        f"{', '.join(names)}. Medians over networks, noises and points that were answered. Methods "
        "of variances alone have no covariance; their KL and W2 are those of independent outputs."
    )
    return Table(f"Errors: {label}", header, lines, note)


def _measure(rows: Sequence[dict[str, Any]], measure: str) -> str:
    value = median(rows, measure)
    if measure == "covariance" and all(row[measure] is None for row in rows):
        return ""
    return "inf" if math.isinf(value) else f"{value:.1e}"


def points_of(rows: Rows, label: str, noise: float) -> dict[str, tuple[float, float]]:
    """Median seconds and error of standard deviations of the methods that answered all cases."""
    found = {}
    for method in methods_of(rows, label):
        own = chosen(rows, label, method, noise)
        if own and not any("refused" in row for row in own):
            found[method] = (median(own, "seconds"), median(own, "stddev"))
    return found


def frontier(points: dict[str, tuple[float, float]]) -> list[str]:
    """The methods that none is both faster and better than, from the fastest on."""
    kept: list[str] = []
    for name in sorted(points, key=points.__getitem__):
        if not kept or points[name][1] < points[kept[-1]][1]:
            kept.append(name)
    return kept


def _frontiers(rows: Rows, labels: Sequence[str]) -> Table:
    lines = []
    for label in labels:
        for noise in NOISES:
            points = points_of(rows, label, noise)
            if not points:
                continue
            told = [
                f"{name} ({points[name][1]:.1e}, {_milliseconds(points[name][0])})"
                for name in frontier(points)
            ]
            truth = median((row["truth"] for row in chosen(rows, label, noise=noise)), "stddev")
            lines.append([label, str(noise), "; ".join(told), f"{truth:.1e}"])
    header = ["networks", "noise", "from the fastest to the best", TRUTH]
    note = (
        "Methods that none is both faster and better than, with the median error of standard "
        "deviations and the time; of those that answered all cases."
    )
    return Table("Frontiers", header, lines, note)


def _refusals(rows: Rows, labels: Sequence[str]) -> Table:
    lines: dict[tuple[str, str, str], int] = {}
    for label in labels:
        for method in methods_of(rows, label):
            for row in chosen(rows, label, method):
                if "refused" in row:
                    key = (method, label, row["refused"])
                    lines[key] = lines.get(key, 0) + 1
    header = ["method", "networks", "why", "cases"]
    return Table(
        "What was refused", header, [[*key, str(count)] for key, count in lines.items()],
        "A method that cannot do a network says so; it has no part in the medians there.",
    )  # fmt: skip


def _without() -> Table:
    lines = [[name, reason] for name, reason in WITHOUT_ROW.items()]
    return Table("Without a row", ["method", "why"], lines)


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Error of standard deviations against time, by class; a panel for each noise."""
    rows = rows_of(record)
    return {
        f"field-{label.replace(' ', '-').lower()}": _figure(rows, label)
        for label in CLASSES
        if any(points_of(rows, label, noise) for noise in NOISES)
    }


def _figure(rows: Rows, label: str) -> Figure:
    noises = [noise for noise in NOISES if points_of(rows, label, noise)]
    figure, axes = drawing.panels(1, len(noises), width=3.6, height=4.4)
    for panel, noise in zip(axes[0], noises, strict=True):
        _draw(panel, rows, label, noise)
    axes[0, 0].set_ylabel("error of standard deviations", fontsize=drawing.FONT)
    shown = {
        text: handle for panel in axes[0]
        for handle, text in zip(*panel.get_legend_handles_labels(), strict=True)
    }  # fmt: skip
    figure.legend(
        shown.values(), shown, loc="outside lower center", ncols=2 if len(noises) == 1 else 5,
        frameon=False, fontsize=drawing.FONT,
    )  # fmt: skip
    return figure


def _draw(panel: Axes, rows: Rows, label: str, noise: float) -> None:
    """One noise: every method a mark, those of the frontier with a number and a key below."""
    points = {
        name: (seconds, max(error, FLOOR))
        for name, (seconds, error) in points_of(rows, label, noise).items()
        if math.isfinite(error)
    }
    groups = (
        ("covprop", drawing.BLUE, "*", lambda name: name in OURS),
        ("samples and points", drawing.SKY, "o", lambda name: name.startswith(SAMPLED)),
        ("other methods", drawing.VERMILION, "x", lambda _: True),
    )
    left = dict(points)
    for group, colour, marker, belongs in groups:
        own = {name: left.pop(name) for name in list(left) if belongs(name)}
        if own:
            times, errors = zip(*own.values(), strict=True)
            size = 20 if marker == "o" else 44
            panel.scatter(
                times, errors, s=size, color=colour, marker=marker, label=group, linewidths=1.2
            )
    kept = frontier(points)
    panel.step(
        [points[name][0] for name in kept], [points[name][1] for name in kept],
        where="post", color="0.6", linewidth=0.8, zorder=0, label="frontier",
    )  # fmt: skip
    truth = median((row["truth"] for row in chosen(rows, label, noise=noise)), "stddev")
    panel.axhline(max(truth, FLOOR), color="0.6", linestyle=":", label=TRUTH)
    panel.set(xscale="log", yscale="log")
    panel.margins(x=0.15, y=0.1)
    for numbers, name in _labels(panel, [points[name] for name in kept], kept):
        panel.annotate(
            numbers, points[name], (-4, -4), textcoords="offset points", fontsize=drawing.FONT,
            fontweight="bold", horizontalalignment="right", verticalalignment="top",
        )  # fmt: skip
    key = "\n".join(f"{number}  {name}" for number, name in enumerate(kept, 1))
    panel.set_xlabel("seconds of one core", fontsize=drawing.FONT)
    panel.text(
        0, -0.2, key, transform=panel.transAxes, fontsize=drawing.FONT, verticalalignment="top"
    )
    panel.set_title(f"{label}, noise {noise}", fontsize=drawing.FONT + 1)
    panel.tick_params(labelsize=drawing.FONT - 1)


def _labels(
    panel: Axes, points: Sequence[tuple[float, float]], names: Sequence[str]
) -> list[tuple[str, str]]:
    """A number for each mark of the frontier, one for those too near each other: (text, mark)."""
    shares = panel.transAxes.inverted().transform(panel.transData.transform(points))
    found: list[list[int]] = []
    for place, share in enumerate(shares):
        near = found and np.all(np.abs(share - shares[found[-1][-1]]) < NEAR)
        if near:
            found[-1].append(place)
        else:
            found.append([place])
    return [
        (
            str(group[0] + 1) if len(group) == 1 else f"{group[0] + 1}-{group[-1] + 1}",
            names[group[0]],
        )
        for group in found
    ]


def with_overview(text: str, record: dict[str, Any]) -> str:
    """A page with the overview of this record."""
    made = tables(record)[0].markdown().partition("| method")
    found, count = PLACE.subn(lambda match: f"{match[1]}{made[1]}{made[2]}", text)
    if count != 1:
        raise ValueError(f"the page has {count} tables below <!-- numbers: field -->, not one")
    return found


def main() -> None:
    """Write the overview into the pages that are named."""
    for page in map(Path, sys.argv[1:]):
        page.write_text(with_overview(page.read_text(), read(RESULTS / "field.json")))


if __name__ == "__main__":
    main()
