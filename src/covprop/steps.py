"""What a trace found: the steps of a propagation, as a table and as a figure."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from covprop.departure import DOUBT, Departure, kolmogorov_quantile, median_and_worst
from covprop.gaussian import Gaussian
from covprop.kernels.normal import known_deviation
from covprop.orders import DIRECT
from covprop.remedy import remedy
from covprop.report.plots import trace_figure
from covprop.report.table import Table, in_digits, in_percent, in_seconds, plain

NOT_GAUSSIAN = 0.05
"""Kolmogorov distance from which the foot of the table calls a step not Gaussian."""
OFF = 0.01
"""Error of a variance from which the foot of the table names a step."""
SURE = 5.0
"""Standard errors of sampling that an error has to exceed to be named."""


@dataclass(frozen=True)
class TraceStep:
    """One result of one operation.

    module: the path of the module whose forward called it ("" is the model itself, or a function);
    mean, variance: of each element, the batch first; largest_correlation: between two elements;
    orders: of the series that blocks of pairs used, 0 for a direct formula, none where no series is
    an option; seconds: of the operation, on its first result; gaussian: with `keep=True`;
    departure: what samples say, with `samples=...`.
    """

    module: str
    operation: str
    shape: tuple[int, ...]
    mean: Tensor
    variance: Tensor
    largest_correlation: float
    orders: tuple[int, ...]
    seconds: float
    gaussian: Gaussian | None = None
    departure: Departure | None = None

    @property
    def name(self) -> str:
        """Module and operation."""
        return f"{self.module} {self.operation}".strip()

    @property
    def stddev(self) -> Tensor:
        """The deviation of each element; NaN where a variance is negative."""
        return known_deviation(self.variance.flatten()).reshape(self.variance.shape)

    @property
    def series(self) -> str:
        """The orders in words."""
        terms = [str(order) for order in self.orders if order != DIRECT]
        ends = "-".join(dict.fromkeys((terms[0], terms[-1]))) if terms else ""
        return "+".join(filter(None, (ends, "direct" if DIRECT in self.orders else "")))


@dataclass(frozen=True)
class Trace:
    """The steps of a propagation; print it to see a table, `.plot()` draws it.

    output: what `cp.propagate` returns; samples: how many were drawn.
    """

    steps: tuple[TraceStep, ...]
    output: Any
    samples: int = 0

    def at(self, module: str) -> tuple[TraceStep, ...]:
        """The steps of a module and of all inside it."""
        inside = f"{module}."
        return tuple(s for s in self.steps if s.module == module or s.module.startswith(inside))

    def first_departure(self, distance: float = NOT_GAUSSIAN) -> TraceStep | None:
        """The first step with an element that is farther from Gaussian, by Kolmogorov distance.

        And farther than sampling makes, in 95 of 100 traces, any element of any Gaussian step.
        """
        found = [(s, s.departure.kolmogorov) for s in self.steps if s.departure is not None]
        tests = max(1, sum(distances.numel() for _, distances in found))
        noise = kolmogorov_quantile(self.samples, DOUBT / tests) if found else 0.0
        for step, distances in found:
            _, worst = median_and_worst(distances)
            if worst > max(distance, noise):
                return step
        return None

    def first_error(self, share: float = OFF) -> TraceStep | None:
        """The first step with a variance that is off by more, beyond the error of sampling."""
        for step in self.steps:
            if step.departure is not None:
                error, noise = step.departure.variance_error, step.departure.variance_stderr
                # The larger variance is the scale: samples that miss what is rare give a small one.
                surprising = error.abs() / (1 + error).clamp(min=1) > SURE * noise
                if bool((surprising & (error.abs() > share)).any()):
                    return step
        return None

    @property
    def advice(self) -> str:
        """What to do about layers that are too far from Gaussian, if variances are off for it."""
        return "" if self.first_error() is None else remedy()

    @property
    def table(self) -> Table:
        """A row for each step."""
        head = ["module", "operation", "shape", "mean", "variance", "largest", "max |rho|",
                "order", "time"]  # fmt: skip
        if self.samples:
            head += ["skewness", "kurtosis", "Kolmogorov", "mean error", "variance error"]
        rows = tuple(_cells(step, bool(self.samples)) for step in self.steps)
        return Table(tuple(head), rows, words=3, notes=tuple(self._notes()))

    def _notes(self) -> list[str]:
        notes = ["mean, variance: averages over elements; largest: of the variances"]
        if not self.samples:
            return notes
        bent, wrong = self.first_departure(), self.first_error()
        noise = next((s.departure for s in self.steps if s.departure is not None), None)
        notes.append(
            f"{self.samples:,} samples; median / worst of the elements, excess kurtosis, mean "
            "error in standard deviations"
        )
        if noise is not None:
            notes.append(
                f"sampling alone: Kolmogorov {noise.kolmogorov_noise:.2g}, mean error "
                f"{noise.mean_stderr:.2g}, variance error {in_percent((2 / self.samples) ** 0.5)}"
            )
        notes.append(
            f"first step that is not Gaussian (Kolmogorov > {NOT_GAUSSIAN}): "
            f"{bent.name if bent else 'none'}"
        )
        notes.append(
            f"first step whose variance is off by more than {in_percent(OFF)} and sampling error: "
            f"{wrong.name if wrong else 'none'}"
        )
        if wrong is not None:
            notes.append(f"variances are off from there on; {remedy()}")
        return notes

    def __str__(self) -> str:
        """The table."""
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table.to_html()

    def to_dict(self) -> dict[str, Any]:
        """Summaries of all steps, for JSON."""
        steps = [plain(_summary(step)) for step in self.steps]
        return {"samples": self.samples, "steps": steps, "advice": self.advice}

    def plot(self) -> Any:
        """A matplotlib figure; needs the extra `plots`."""
        return trace_figure([_summary(step) for step in self.steps])


def _summary(step: TraceStep) -> dict[str, Any]:
    found: dict[str, Any] = {
        "module": step.module, "operation": step.operation, "shape": list(step.shape),
        "mean": float(step.mean.mean()), "variance": float(step.variance.mean()),
        "largest_variance": float(step.variance.max()) if step.variance.numel() else math.nan,
        "largest_correlation": step.largest_correlation, "orders": list(step.orders),
        "seconds": step.seconds,
    }  # fmt: skip
    if step.departure is not None:
        measures = ("skewness", "excess_kurtosis", "kolmogorov", "mean_error", "variance_error")
        for measure in measures:
            median, worst = median_and_worst(getattr(step.departure, measure))
            found |= {measure: {"median": median, "worst": worst}}
        found |= {
            "kolmogorov_noise": step.departure.kolmogorov_noise,
            "mean_stderr": step.departure.mean_stderr,
            "variance_stderr": median_and_worst(step.departure.variance_stderr)[0],
        }
    return found


def _cells(step: TraceStep, sampled: bool) -> tuple[str, ...]:
    summary = _summary(step)
    cells = (
        step.module, step.operation, "x".join(map(str, step.shape)),
        in_digits(summary["mean"]), in_digits(summary["variance"]),
        in_digits(summary["largest_variance"]), f"{step.largest_correlation:.3f}",
        step.series, in_seconds(step.seconds) if step.seconds else "",
    )  # fmt: skip
    if not sampled:
        return cells
    if step.departure is None:
        return (*cells, *("-",) * 5)

    def both(measure: str, write: Callable[[float], str]) -> str:
        return f"{write(summary[measure]['median'])} / {write(summary[measure]['worst'])}"

    def short(value: float) -> str:
        return in_digits(value, 2)

    return (
        *cells, both("skewness", short), both("excess_kurtosis", short), both("kolmogorov", short),
        both("mean_error", short), both("variance_error", in_percent),
    )  # fmt: skip
