"""What a page is about, which inputs and outputs it shows, and the HTML that it is made of."""

import html
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from covprop.attribution import UncertaintyBudget
from covprop.diagnostics.comparison import Comparison, ComparisonRow
from covprop.diagnostics.steps import Trace
from covprop.gaussian import Gaussian
from covprop.robustness import Robustness
from covprop.text_table import Table

DIGITS = 5
"""Significant digits of the numbers that charts show."""
IMAGE_SIDE = 4
"""Pixels that an image has at least on either side."""
PICTURE_SIDE = 64
"""Pixels of a picture on its longer side."""
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What could end the element that holds the data, and its escape in JSON."""
NUMBERS = 100_000
"""Numbers that the inputs of a batch may add to the page, about."""
INPUTS = 24
"""Inputs of a batch that a person would choose from."""
OUTPUTS = 1000
"""Outputs that are shown one by one."""
MAP = 100
"""Rows of a map; a larger matrix is shown by blocks."""
PICTURES = 3
"""Of an input: mean, noise, sensitivity."""


@final
@dataclass(frozen=True)
class Section:
    """A section of the page: its name, short and long title, HTML, and data of its charts."""

    name: str
    link: str
    title: str
    body: str
    data: dict[str, Any] = field(default_factory=dict)

    def to_html(self) -> str:
        """The section, with its name as its id."""
        name = html.escape(self.name)
        return (
            f'<section id="{name}" aria-labelledby="{name}-title">'
            f'<h2 id="{name}-title">{html.escape(self.title)}</h2>{self.body}</section>'
        )


def paragraph(*sentences: str, kind: str = "") -> str:
    """A paragraph of the sentences that are not empty; kind: a class of the style sheet."""
    text = " ".join(sentence for sentence in sentences if sentence)
    mark = f' class="{html.escape(kind)}"' if kind else ""
    return f"<p{mark}>{html.escape(text)}</p>" if text else ""


def chart(name: str, label: str, caption: str = "") -> str:
    """A placeholder that the script draws into; label: a description for screen readers."""
    above = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return (
        f'<figure>{above}<div class="chart" data-chart="{html.escape(name)}" '
        f'data-label="{html.escape(label)}"></div></figure>'
    )


def beside(*parts: str) -> str:
    """Parts side by side where the window is wide enough."""
    return f'<div class="beside">{"".join(parts)}</div>'


def folded(title: str, table: Table) -> str:
    """A table that unfolds, also without a script and on paper."""
    return (
        f'<details class="numbers"><summary>{html.escape(title)}</summary>'
        f"{tabulated(title, table)}</details>"
    )


def tabulated(title: str, table: Table) -> str:
    """A table that scrolls where it is wide."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(title)}">'
        f"{table.to_html()}</div>"
    )


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Large numbers: (name, figure, remark) of each."""
    inside = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(figure)}"
        f"<small>{html.escape(remark)}</small></dd></div>"
        for name, figure, remark in items
    )
    return f'<dl class="cards">{inside}</dl>'


def rounded(values: Any) -> Any:
    """Numbers for JSON, nested as they are: None for NaN, and words for infinities."""
    if isinstance(values, Tensor):
        values = values.detach().tolist()
    if isinstance(values, list | tuple):
        return [rounded(value) for value in values]
    if isinstance(values, float):
        if math.isnan(values):
            return None
        if math.isinf(values):
            return str(values)
        short = float(f"{values:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 10**DIGITS else short
    return values


def embedded(data: dict[str, Any]) -> str:
    """JSON that is safe inside a script element, whatever names are in it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return "".join(UNSAFE.get(letter, letter) for letter in text)


