"""The table of supported operations, as the documentation shows it.

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
    Kind.RECURRENT: "recurrent", Kind.ORDER: "order", Kind.REDUCTION: "reduction by an index",
    Kind.CONSTANT: "constant",
}  # fmt: skip
"""What the table calls a kind of operation; other kinds are not listed."""
CARRIED = "exact"
LINEARISED = "expected linearisation"
THIRD = {
    Kind.LINEAR: CARRIED, Kind.MOVEMENT: CARRIED, Kind.JOIN: CARRIED, Kind.CONSTANT: "none",
    Kind.ELEMENTWISE: "first order, own block",
    Kind.PRODUCT: "element by element: own block; sums of products: expected linearisation",
    Kind.MAXIMUM: "as a sum and a ReLU", Kind.SMOOTH: LINEARISED, Kind.ATTENTION: LINEARISED,
    Kind.NOISE: "single masks: own block; shared masks: expected linearisation",
    Kind.RECURRENT: "as its activations and products", Kind.ORDER: "exact in that order",
    Kind.REDUCTION: "as sums and maxima",
}  # fmt: skip
"""What `cp.Cumulants` does with third cumulants."""


def operations_table() -> str:
    """A Markdown table of what has a rule and how exact that rule is."""
    assert rules  # importing the rules fills the table
    groups: dict[tuple[Kind, str], list[str]] = defaultdict(list)
    for row in TABLE.values():
        if row.kind in LABELS and row.in_place_of is None and row.treatment != UNDESCRIBED:
            names = [f"`{name}`" for name in row.name.split(", ")]
            group = groups[row.kind, row.treatment]
            group += [name for name in names if name not in group]
    order = {kind: place for place, kind in enumerate(LABELS)}
    head = "| kind | operations | covariance | third cumulants (`Cumulants`) |"
    lines = [head, "| --- | --- | --- | --- |"]
    lines += [
        f"| {LABELS[kind]} | {', '.join(names)} | {treatment} | {THIRD[kind]} |"
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
