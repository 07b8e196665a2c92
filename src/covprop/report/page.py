"""The HTML page as one self-contained file, and its head: summary, trust and key figures."""

import base64
import hashlib
import html
import math
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from torch import Tensor

import covprop
from covprop.attribution import UncertaintyBudget
from covprop.diagnostics.comparison import Comparison
from covprop.diagnostics.steps import Trace
from covprop.diagnostics.verdict import FINE
from covprop.files import write_atomically
from covprop.gaussian import Gaussian
from covprop.report.analyses import (
    budget_figure,
    decision_section,
    decision_sentences,
    layers_section,
    sampling_section,
)
from covprop.report.content import Content, Section, Selection, cards, embedded, paragraph
from covprop.report.sections import (
    LEVELS,
    budget_section,
    inputs_section,
    maps_section,
    outputs_section,
)
from covprop.robustness import Robustness
from covprop.robustness.pairs import known_error
from covprop.text_table import in_digits, in_percent, in_seconds

SCRIPTS = ("charts", "maps", "sections", "layers", "sampling", "decision", "start")
MARKS = {"good": "✓", "fair": "≈", "poor": "!", "unknown": "?"}
"""Classes of the style sheet, from trust to doubt, and their signs."""
ROUGH = 0.05
"""Estimated error from which on a result is not called accurate; `cp.Auto` warns from it on."""
CLOSE = 0.1
"""Largest error of a mean in standard deviations, and of a variance, that is called close."""
CLOSE_PROBABILITY = 0.02
"""Difference of two probabilities that is called close."""


@torch.no_grad()
def render(
    *,
    model_name: str,
    x: Gaussian,
    y: Gaussian | None = None,
    trace: Trace | None = None,
    comparison: Comparison | None = None,
    robustness: Robustness | None = None,
    uncertainty_budget: UncertaintyBudget | None = None,
    output_names: Sequence[str] = (),
) -> str:
    """Make an HTML page of results that needs no other file.

    Args:
        model_name: The title of the page.
        x: The Gaussian input.
        y: The result of `cp.propagate`; by default that of the trace or the comparison.
        trace: The result of `cp.trace`.
        comparison: The result of `cp.compare`.
        robustness: The result of `cp.robustness.analyse` for the same x.
        uncertainty_budget: The result of `cp.uncertainty_budget`.
        output_names: One for each output.

    Returns:
        The text of the page.

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(4), stddev=0.1)
        text = cp.report.render(model_name="a model", x=x, trace=cp.trace(nn.Linear(4, 3), x))
    """
    content = Content(x, y, trace, comparison, robustness, output_names, uncertainty_budget)
    sections = list(_sections(content))
    verdict = _trust(content)
    data: dict[str, Any] = {section.name: section.data for section in sections}
    data["batch"] = content.inputs.batch.labels
    data["levels"] = list(LEVELS.values())
    script = "".join(_asset(f"{name}.js") for name in SCRIPTS)
    script = f"(() => {{\n'use strict';\n{script}}})();\n"
    # The browser allows this script, styles, and nothing from elsewhere.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    now = datetime.now().astimezone()
    return Template(_asset("page.html")).substitute(
        title=html.escape(model_name),
        policy=html.escape(policy),
        style=_asset("page.css"),
        script=script,
        data=embedded(data),
        lead=paragraph(_summary(content), kind="lead"),
        mark=verdict.mark,
        sign=MARKS[verdict.mark],
        trust=html.escape(verdict.words),
        reason=html.escape(verdict.reason),
        cards=cards(list(_key_figures(content))),
        links="".join(
            f'<a href="#{section.name}">{html.escape(section.link)}</a>' for section in sections
        ),
        sections="\n".join(section.to_html() for section in sections),
        made=html.escape(f"Made by covprop {covprop.__version__} on {now:%Y-%m-%d %H:%M %Z}."),
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
    uncertainty_budget: UncertaintyBudget | None = None,
    output_names: Sequence[str] = (),
) -> None:
    """Write the page of `render` to a file, completely or not at all.

    Args:
        path: Where to write.
        model_name: The title of the page.
        x: The Gaussian input.
        y: The result of `cp.propagate`; by default that of the trace or the comparison.
        trace: The result of `cp.trace`.
        comparison: The result of `cp.compare`.
        robustness: The result of `cp.robustness.analyse` for the same x.
        uncertainty_budget: The result of `cp.uncertainty_budget`.
        output_names: One for each output.

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(4), stddev=0.1)
        y = cp.propagate(nn.Linear(4, 3), x)
        cp.report.write("report.html", model_name="a model", x=x, y=y)
    """
    text = render(
        model_name=model_name, x=x, y=y, trace=trace, comparison=comparison,
        robustness=robustness, uncertainty_budget=uncertainty_budget, output_names=output_names,
    )  # fmt: skip
    target = Path(path)
    write_atomically(target, lambda file: file.write(text.encode()))