def plane(shape: Sequence[int]) -> tuple[int, int, int] | None:
    """(channels, height, width) of an event that is an image, else None."""
    sizes = [int(size) for size in shape]
    while len(sizes) > 3 and sizes[0] == 1:  # noqa: PLR2004
        sizes = sizes[1:]
    if len(sizes) == 2:  # noqa: PLR2004
        sizes = [1, *sizes]
    if len(sizes) != 3 or min(sizes[1:]) < IMAGE_SIDE:  # noqa: PLR2004
        return None
    return sizes[0], sizes[1], sizes[2]


def picture(values: Tensor, side: int = PICTURE_SIDE) -> dict[str, Any]:
    """Averages over channels (channels, height, width), and over pixels where there are many."""
    flat = values.double().mean(0, keepdim=True)
    height, width = flat.shape[-2:]
    shrink = max(1.0, max(height, width) / side)
    size = max(1, round(height / shrink)), max(1, round(width / shrink))
    small = torch.nn.functional.adaptive_avg_pool2d(flat, size)[0] if shrink > 1 else flat[0]
    return {"rows": size[0], "columns": size[1], "values": rounded(small.flatten())}


def picture_note(shape: tuple[int, int, int] | None) -> str:
    """What the pictures of an image leave out."""
    if shape is None:
        return ""
    channels, height, width = shape
    parts = [f"averages over {channels} channels"] if channels > 1 else []
    if max(height, width) > PICTURE_SIDE:
        parts.append(f"averages of neighbouring pixels ({height} × {width} in all)")
    return f"Pictures show {' and '.join(parts)}." if parts else ""


