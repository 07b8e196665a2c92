"""The result of `cp.trace`: every step of a propagation, and how normal its samples are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor

from covprop.diagnostics.verdict import recommendation
from covprop.gaussian import Gaussian
from covprop.kernels.normal import known_deviation
from covprop.kernels.rounding import MOMENT
from covprop.plots import trace_figure
from covprop.text_table import Table, Tabular, in_digits, in_percent, in_seconds, plain

NOT_GAUSSIAN = 0.05  # Kolmogorov distance above which a step is called not Gaussian
OFF = 0.01  # error of a variance above which a step is named
SURE = 5.0  # standard errors of sampling that an error has to exceed to be named
DIRECT = 0  # the order of pairs that a formula without a series has computed
MEASURES = {
    "skewness": "skewness", "excess_kurtosis": "kurtosis", "kolmogorov": "Kolmogorov",
    "mean_error": "mean error", "variance_error": "variance error",
}  # fmt: skip
"""What samples say of a step: its name, and the head of its column."""
CHOSEN = 64  # elements of a step whose Kolmogorov distance is taken, evenly spaced
DRAWS = 10_000  # samples of which a Kolmogorov distance is taken: the first ones
NEGLIGIBLE = 1e-2  # share of the average variance below which an element is left out: a dead ReLU
SIGNIFICANCE = 0.05  # probability that Gaussian samples exceed the noise of a Kolmogorov distance


@dataclass(frozen=True)
class Normality:
    """Samples of one step against Gaussians; NaN for elements that hardly vary.

    mean_error: propagated less sampled mean, over the sampled standard deviation; variance_error:
    propagated over sampled variance, less one; both in the shape of the mean, as skewness and
    excess_kurtosis are; variance_stderr: standard error of variance_error, by sampling.
    kolmogorov: sup |F - Phi| of the elements `chosen` of the flattened mean, for the Gaussian that
    has their sampled mean and variance.
    """

    samples: int
    skewness: Tensor
    excess_kurtosis: Tensor
    mean_error: Tensor
    variance_error: Tensor
    variance_stderr: Tensor
    chosen: Tensor
    kolmogorov: Tensor

    @property
    def mean_stderr(self) -> float:
        """The standard error of mean_error."""
        return self.samples**-0.5

    @property
    def kolmogorov_noise(self) -> float:
        """The Kolmogorov distance that 95 % of truly Gaussian elements stay below."""
        return kolmogorov_quantile(self.samples, SIGNIFICANCE)


@dataclass(frozen=True)
class TraceStep:
    """One result of one operation.

    module: the path of the module whose forward called it ("" is the model itself, or a function);
    mean, variance: of each element, the batch first; largest_correlation: between two elements;
    orders: of the series that blocks of pairs used, 0 for a direct formula, none where no series is
    an option; seconds: of the operation, on its first result; gaussian: with `keep=True`;
    normality: what samples say, with `samples=...`.
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
    normality: Normality | None = None

    departure = property(attrgetter("normality"), doc="The former name of `normality`.")

    @property
    def name(self) -> str:
        """Module and operation."""
        return f"{self.module} {self.operation}".strip()

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of each element; NaN where a variance is negative."""
        return known_deviation(self.variance.flatten()).reshape(self.variance.shape)

    @property
    def series(self) -> str:
        """The orders in words."""
        terms = [str(order) for order in self.orders if order != DIRECT]
        ends = "-".join(dict.fromkeys((terms[0], terms[-1]))) if terms else ""
        return "+".join(filter(None, (ends, "direct" if DIRECT in self.orders else "")))


@dataclass(frozen=True)
class Trace(Tabular):
    """The steps of a propagation: print it to see a table; `.plot()` draws it.

    Attributes:
        steps: the inputs, then every result of every operation.
        output: what `cp.propagate` returns.
        samples: the number of samples.
        outputs: with `keep`, what each module returned at each call, by its path.

    Example:
        trace = cp.trace(model, x, samples=10_000)
        print(trace.first_error())
    """

    steps: tuple[TraceStep, ...]
    output: Any
    samples: int = 0
    outputs: Mapping[str, Sequence[Any]] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, module: str) -> Any:
        """The Gaussian that a module returned, or the nest of them; it was kept and called once."""
        if not self.outputs:
            raise ValueError(
                "this trace has kept no Gaussians; give cp.trace keep=True, or the path of a "
                "module, as in keep='4'"
            )
        calls = self.outputs.get(module, ())
        if not calls:
            raise ValueError(
                f"no output of a module {module!r} was kept; there are "
                f"{', '.join(map(repr, self.outputs))}"
            )
        if len(calls) > 1:
            raise ValueError(
                f"the module {module!r} was called {len(calls)} times; trace.outputs[{module!r}] "
                "has what it returned each time"
            )
        return calls[0]

    def at(self, module: str) -> tuple[TraceStep, ...]:
        """The steps of a module and of all its submodules."""
        inside = f"{module}."
        return tuple(s for s in self.steps if s.module == module or s.module.startswith(inside))

    def first_non_gaussian(self, distance: float = NOT_GAUSSIAN) -> TraceStep | None:
        """The first step with an element whose Kolmogorov distance from a Gaussian is larger.

        It must also be larger than chance explains: in 95 of 100 traces, sampling makes no element
        of a Gaussian step seem that far from a Gaussian.
        """
        sampled = [(s, s.normality.kolmogorov) for s in self.steps if s.normality is not None]
        tests = max(1, sum(distances.numel() for _, distances in sampled))
        noise = kolmogorov_quantile(self.samples, SIGNIFICANCE / tests) if sampled else 0.0
        for step, distances in sampled:
            if median_and_worst(distances)[1] > max(distance, noise):
                return step
        return None

    first_departure = first_non_gaussian  # the former name

    def first_error(self, share: float = OFF) -> TraceStep | None:
        """The first step with a variance off by more than this share and than chance explains."""
        for step in self.steps:
            if step.normality is not None:
                error, noise = step.normality.variance_error, step.normality.variance_stderr
                # The larger variance is the scale: samples that miss rare events give a small one.
                significant = error.abs() / (1 + error).clamp(min=1) > SURE * noise
                if bool((significant & (error.abs() > share)).any()):
                    return step
        return None

    @property
    def advice(self) -> str:
        """What to do if variances are off because layers are too far from Gaussian, or ""."""
        return "" if self.first_error() is None else recommendation()

    @property
    def table(self) -> Table:
        """A row for each step, and below it one with what its samples say."""
        summaries = [(step, _summary(step)) for step in self.steps]
        below = Table(
            ("module", "operation", *MEASURES.values()),
            tuple(_sampled_cells(step, summary) for step, summary in summaries),
            words=2,
        )
        return Table(
            ("module", "operation", "shape", "mean", "variance", "largest", "max |rho|", "order",
             "time"),
            tuple(_cells(step, summary) for step, summary in summaries),
            words=3, notes=tuple(self._notes()), below=below if self.samples else None,
        )  # fmt: skip

    def _notes(self) -> list[str]:
        notes = ["mean, variance: averages over elements; largest: of the variances"]
        if not self.samples:
            return notes
        not_gaussian, wrong = self.first_non_gaussian(), self.first_error()
        notes.append(
            f"{self.samples:,} samples; median / worst of the elements, excess kurtosis, mean "
            "error in standard deviations"
        )
        first = next((s.normality for s in self.steps if s.normality is not None), None)
        if first is not None:
            notes.append(
                f"sampling alone: Kolmogorov {first.kolmogorov_noise:.2g}, mean error "
                f"{first.mean_stderr:.2g}, variance error {in_percent((2 / self.samples) ** 0.5)}"
            )
        notes += [
            f"first step that is not Gaussian (Kolmogorov > {NOT_GAUSSIAN}): "
            f"{not_gaussian.name if not_gaussian else 'none'}",
            f"first step whose variance is off by more than {in_percent(OFF)} and sampling error: "
            f"{wrong.name if wrong else 'none'}",
        ]
        if wrong is not None:
            notes.append(f"variances are off from there on; {recommendation()}")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Summaries of all steps, for JSON."""
        steps = [plain(_summary(step)) for step in self.steps]
        return {"samples": self.samples, "steps": steps, "advice": self.advice}

    def plot(self) -> Any:
        """A matplotlib figure; needs the extra `plots`."""
        return trace_figure([_summary(step) for step in self.steps])