def _asset(name: str) -> str:
    return (files("covprop.report") / "assets" / name).read_text(encoding="utf-8")


def _sections(content: Content) -> Iterator[Section]:
    """The sections for which there are results, in the order of interest."""
    y, outputs = content.y, content.outputs
    if content.robustness is not None:
        yield decision_section(content.robustness, content.inputs.batch, content.names)
    if y is not None and outputs is not None:
        yield outputs_section(y, outputs, content.sampled)
    yield inputs_section(content.x, content.inputs, content.robustness)
    if content.budget is not None:
        yield budget_section(content.budget, content.names)
    if y is not None and outputs is not None and len(outputs.names) > 1:
        yield maps_section(y, outputs)
    if content.trace is not None:
        yield layers_section(content.trace, len(content.x.batch_shape))
    if content.comparison is not None:
        yield sampling_section(content.comparison)


class Trust(NamedTuple):
    """How far to trust the result: a mark of the style sheet, a few words, and why."""

    mark: str
    words: str
    reason: str


def _trust(content: Content) -> Trust:
    """Judge by samples of output and decision, else by those of the steps on the way to them.

    The worst verdict, with all reasons.
    """
    checks = (_by_comparison(content), _by_decision(content))
    verdicts = [one for one in checks if one is not None]
    if not verdicts:
        single = _by_itself(content) or _by_steps(content) or _by_estimate(content)
        verdicts = [] if single is None else [single]
    if verdicts:
        worst = max(verdicts, key=lambda one: list(MARKS).index(one.mark))
        reasons = dict.fromkeys([*(one.reason for one in verdicts), _error_line(content)])
        return worst._replace(reason=" ".join(reason for reason in reasons if reason))
    reason = (
        "Every operation is exact, or as accurate as covprop says, if its input is Gaussian, which "
        "behind a nonlinearity it is not. cp.compare(model, x) tells how much that matters here."
    )
    return Trust("unknown", "Not checked against sampling", reason)


def _by_comparison(content: Content) -> Trust | None:
    row = content.row
    if content.comparison is None or row is None or row.agreement is None:
        return None
    verdict = row.agreement.verdict
    reason = f"{row.name} against {content.comparison.reference.words}: {verdict}."
    if row.agreement.fine:
        words = "Agrees" if verdict == FINE else "Each moment agrees"
        return Trust("good", f"{words} with sampling", reason)
    reason = f"{reason} {_sentence(content.comparison.advice(row))}"
    errors = (row.agreement.mean_error.flatten(), row.agreement.variance_ratio.flatten() - 1)
    known = torch.cat(errors).abs()
    known = known[~known.isnan()]
    return _near(len(known) > 0 and bool((known <= CLOSE).all()), reason)


def _by_decision(content: Content) -> Trust | None:
    result = content.robustness
    if result is None:
        return None
    difference = float(result.differences.max())
    reason = (
        f"{result.method} against {result.samples:,} samples of the network: "
        f"probabilities of classes differ by {in_digits(difference, 2)} at most"
    )
    if result.agrees.all():
        return Trust("good", "Agrees with sampling", f"{reason}, which sampling explains.")
    return _near(difference <= CLOSE_PROBABILITY, f"{reason}, more than sampling explains.")


def _near(close: bool, reason: str) -> Trust:
    if close:
        return Trust("fair", "Close to sampling", reason)
    return Trust("poor", "Differs from sampling", reason)


def _by_steps(content: Content) -> Trust | None:
    trace = content.trace
    if trace is None or not trace.samples:
        return None
    wrong = trace.first_error()
    samples = f"{trace.samples:,} samples through every step:"
    if wrong is None:
        reason = f"{samples} no variance is off by more than sampling explains."
        return Trust("good", "Agrees with sampling, step by step", reason)
    reason = (
        f"{samples} variances are off from “{wrong.name}” on; the section on layers says by how "
        f"much. {_sentence(trace.advice)}"
    )
    return Trust("fair", "Variances are off on the way", reason)


def _by_itself(content: Content) -> Trust | None:
    """An output that was sampled is as good as its samples are many."""
    if content.y is None or content.y.samples is None:
        return None
    samples = f"{content.y.samples:,}"
    error = known_error(content.y)
    if error is None:
        reason = (
            f"Mean and covariance are those of {samples} samples of the network: each mean is "
            f"known to about {in_digits(content.y.samples**-0.5, 2)} standard deviations."
        )
        return Trust("good", "Sampled", reason)
    reason = f"Mean and covariance are those of {samples} evaluations of the network."
    estimated = _by_estimate(content)
    mark = "unknown" if estimated is None else estimated.mark
    return Trust(mark, "Evaluated at points", reason)


