"""One file with everything in it: styles, script, data; nothing is fetched."""

import base64
import hashlib
import html
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import torch

import covprop
from covprop.comparison import Comparison
from covprop.gaussian import Gaussian
from covprop.report.page.decision import decision_section
from covprop.report.page.findings import Findings
from covprop.report.page.inputs import inputs_section
from covprop.report.page.layers import layers_section
from covprop.report.page.markup import Section, cards, embedded, paragraph
from covprop.report.page.outputs import LEVELS, maps_section, outputs_section
from covprop.report.page.sampling import sampling_section
from covprop.report.page.summary import figures, lead, trust
from covprop.robustness.result import Robustness
from covprop.steps import Trace

SCRIPTS = (
    "charts.js",
    "maps.js",
    "sections.js",
    "layers.js",
    "sampling.js",
    "decision.js",
    "start.js",
)
MARKS = {"good": "✓", "fair": "≈", "poor": "!", "unknown": "?"}


@torch.no_grad()
def render(
    *,
    model_name: str,
    x: Gaussian,
    y: Gaussian | None = None,
    trace: Trace | None = None,
    comparison: Comparison | None = None,
    robustness: Robustness | None = None,
    output_names: Sequence[str] = (),
) -> str:
    """The page as text; y: what `cp.propagate` found, else that of the trace or comparison."""
    found = Findings(x, y, trace, comparison, robustness, output_names)
    sections = list(_sections(found))
    verdict = trust(found)
    data: dict[str, Any] = {section.name: section.data for section in sections}
    data["batch"] = found.inputs.batch.labels
    data["levels"] = list(LEVELS.values())
    script = "".join(_asset(name) for name in SCRIPTS)
    script = f"(() => {{\n'use strict';\n{script}}})();\n"
    return Template(_asset("page.html")).substitute(
        title=html.escape(model_name),
        policy=html.escape(_policy(script)),
        style=_asset("page.css"),
        script=script,
        data=embedded(data),
        lead=paragraph(lead(found), kind="lead"),
        mark=verdict.mark,
        sign=MARKS[verdict.mark],
        trust=html.escape(verdict.words),
        reason=html.escape(verdict.reason),
        cards=cards(figures(found)),
        links="".join(
            f'<a href="#{section.name}">{html.escape(section.link)}</a>' for section in sections
        ),
        sections="\n".join(section.to_html() for section in sections),
        made=html.escape(_made()),
    )


def write(
    path: str | os.PathLike[str],
    *,
    model_name: str,
    x: Gaussian,
    y: Gaussian | None = None,
    trace: Trace | None = None,
    comparison: Comparison | None = None,
    robustness: Robustness | None = None,
    output_names: Sequence[str] = (),
) -> None:
    """Write what `render` makes of the same arguments: a whole file, or none."""
    text = render(
        model_name=model_name, x=x, y=y, trace=trace, comparison=comparison,
        robustness=robustness, output_names=output_names,
    )  # fmt: skip
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _sections(found: Findings) -> Iterator[Section]:
    """What there is to show, in the order in which it is asked for."""
    if found.robustness is not None:
        yield decision_section(found.robustness, found.inputs.batch, found.names)
    if found.y is not None and found.outputs is not None:
        yield outputs_section(found.y, found.outputs, found.sampled)
    yield inputs_section(found.x, found.inputs, found.robustness)
    if found.y is not None and found.outputs is not None and len(found.outputs.names) > 1:
        yield maps_section(found.y, found.outputs)
    if found.trace is not None:
        yield layers_section(found.trace, len(found.x.batch_shape))
    if found.comparison is not None:
        yield sampling_section(found.comparison)


def _asset(name: str) -> str:
    return (files("covprop.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """What the browser allows: this script, styles, and nothing from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"


def _made() -> str:
    now = datetime.now().astimezone()
    return f"Made by covprop {covprop.__version__} on {now:%Y-%m-%d %H:%M %Z}."
