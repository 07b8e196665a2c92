"""A table as data, written as Markdown or LaTeX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

EXPONENT = re.compile(r"^(-?[\d.]+)e([+-])0?(\d+)$")
SPECIAL = str.maketrans({"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "|": r"$|$"})


@final
@dataclass(frozen=True)
class Table:
    """Rows of words below a header; `note` says what was measured on what."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    name: str = field(default="")

    def markdown(self) -> str:
        """As GitHub and mkdocs read it."""
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        body = "\n".join(f"| {' | '.join(_no_bar(cell) for cell in line)} |" for line in lines)
        return (
            f"## {self.title}\n\n{self.note}\n\n{body}\n"
            if self.note
            else (f"## {self.title}\n\n{body}\n")
        )

    def latex(self) -> str:
        """A booktabs table."""
        columns = "l" + "r" * (len(self.header) - 1)
        body = " \\\\\n".join(" & ".join(_latex(cell) for cell in row) for row in self.rows)
        header = " & ".join(_latex(cell) for cell in self.header)
        caption = f"{self.title}. {self.note}" if self.note else self.title
        return (
            f"\\begin{{table}}[ht]\n\\centering\n\\caption{{{_latex(caption)}}}\n"
            f"\\begin{{tabular}}{{{columns}}} \\toprule\n{header} \\\\ \\midrule\n{body} \\\\\n"
            "\\bottomrule\n\\end{tabular}\n\\end{table}\n"
        )


def scientific(value: float) -> str:
    """Three digits, with an exponent."""
    return f"{value:.2e}"


def _no_bar(cell: str) -> str:
    return cell.replace("|", "\\|")


def _latex(cell: str) -> str:
    """Numbers with exponents and ± as mathematics; what is special to LaTeX escaped."""
    if match := EXPONENT.match(cell):
        mantissa, sign, power = match.groups()
        return rf"${mantissa} \times 10^{{{'-' if sign == '-' else ''}{power}}}$"
    if "±" in cell and not re.search(r"[A-Za-z]", cell):
        return f"${cell.replace('±', chr(92) + 'pm')}$"
    return cell.translate(SPECIAL).replace("`", "").replace("±", r"$\pm$").replace("ρ", r"$\rho$")
