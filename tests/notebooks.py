"""Notebooks: run their cells in one namespace, without Jupyter, and keep what they print and draw.

`python -m tests.notebooks docs/notebooks/trust.ipynb ...` runs notebooks and writes their outputs.
"""

import base64
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

from docs.site.notebooks import markdown
from tests.pages import ROOT, run

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
RESOLUTION = 100


def read(path: Path) -> dict[str, Any]:
    """The cells and all else of a notebook."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """In their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed_by(cell: dict[str, Any]) -> str:
    """What is kept of what a cell printed."""
    return "".join("".join(each["text"]) for each in cell["outputs"] if "text" in each)


def pictures_of(cell: dict[str, Any]) -> list[bytes]:
    """What is kept of what a cell drew."""
    kept = [each["data"]["image/png"] for each in cell["outputs"] if "data" in each]
    return [base64.b64decode(picture) for picture in kept]


def executed(
    notebook: dict[str, Any], name: str
) -> Iterator[tuple[dict[str, Any], str, list[bytes]]]:
    """Run the cells: each with what it printed, and the figures of pyplot that it left open."""
    from matplotlib import pyplot

    for cell, (_, printed) in zip(
        code_cells(notebook), run(markdown(notebook), page=name), strict=True
    ):
        drawn = []
        for number in pyplot.get_fignums():
            file = io.BytesIO()
            pyplot.figure(number).savefig(file, dpi=RESOLUTION, metadata={"Software": None})
            drawn.append(file.getvalue())
        pyplot.close("all")
        yield cell, printed, drawn


def outputs(printed: str, drawn: list[bytes]) -> list[dict[str, Any]]:
    """As a notebook keeps them."""
    streams = [
        {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
    ]
    shown = [
        {"output_type": "display_data", "metadata": {},
         "data": {"image/png": base64.b64encode(picture).decode()}}
        for picture in drawn
    ]  # fmt: skip
    return (streams if printed else []) + shown


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    for each in sys.argv[1:]:
        path = (ROOT / each).resolve()
        notebook = read(path)
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            made = [(cell, outputs(printed, drawn))
                    for cell, printed, drawn in executed(notebook, path.name)]  # fmt: skip
        for cell, kept in made:
            cell["outputs"] = kept
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