def _summary(step: TraceStep) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "module": step.module, "operation": step.operation, "shape": list(step.shape),
        "mean": float(step.mean.mean()), "variance": float(step.variance.mean()),
        "largest_variance": float(step.variance.max()) if step.variance.numel() else math.nan,
        "largest_correlation": step.largest_correlation, "orders": list(step.orders),
        "seconds": step.seconds,
    }  # fmt: skip
    normality = step.normality
    if normality is not None:
        for measure in MEASURES:
            median, worst = median_and_worst(getattr(normality, measure))
            summary[measure] = {"median": median, "worst": worst}
        summary["kolmogorov_noise"] = normality.kolmogorov_noise
        summary["mean_stderr"] = normality.mean_stderr
        summary["variance_stderr"] = median_and_worst(normality.variance_stderr)[0]
    return summary


def median_and_worst(values: Tensor) -> tuple[float, float]:
    """Median and maximum of the absolute values, without NaN; NaN where nothing is left."""
    known = values[~values.isnan()].abs()
    return (float(known.median()), float(known.max())) if known.numel() else (math.nan, math.nan)


def _cells(step: TraceStep, summary: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        step.module, step.operation, "x".join(map(str, step.shape)),
        in_digits(summary["mean"]), in_digits(summary["variance"]),
        in_digits(summary["largest_variance"]), f"{step.largest_correlation:.3f}",
        step.series, in_seconds(step.seconds) if step.seconds else "",
    )  # fmt: skip


def _sampled_cells(step: TraceStep, summary: Mapping[str, Any]) -> tuple[str, ...]:
    cells = [step.module, step.operation]
    for measure in MEASURES:
        if step.normality is None:
            cells.append("-")
            continue
        both = (summary[measure]["median"], summary[measure]["worst"])
        percent = measure == "variance_error"
        cells.append(" / ".join(in_percent(v) if percent else in_digits(v, 2) for v in both))
    return tuple(cells)


