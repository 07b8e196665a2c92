"""The table of supported operations, as README and the documentation show it.

`python -m covprop.operations FILE ...` rewrites the table in files that have the two markers.
"""

import sys
from collections import defaultdict
from pathlib import Path

from covprop import rules
from covprop.flow.table import TABLE, UNDESCRIBED, Kind

BEGIN = "<!-- operations: made by `python -m covprop.operations` -->"
END = "<!-- end of operations -->"
LABELS = {
    Kind.LINEAR: "linear", Kind.MOVEMENT: "shape", Kind.ELEMENTWISE: "element-wise",
    Kind.PRODUCT: "products", Kind.JOIN: "joining", Kind.MAXIMUM: "maximum",
    Kind.SMOOTH: "several elements", Kind.NOISE: "noise", Kind.ATTENTION: "attention",
    Kind.RECURRENT: "recurrent", Kind.CONSTANT: "constant",
}  # fmt: skip
"""What the table calls a kind of operation; other kinds are not listed."""


def operations_table() -> str:
    """A Markdown table of what has a rule and how exact that rule is."""
    assert rules  # importing the rules fills the table
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in TABLE.values():
        if row.kind in LABELS and row.in_place_of is None and row.treatment != UNDESCRIBED:
            names = [f"`{name}`" for name in row.name.split(", ")]
            group = groups[LABELS[row.kind], row.treatment]
            group += [name for name in names if name not in group]
    order = {label: place for place, label in enumerate(LABELS.values())}
    lines = ["| kind | operations | covariance |", "| --- | --- | --- |"]
    lines += [
        f"| {kind} | {', '.join(names)} | {treatment} |"
        for (kind, treatment), names in sorted(groups.items(), key=lambda group: order[group[0][0]])
    ]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """A page with the table between its markers made anew."""
    before, _, rest = text.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{operations_table()}\n{END}{after}"


def main(paths: list[str]) -> None:
    """Rewrite the table in each of these pages."""
    for path in map(Path, paths):
        path.write_text(with_table(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
