"""Pages to look at, and what a test needs to read them: their elements, text and data."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import torch
from torch import Tensor, nn

import covprop as cp
from covprop.robustness import analyse

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


def network(inputs: int = 3, outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs)
    return nn.Sequential(*layers).requires_grad_(False)


def gaussian(*batch: int, size: int = 3) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(*batch, size, generator=generator)
    matrix = 0.01 * (torch.eye(size) + 0.3).expand(*batch, size, size)
    return cp.Gaussian(mean, matrix)


def everything(model: nn.Module, x: cp.Gaussian, samples: int = 500) -> dict[str, Any]:
    """What a page takes, all of it."""
    generator = torch.Generator().manual_seed(2)
    return {
        "model_name": "a model",
        "x": x,
        "y": cp.propagate(model, x),
        "trace": cp.trace(model, x, samples=samples, generator=generator),
        "comparison": cp.compare(model, x, samples=samples, generator=generator, show=False),
        "uncertainty_budget": cp.uncertainty_budget(
            model, x, method="gaussian-layers", groups=halves(x.event_shape.numel())
        ),
        "robustness": analyse(model, x, samples=samples, generator=generator),
    }


def halves(size: int) -> dict[str, range] | None:
    """Groups of the elements of an input that has too many to be told one by one."""
    return None if size <= 16 else {"first": range(size // 2), "last": range(size // 2, size)}


class Reader(HTMLParser):
    """Counts elements and keeps ids, attributes, the text that is shown and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.shown = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, _: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.shown += data

    def values(self, name: str) -> list[str | None]:
        return [value for key, value in self.attributes if key == name]


def data_of(text: str) -> dict[str, Any]:
    """The data of the charts; NaN and infinities are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found: dict[str, Any] = json.loads(Reader(text).scripts[0], parse_constant=refuse)
    return found


def rows_of(text: str, title: str) -> list[list[str]]:
    """The cells of the table below a title, row by row."""
    table = text[text.index(f"<summary>{title}") :].split("<tbody>")[1].split("</tbody>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("</tr>")[:-1]]


def whole(triangle: list[Any], rows: int) -> Tensor:
    """The symmetric matrix of an upper triangle."""
    matrix = torch.zeros(rows, rows, dtype=torch.float64)
    values = iter(triangle)
    for i in range(rows):
        for j in range(i, rows):
            matrix[i, j] = matrix[j, i] = float(next(values))
    assert next(values, None) is None
    return matrix
