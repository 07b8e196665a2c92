"""Parts of the page: text that is always escaped, tables that fold, places for charts, numbers."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from covprop.report.table import Table

DIGITS = 5
"""Significant digits of the numbers that charts show."""
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What could end the element that holds the data, and how JSON writes it."""


@final
@dataclass(frozen=True)
class Section:
    """A part of the page: its heading, what is read, and the data that its charts draw."""

    name: str
    link: str
    """Its title in a word or two."""
    title: str
    body: str
    """HTML."""
    data: dict[str, Any] = field(default_factory=dict)

    def to_html(self) -> str:
        """The section, which is found by its name."""
        name = html.escape(self.name)
        return (
            f'<section id="{name}" aria-labelledby="{name}-title">'
            f'<h2 id="{name}-title">{html.escape(self.title)}</h2>{self.body}</section>'
        )


def paragraph(*sentences: str, kind: str = "") -> str:
    """Sentences that are not empty; kind: a class of the style sheet."""
    said = " ".join(sentence for sentence in sentences if sentence)
    mark = f' class="{html.escape(kind)}"' if kind else ""
    return f"<p{mark}>{html.escape(said)}</p>" if said else ""


def chart(name: str, label: str, caption: str = "") -> str:
    """A place that the script draws into; label: what it shows, for those who do not see it."""
    above = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return (
        f'<figure>{above}<div class="chart" data-chart="{html.escape(name)}" '
        f'data-label="{html.escape(label)}"></div></figure>'
    )


def beside(*parts: str) -> str:
    """Next to each other where there is room."""
    return f'<div class="beside">{"".join(parts)}</div>'


def folded(title: str, table: Table) -> str:
    """A table that unfolds, without a script too, and on paper."""
    return (
        f'<details class="numbers"><summary>{html.escape(title)}</summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(title)}">'
        f"{table.to_html()}</div></details>"
    )


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """(name, figure, remark) of what is worth a large number."""
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
        short = float(f"{values:.{DIGITS}g}") if math.isfinite(values) else str(values)
        return int(short) if isinstance(short, float) and _is_short(short) else short
    return values


def _is_short(value: float) -> bool:
    """Whether it is shorter to write as a whole number."""
    return value.is_integer() and abs(value) < 10**DIGITS


def embedded(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element, whatever names are in it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return "".join(UNSAFE.get(letter, letter) for letter in text)
