"""HTML parts of the page: escaped text, folding tables, placeholders for charts, pictures, JSON."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from covprop.text_table import Table

DIGITS = 5
"""Significant digits of the numbers that charts show."""
IMAGE_SIDE = 4
"""Pixels that an image has at least on either side."""
PICTURE_SIDE = 64
"""Pixels of a picture on its longer side."""
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What could end the element that holds the data, and its escape in JSON."""


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
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(title)}">'
        f"{table.to_html()}</div></details>"
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
