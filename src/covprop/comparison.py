"""What a comparison found: a row for each method, as a table and as a figure."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covprop.gaussian import Gaussian
from covprop.methods import ControlVariate, Split
from covprop.remedy import remedy
from covprop.report.plots import comparison_figure
from covprop.report.table import Table, in_bytes, in_digits, in_percent, in_seconds, plain

FINE = "within sampling error"
"""The verdict on a method that nothing speaks against."""


@dataclass(frozen=True)
class Agreement:
    """A method's Gaussian against the sampled one.

    mean_ratio, variance_ratio: of every output, in the shape of the mean; NaN where samples do not
    tell the mean from zero, or where the output does not vary; mean_error: the difference of the
    means over the sampled standard deviation. covariance_error: |C - C_sampled|_F / |C_sampled|_F,
    wasserstein, kl (of the sampled Gaussian to the method's): one for each element of the batch.
    """

    mean_ratio: Tensor
    variance_ratio: Tensor
    mean_error: Tensor
    covariance_error: Tensor
    wasserstein: Tensor
    kl: Tensor
    verdict: str

    @property
    def fine(self) -> bool:
        """Whether at least each moment by itself is within sampling error."""
        return FINE in self.verdict


@dataclass(frozen=True)
class ComparisonRow:
    """One method: what it found and took, or why it refused."""

    name: str
    method: object
    seconds: float = math.nan
    peak_bytes: float = math.nan
    gaussian: Gaussian | None = None
    agreement: Agreement | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Reference:
    """The sampled Gaussian, its cost, and what its own error makes of every figure.

    mean_ratio, variance_ratio, mean_error: standard errors of each output; covariance_error: the
    root of its expected square, by the standard errors; wasserstein, kl: what as many samples of a
    Gaussian give, and for wasserstein as many plain ones as would know the variances as well.
    reason: why it is sampled in this way, if that was chosen here.
    """

    name: str
    gaussian: Gaussian
    seconds: float
    peak_bytes: float
    samples: int
    mean_ratio: Tensor
    variance_ratio: Tensor
    mean_error: Tensor
    covariance_error: Tensor
    wasserstein: Tensor
    kl: Tensor
    reason: str = ""

    @property
    def words(self) -> str:
        """What it is, for a sentence."""
        controlled = isinstance(self.gaussian.method, ControlVariate)
        beside = " with a control variate" if controlled else ""
        return f"{self.samples:,} samples of the network{beside}"


FIGURES = ("mean_ratio", "variance_ratio", "mean_error", "covariance_error", "wasserstein", "kl")


@dataclass(frozen=True)
class Comparison:
    """Methods against samples; print it to see a table, `.plot()` draws it."""

    reference: Reference
    rows: tuple[ComparisonRow, ...]

    def __getitem__(self, name: str) -> ComparisonRow:
        """The row of a method, by its name in the table."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r} is none of {', '.join(row.name for row in self.rows)}")

    def advice(self, row: ComparisonRow) -> str:
        """What to do about a method that is off, in one sentence; nothing if it is not."""
        if row.agreement is None or row.agreement.fine:
            return ""
        compared = [other for other in self.rows if other.agreement is not None]
        right = [other.name for other in compared if other.agreement and other.agreement.fine]
        tried = any(isinstance(other.method, Split) for other in self.rows)
        found = f"{right[0]} is {FINE}; " if right else ""
        return found + remedy(split=not (right or tried))

    @property
    def table(self) -> Table:
        """A row for each method, after that of the reference with its own errors."""
        head = ("method", "mean ratio", "variance ratio", "covariance", "W2", "KL", "time",
                "memory", "verdict")  # fmt: skip
        ratios = self.reference.mean_ratio
        name = self.reference.name
        notes = [
            f"ratios to {name}: average over outputs (standard deviation over them); its row has "
            "the standard errors of sampling",
            f"covariance: relative error in the Frobenius norm; W2, KL({name} || method): between "
            "the Gaussians",
        ]
        if self.reference.reason:
            notes.append(f"{name}: {self.reference.reason}")
        missing, count = int(ratios.isnan().sum()), ratios.numel()
        if missing:
            notes.append(
                f"mean ratio: without {missing} of {count} outputs whose mean samples do not tell "
                "from zero"
            )
        notes += [f"{row.name} refused: {row.refusal}" for row in self.rows if row.refusal]
        first = next((row for row in self.rows if row.agreement is not None), None)
        if first is not None and (advice := self.advice(first)):
            notes.append(f"{first.name} is off; {advice}")
        rows = (self._reference_cells(), *(_cells(row) for row in self.rows))
        return Table(head, rows, remarks=1, notes=tuple(notes))

    def _reference_cells(self) -> tuple[str, ...]:
        found = self.reference
        ratios = (
            f"1 ± {in_digits(_average(r), 2)}" for r in (found.mean_ratio, found.variance_ratio)
        )
        return (
            found.name, *ratios, in_percent(_average(found.covariance_error)),
            in_digits(_average(found.wasserstein), 2), in_digits(_average(found.kl), 2),
            in_seconds(found.seconds), in_bytes(found.peak_bytes), "the reference",
        )  # fmt: skip

    def __str__(self) -> str:
        """The table."""
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table.to_html()

    def to_dict(self) -> dict[str, Any]:
        """Averages, spreads and every output, for JSON."""
        found = self.reference
        reference = _numbers(found) | {
            "name": found.name, "samples": found.samples, "seconds": found.seconds,
            "peak_bytes": found.peak_bytes, "reason": found.reason,
        }  # fmt: skip
        rows = [
            {"name": row.name, "seconds": row.seconds, "peak_bytes": row.peak_bytes,
             "refusal": row.refusal}
            | ({} if row.agreement is None else
               _numbers(row.agreement)
               | {"verdict": row.agreement.verdict, "advice": self.advice(row)})
            for row in self.rows
        ]  # fmt: skip
        return {"reference": plain(reference), "rows": plain(rows)}

    def plot(self) -> Any:
        """A matplotlib figure; needs the extra `plots`."""
        told = self.to_dict()
        return comparison_figure(told["reference"], told["rows"])


def _numbers(found: Agreement | Reference) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for figure in FIGURES:
        values = getattr(found, figure)
        told[figure] = {
            "average": _average(values), "spread": _spread(values), "values": values.tolist()
        }  # fmt: skip
    return told


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    found = row.agreement
    if found is None:
        return (row.name, *("-",) * 7, "refused")
    return (
        row.name, _with_spread(found.mean_ratio), _with_spread(found.variance_ratio),
        in_percent(_average(found.covariance_error)), in_digits(_average(found.wasserstein), 2),
        in_digits(_average(found.kl), 2), in_seconds(row.seconds), in_bytes(row.peak_bytes),
        found.verdict,
    )  # fmt: skip


def _with_spread(ratios: Tensor) -> str:
    average = _average(ratios)
    if math.isnan(average):
        return "-"
    spread = _spread(ratios)
    return f"{average:.4f}" + ("" if math.isnan(spread) else f" ({in_digits(spread, 2)})")


def _average(values: Tensor) -> float:
    """Of what is known."""
    known = values[~values.isnan()]
    return float(known.mean()) if known.numel() else math.nan


def _spread(values: Tensor) -> float:
    """The standard deviation of what is known."""
    known = values[~values.isnan()]
    finite = known.numel() > 1 and bool(torch.isfinite(known).all())
    return float(known.std()) if finite else math.nan