def _error_line(content: Content) -> str:
    """The estimated error of the output as a sentence, or nothing."""
    error = None if content.y is None else known_error(content.y)
    return "" if error is None else _sentence(error.sentence)


def _by_estimate(content: Content) -> Trust | None:
    """By the error that the result itself estimates."""
    error = None if content.y is None else known_error(content.y)
    if error is None or math.isnan(error.largest):
        return None
    if error.largest <= ROUGH:
        return Trust("good", "Estimated to be accurate", _error_line(content))
    if error.largest <= CLOSE:
        return Trust("fair", "Estimated to be close", _error_line(content))
    return Trust("poor", "Estimated to be off", _error_line(content))


def _sentence(advice: str) -> str:
    return f"{advice[0].upper()}{advice[1:]}."


def _summary(content: Content) -> str:
    """What went in and what came out."""
    sentences = [_network(content), _noise(content.x, content.inputs)]
    if content.y is not None and content.outputs is not None:
        sentences.append(_output(content.y, content.outputs, content.robustness is None))
    if content.robustness is not None:
        sentences.append(decision_sentences(content.robustness, content.names))
    return " ".join(sentences)


def _network(content: Content) -> str:
    x, y = content.x, content.y
    outputs = f" to {_shape(y.event_shape)}" if y is not None else ""
    if content.robustness is not None:
        outputs = f" to {content.robustness.probabilities.probability.shape[-1]:,} classes"
    count = math.prod(x.batch_shape)
    many = f", for {count:,} inputs" if x.batch_shape and count != 1 else ""
    steps = f" in {len(content.trace.steps) - 1} operations" if content.trace is not None else ""
    return f"The network maps {_shape(x.event_shape)}{outputs}{steps}{many}."


def _shape(shape: torch.Size) -> str:
    count = shape.numel()
    numbers = "one number" if count == 1 else f"{count:,} numbers"
    sizes = [size for size in shape if size > 1]
    return numbers + (f" ({' × '.join(map(str, sizes))})" if len(sizes) > 1 else "")


def _noise(x: Gaussian, choice: Selection) -> str:
    if _range(x.stddev)[1] == 0:
        return "Its input is a constant, without noise."
    matrix = choice.within(x)[0].correlation_matrix
    off = matrix - torch.diag(matrix.diagonal())
    largest = float(off.abs().max()) if off.numel() else 0.0
    kind = "independent" if largest == 0 else f"correlated up to {in_digits(largest, 2)}"
    return f"Its input carries noise with a standard deviation of {_span(x.stddev)}, {kind}."


def _output(y: Gaussian, choice: Selection, at_length: bool) -> str:
    if _range(y.stddev)[1] == 0:
        return "The output does not vary."
    text = f"The output then varies with a standard deviation of {_span(y.stddev)}"
    if len(choice.outputs) == 1 or not at_length:
        return f"{text}."
    widest = int(choice.within(y)[0].stddev.nan_to_num(-1).argmax())
    where = f" of {choice.batch.labels[0]}" if choice.batch.labels else ""
    return f"{text}; the most uncertain{where} is {choice.names[widest]}."


def _range(values: Tensor) -> tuple[float, float]:
    known = values[values.isfinite()]
    if not known.numel():
        return math.nan, math.nan
    return float(known.min()), float(known.max())


def _span(stddev: Tensor) -> str:
    """A range in words, or one number where both ends read the same."""
    first, last = map(in_digits, _range(stddev))
    return first if first == last else f"{first} to {last}"


def _key_figures(content: Content) -> Iterator[tuple[str, str, str]]:
    """Cards: a name, a number and a remark."""
    result, row = content.robustness, content.row
    if result is not None:
        wrong, sampled = (
            in_percent(float(estimate.probability.double().mean()))
            for estimate in (result.misclassification, result.sampled_misclassification)
        )
        many = " on average" if result.label.numel() > 1 else ""
        yield "wrong decisions", wrong, f"probability{many}; samples: {sampled}"
        yield "noise budget", *budget_figure(result)
    yield "noise in", _span(content.x.stddev), "standard deviation of the input"
    if content.y is not None:
        yield "noise out", _span(content.y.stddev), "standard deviation of the output"
    if content.trace is not None and result is None:
        seconds = sum(step.seconds for step in content.trace.steps)
        yield "time", in_seconds(seconds), f"for {len(content.trace.steps) - 1} operations"
    if content.comparison is not None and row is not None and row.agreement is not None:
        error, sampling = (
            in_percent(float(part.covariance_error.double().nanmean()))
            for part in (row.agreement, content.comparison.reference)
        )
        remark = f"error of the covariance; sampling has {sampling} of its own"
        yield "against sampling", error, remark