@final
@dataclass(frozen=True)
class BatchSelection:
    """Which inputs of a batch are shown; places: in the flattened batch; kind: how chosen."""

    shape: tuple[int, ...]
    places: tuple[int, ...]
    kind: str = "first"

    @classmethod
    def of(cls, shape: Sequence[int], numbers: int, risk: Tensor | None = None) -> "BatchSelection":
        """The first, or those of the largest risk; numbers: how many each adds to the page."""
        size = math.prod(shape)
        count = max(1, min(INPUTS, size, NUMBERS // max(1, numbers)))
        if risk is None:
            return cls(tuple(shape), tuple(range(min(count, size))))
        riskiest = risk.flatten().nan_to_num(math.inf).argsort(descending=True, stable=True)
        return cls(tuple(shape), tuple(sorted(riskiest[:count].tolist())), "riskiest")

    @property
    def indices(self) -> list[tuple[int, ...]]:
        """The index of each, in all dimensions of the batch."""
        every = list(itertools.product(*(range(length) for length in self.shape)))
        return [every[place] for place in self.places]

    @property
    def labels(self) -> list[str]:
        """Names; none where the batch has one input."""
        if math.prod(self.shape) == 1:
            return []
        return [f"input {', '.join(map(str, index))}" for index in self.indices]

    @property
    def note(self) -> str:
        """What is left out."""
        size, count = math.prod(self.shape), len(self.places)
        if count == size:
            return ""
        return f"The page shows the {count} {self.kind} of {size:,} inputs, to stay small."


@final
@dataclass(frozen=True)
class Selection:
    """Which inputs, and which elements of the flattened event of each, with their names."""

    batch: BatchSelection
    outputs: Tensor
    names: tuple[str, ...]
    size: int

    @classmethod
    def of(cls, y: Gaussian, batch: BatchSelection, names: Sequence[str] = ()) -> "Selection":
        """All outputs, or evenly spaced ones where there are too many."""
        size = y.event_shape.numel()
        places = torch.linspace(0, max(0, size - 1), min(size, OUTPUTS), dtype=torch.float64)
        outputs = places.round().long()
        return cls(batch, outputs, _names(y, outputs, names), size)

    @property
    def note(self) -> str:
        """What is left out."""
        shown = len(self.outputs)
        spaced = f"Of {self.size:,} outputs, {shown:,} that are evenly spaced are shown."
        return f"{self.batch.note} {spaced if shown < self.size else ''}".strip()

    @property
    def first_note(self) -> list[str]:
        """Which input a table of the first one is of, if there are several."""
        return [f"Of {self.batch.labels[0]}."] if self.batch.labels else []

    def within(self, x: Gaussian) -> list[Gaussian]:
        """Each chosen input of the batch, with only the chosen outputs, in float64."""
        index = self.outputs.to(x.device)
        return [x[place].marginal(index).to("cpu", torch.float64) for place in self.batch.indices]


def _numbers_of(y: Gaussian) -> int:
    """About how many numbers an output adds to the page."""
    kept = min(y.event_shape.numel(), OUTPUTS)
    rows = min(kept, MAP)
    return 8 * kept + rows * (rows + 1)


def _names(y: Gaussian, outputs: Tensor, names: Sequence[str]) -> tuple[str, ...]:
    size = y.event_shape.numel()
    if names:
        if len(names) != size:
            raise ValueError(f"{len(names)} names for {size} outputs; give one for each, or none")
        return tuple(str(names[i]) for i in outputs.tolist())
    shape = [length for length in y.event_shape if length > 1]
    places = torch.unravel_index(outputs, shape) if len(shape) > 1 else (outputs,)
    return tuple(
        f"output {', '.join(map(str, place))}"
        for place in zip(*(axis.tolist() for axis in places), strict=True)
    )


@final
@dataclass(frozen=True)
class Content:
    """Results about a network and its input; all but the input may be missing."""

    x: Gaussian
    given_y: Gaussian | None
    trace: Trace | None
    comparison: Comparison | None
    robustness: Robustness | None
    names: Sequence[str]
    """Of the outputs, or none."""
    budget: UncertaintyBudget | None = None

    def __post_init__(self) -> None:
        empty = self.given_y is not None and not self.given_y.mean.numel()
        if not self.x.mean.numel() or empty:
            raise ValueError("there is nothing to report on: the batch or the event is empty")
        if self.robustness is not None and self.robustness.label.shape != self.x.batch_shape:
            raise ValueError(
                f"the robustness is of a batch of shape {tuple(self.robustness.label.shape)} and x "
                f"has {tuple(self.x.batch_shape)}; give the x that was analysed"
            )

    @cached_property
    def row(self) -> ComparisonRow | None:
        """Of the comparison: the method that made the output, else the first that ran."""
        if self.comparison is None:
            return None
        known = [row for row in self.comparison.rows if row.agreement is not None]
        made = None if self.given_y is None else self.given_y.method
        same = [row for row in known if made is not None and row.method == made]
        return next(iter([*same, *known]), None)

    @cached_property
    def y(self) -> Gaussian | None:
        """The output that was given, or that of the trace or the comparison."""
        if self.given_y is not None:
            return self.given_y
        if self.trace is not None and isinstance(self.trace.output, Gaussian):
            return self.trace.output
        if self.row is None:
            return None if self.budget is None else self.budget.output
        return self.row.gaussian

    @cached_property
    def sampled(self) -> Gaussian | None:
        """The same output by sampling."""
        truth = None if self.comparison is None else self.comparison.reference.gaussian
        same = truth is not None and self.y is not None and truth.mean.shape == self.y.mean.shape
        return truth if same else None

    @cached_property
    def inputs(self) -> Selection:
        """Which of the input is shown."""
        numbers = PICTURES * min(self.x.event_shape.numel(), max(PICTURE_SIDE**2, OUTPUTS))
        if self.y is not None:
            numbers += _numbers_of(self.y)
        result = self.robustness
        risk = None if result is None else result.misclassification.probability
        return Selection.of(self.x, BatchSelection.of(self.x.batch_shape, numbers, risk))

    @cached_property
    def outputs(self) -> Selection | None:
        """Which of the output is shown: that of the same inputs."""
        if self.y is None:
            return None
        batch = self.inputs.batch
        if batch.shape != tuple(self.y.batch_shape):
            batch = BatchSelection.of(self.y.batch_shape, _numbers_of(self.y))
        return Selection.of(self.y, batch, self.names)