@final
class RunningMoments:
    """Mean and central moments of samples that come in chunks, in float64 (Pebay 2008)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.second = self.third = self.fourth = torch.zeros((), dtype=torch.float64)

    def add(self, samples: Tensor) -> None:
        """Include samples (count, *shape)."""
        values = samples.double()
        n, m = self.count, len(values)
        total = n + m
        mean = values.mean(0)
        centred = values - mean
        second, third, fourth = (centred.pow(k).sum(0) for k in (2, 3, 4))
        step = mean - self.mean if n else torch.zeros_like(mean)
        self.fourth = (
            self.fourth + fourth
            + step**4 * (n * m * (n * n - n * m + m * m) / total**3)
            + 6 * step**2 * (n * n * second + m * m * self.second) / total**2
            + 4 * step * (n * third - m * self.third) / total
        )  # fmt: skip
        self.third = (
            self.third + third
            + step**3 * (n * m * (n - m) / total**2)
            + 3 * step * (n * second - m * self.second) / total
        )  # fmt: skip
        self.second = self.second + second + step**2 * (n * m / total)
        self.mean = self.mean + step * (m / total) if n else mean
        self.count = total

    @property
    def variance(self) -> Tensor:
        """The unbiased variance."""
        return self.second / max(1, self.count - 1)

    @property
    def skewness(self) -> Tensor:
        """E[(x - m)^3] / sigma^3."""
        return math.sqrt(self.count) * self.third / self.second**1.5

    @property
    def excess_kurtosis(self) -> Tensor:
        """E[(x - m)^4] / sigma^4 - 3."""
        return self.count * self.fourth / self.second**2 - 3


@final
class NormalityTest:
    """Gathers the samples of one step, chunk by chunk."""

    def __init__(self, features: int) -> None:
        self.moments = RunningMoments()
        count = min(features, CHOSEN)
        self.chosen = torch.linspace(0, max(0, features - 1), count).round().long()
        self._kept: list[Tensor] = []

    def add(self, samples: Tensor) -> None:
        """Include samples (count, *shape of the mean)."""
        wanted = DRAWS - self.moments.count
        if wanted > 0:
            flat = samples.flatten(1) if samples.dim() > 1 else samples[:, None]
            self._kept.append(flat[:wanted, self.chosen.to(flat.device)])
        self.moments.add(samples)

    def result(self, mean: Tensor, variance: Tensor, batch_dims: int) -> Normality:
        """Compare with the propagated mean and variance, in one shape."""
        moments = self.moments
        sampled, kurtosis = moments.variance, moments.excess_kurtosis
        event = tuple(range(batch_dims, sampled.dim()))
        average = sampled.mean(event, keepdim=True) if event else sampled
        rounding = (MOMENT * torch.finfo(mean.dtype).eps * moments.mean).square()
        varies = (sampled > NEGLIGIBLE * average) & (sampled > rounding)
        kept = varies.flatten().cpu()[self.chosen]

        def known(values: Tensor) -> Tensor:
            return torch.where(varies, values, math.nan)

        return Normality(
            samples=moments.count,
            skewness=known(moments.skewness),
            excess_kurtosis=known(kurtosis),
            mean_error=known((mean.double() - moments.mean) / sampled.sqrt()),
            variance_error=known(variance.double() / sampled - 1),
            variance_stderr=known(((kurtosis + 2).clamp(min=0) / moments.count).sqrt()),
            chosen=self.chosen[kept],
            kolmogorov=kolmogorov_distance(torch.cat(self._kept)[:, kept]),
        )


def kolmogorov_distance(samples: Tensor) -> Tensor:
    """sup |F_n - Phi((x - m) / s)| of each column of (count, k), with its own m and s."""
    if not samples.numel():
        return samples.new_zeros(samples.shape[1:], dtype=torch.float64)
    values = samples.double()
    values = ((values - values.mean(0)) / values.std(0)).sort(0).values
    normal = torch.special.ndtr(values)
    count = len(values)
    ranks = torch.arange(count + 1, dtype=torch.float64, device=values.device)[:, None] / count
    return torch.maximum((ranks[1:] - normal).amax(0), (normal - ranks[:-1]).amax(0))


def kolmogorov_quantile(samples: int, p: float) -> float:
    """The distance that one Gaussian element exceeds with the probability p.

    With mean and variance of the n samples themselves (Lilliefors), by Dallal & Wilkinson (1986):
    log p = -a d^2 (n + b) + c d sqrt(n + b) - e + f / sqrt(n) + g / n up to n = 100, and from there
    as 1 / sqrt(n). It is checked against samples from p = 0.05 to 0.001.
    """
    count = min(samples, DRAWS)
    n = min(count, 100)
    a, b, c = 7.01256, 2.78019, 2.99587
    rest = 0.122119 - 0.974598 / math.sqrt(n) - 1.67997 / n + math.log(p)
    root = (c + math.sqrt(max(0.0, c * c - 4 * a * rest))) / (2 * a)
    return root / math.sqrt(n + b) * math.sqrt(n / count)
