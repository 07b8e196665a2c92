"""The result of `cp.compare`: a row of figures for each method, as a table, JSON and a plot."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covprop.diagnostics.moment_tests import MomentTests, rank
from covprop.diagnostics.verdict import (
    Deviation,
    Grade,
    Judgement,
    in_deviations,
    in_share,
    in_share_or_factor,
    kl_divergence,
    recommendation,
    wasserstein_distance,
)
from covprop.gaussian import Gaussian
from covprop.methods import ControlVariate, Method, MonteCarlo, Split
from covprop.plots import comparison_figure
from covprop.text_table import WIDTH, Table, Tabular, in_bytes, in_digits, in_seconds, plain

FIGURES = ("mean_ratio", "variance_ratio", "mean_error", "covariance_error", "wasserstein", "kl")
UNKNOWN = "-"  # an amount that there is not
RESOLVED = 10.0  # standard errors of a mean from zero for a ratio to it to be meaningful
MOST = 1e15  # samples that a reference is worth: a control variate of a linear map has no error


@dataclass(frozen=True)
class Reference:
    """The sampled Gaussian, its cost, and what its own error makes of every figure.

    mean_ratio, variance_ratio, mean_error: standard errors of each output; covariance_error: the
    root of its expected square, by the standard errors; wasserstein, kl: what as many samples of a
    Gaussian give, and for wasserstein as many plain ones as would know the variances as well.
    reason: why `cp.compare` chose to sample in this way.
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

    @classmethod
    def of(
        cls, truth: Gaussian, seconds: float, peak_bytes: float, method: Method, reason: str = ""
    ) -> "Reference":
        """The sampled Gaussian of a method, and what sampling does to every figure.

        A control variate is worth many plain samples, but not for the divergence: that weighs every
        combination of outputs by its own variance, and those that hardly vary are hardly linear.
        """
        error = truth.sampling_error
        assert error is not None
        mean, variance = truth.mean.double(), truth.variance.double()
        samples, mean_stderr, stderr = error.samples, error.mean.double(), error.covariance.double()
        variance_stderr = stderr.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
        matrix = truth.covariance_matrix.double()
        values = torch.linalg.eigvalsh(matrix).clamp(min=0)
        plain_samples = samples
        if not isinstance(method, MonteCarlo):
            plain_samples = _equivalent_samples(variance, variance_stderr, samples)
        freedom = rank(values, truth.dtype)
        return cls(
            f"{type(method).__name__}({samples:,})", truth, seconds, peak_bytes, samples,
            mean_ratio=_ratio(mean_stderr, mean.abs(), mean.abs() > RESOLVED * mean_stderr),
            variance_ratio=_ratio(variance_stderr, variance, variance > 0),
            mean_error=_ratio(mean_stderr, variance.sqrt(), variance > 0),
            covariance_error=_norm(stderr) / _norm(matrix),
            wasserstein=wasserstein_of_sampling(values, plain_samples),
            kl=freedom * (freedom + 3) / (4 * samples),
            reason=reason,
        )  # fmt: skip

    @property
    def precision(self) -> tuple[str, str]:
        """Standard errors of standard deviations, relative, and of means, in them: averages."""
        stddev, mean = _average(self.variance_ratio) / 2, _average(self.mean_error)
        return in_share(stddev), in_deviations(mean)

    @property
    def words(self) -> str:
        """What it is, for a sentence."""
        controlled = isinstance(self.gaussian.method, ControlVariate)
        suffix = " with a control variate" if controlled else ""
        return f"{self.samples:,} samples of the network{suffix}"


@dataclass(frozen=True)
class Agreement:
    """A method's Gaussian against the sampled one.

    mean_ratio, variance_ratio: of every output, in the shape of the mean; NaN where samples do not
    tell the mean from zero, or where the output does not vary; mean_error: the difference of the
    means over the sampled standard deviation. covariance_error: |C - C_sampled|_F / |C_sampled|_F,
    wasserstein, kl (of the sampled Gaussian to the method's): one for each element of the batch.
    judgement: the largest errors, and whether sampling explains them.
    """

    mean_ratio: Tensor
    variance_ratio: Tensor
    mean_error: Tensor
    covariance_error: Tensor
    wasserstein: Tensor
    kl: Tensor
    judgement: Judgement

    @classmethod
    def of(cls, result: Gaussian, reference: Reference) -> "Agreement":
        """All figures of a method's Gaussian against the reference."""
        truth = reference.gaussian
        if result.mean.shape != truth.mean.shape:
            raise ValueError(
                f"the method's mean has shape {tuple(result.mean.shape)}, that of the samples "
                f"{tuple(truth.mean.shape)}"
            )
        mean, variance = truth.mean.double(), truth.variance.double()
        matrix = truth.covariance_matrix.double()
        variance_ratio = _ratio(result.variance.double(), variance, variance > 0)
        mean_error = _ratio(result.mean.double() - mean, variance.sqrt(), variance > 0)
        covariance_error = _norm(result.covariance_matrix.double() - matrix) / _norm(matrix)
        return cls(
            mean_ratio=_ratio(result.mean.double(), mean, ~reference.mean_ratio.isnan()),
            variance_ratio=variance_ratio,
            mean_error=mean_error,
            covariance_error=covariance_error,
            wasserstein=wasserstein_distance(result, truth),
            kl=kl_divergence(truth, result),
            judgement=MomentTests(result, truth).judgement(
                mean_error, variance_ratio, covariance_error
            ),
        )

    @property
    def verdict(self) -> str:
        """The errors that sampling does not explain, or that there are none."""
        return self.judgement.words

    @property
    def grade(self) -> Grade:
        """How large they are."""
        return self.judgement.grade

    @property
    def fine(self) -> bool:
        """Whether at least each moment by itself is within sampling error."""
        return self.grade in (Grade.AGREES, Grade.JOINT)


@dataclass(frozen=True)
class ComparisonRow:
    """One method: its result and cost, or why it refused."""

    name: str
    method: object
    seconds: float = math.nan
    peak_bytes: float = math.nan
    gaussian: Gaussian | None = None
    agreement: Agreement | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Comparison(Tabular):
    """Methods against samples: print it to see a verdict and a table; `.plot()` draws it.

    Attributes:
        reference: the sampled Gaussian and its errors.
        rows: one for each method, in their order.

    Example:
        comparison = cp.compare(model, x, methods=cp.GaussianLayers(), samples=10_000, show=False)
        print(comparison["GaussianLayers()"].agreement.verdict)
    """

    reference: Reference
    rows: tuple[ComparisonRow, ...]

    def __getitem__(self, name: str) -> ComparisonRow:
        """The row of a method, by its name in the table."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r} is none of {', '.join(row.name for row in self.rows)}")

    def advice(self, row: ComparisonRow) -> str:
        """What to do about a method that is off, in one sentence; "" if it is not."""
        if row.agreement is None or row.agreement.fine:
            return ""
        if row.agreement.grade is Grade.SMALL:
            return f"if that matters, {recommendation(split=False)}"
        known = [(o.name, o.agreement.grade) for o in self.rows if o.agreement is not None]
        name, grade = min(known, key=lambda one: one[1].rank)
        if grade.rank <= Grade.SMALL.rank:
            return f"{name} is {grade.words}; {recommendation(split=False)}"
        return recommendation(split=not any(isinstance(other.method, Split) for other in self.rows))

    @property
    def headline(self) -> str:
        """The verdict on the first method that did not refuse, as a sentence."""
        row = self._first
        if row is None or row.agreement is None:
            return "no method was compared" if not self.rows else "every method refused"
        grade, verdict = row.agreement.grade, row.agreement.verdict
        if not row.agreement.fine:
            return f"{row.name} is {grade.words}: {verdict}"
        stddev, mean = self.reference.precision
        if grade is Grade.JOINT or UNKNOWN in (stddev, mean):
            return f"{row.name} is {verdict}"
        return (
            f"{row.name} is {verdict} (standard errors: standard deviations {stddev}, means {mean} "
            "standard deviations)"
        )

    @property
    def _first(self) -> ComparisonRow | None:
        return next((row for row in self.rows if row.agreement is not None), None)

    @property
    def table(self) -> Table:
        """A row for each method, after that of the reference with its own errors."""
        head = ("method", "verdict", "std (s.e.)", "mean (s.e.)", "cov.", "KL", "time", "memory")
        truth = self.reference
        errors = (f"± {error}".replace("± <", "<") for error in truth.precision)
        first = (truth.name, "the reference", *errors, *_amounts(truth, truth))
        rows = (first, *(_cells(row) for row in self.rows))
        return Table(
            head, rows, words=2, notes=tuple(self._notes()), lead=(self.headline,), width=WIDTH
        )

    def _notes(self) -> list[str]:
        reason = self.reference.reason
        notes = [
            "std, mean: largest error of standard deviations, and of means in them (s.e.: in "
            "standard errors)",
            "cov.: relative error of the covariance (Frobenius norm); KL: of the reference to the "
            "method, nats",
            f"{self.reference.name}: its own standard errors{'; ' if reason else ''}{reason}",
        ]
        refusals: dict[str, list[str]] = {}
        for row in self.rows:
            if row.refusal:
                refusals.setdefault(row.refusal, []).append(row.name)
        notes += [f"{', '.join(names)} refused: {why}" for why, names in refusals.items()]
        if (first := self._first) is not None and (advice := self.advice(first)):
            notes.append(f"advice: {advice}")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Averages, spreads and every output, for JSON."""
        costs = ("name", "seconds", "peak_bytes")
        reference = _numbers(self.reference, *costs, "samples", "reason")
        rows = []
        for row in self.rows:
            values = {name: getattr(row, name) for name in (*costs, "refusal")}
            if row.agreement is not None:
                values |= _numbers(row.agreement, "verdict") | {
                    "grade": row.agreement.grade.value, "advice": self.advice(row)
                }  # fmt: skip
            rows.append(values)
        return {"verdict": self.headline, "reference": plain(reference), "rows": plain(rows)}

    def plot(self) -> Any:
        """A matplotlib figure; needs the extra `plots`."""
        values = self.to_dict()
        return comparison_figure(values["reference"], values["rows"])


def _numbers(figures: Agreement | Reference, *others: str) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for figure in FIGURES:
        values = getattr(figures, figure)
        numbers[figure] = {
            "average": _average(values), "spread": _spread(values), "values": values.tolist()
        }  # fmt: skip
    return numbers | {name: getattr(figures, name) for name in others}


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    agreement = row.agreement
    if agreement is None:
        return (row.name, "refused", *(UNKNOWN,) * 6)
    stddev, mean = agreement.judgement.stddev, agreement.judgement.mean
    errors = (
        _with_significance(in_share_or_factor(stddev.size), stddev),
        _with_significance(in_deviations(mean.size), mean),
    )
    return (row.name, agreement.grade.value, *errors, *_amounts(agreement, row))


def _with_significance(size: str, deviation: Deviation) -> str:
    return f"{size} ({deviation.significance})" if deviation.significance else size


def _amounts(figures: Agreement | Reference, cost: ComparisonRow | Reference) -> tuple[str, ...]:
    return (
        in_share(_average(figures.covariance_error)), in_digits(_average(figures.kl), 2),
        in_seconds(cost.seconds), in_bytes(cost.peak_bytes),
    )  # fmt: skip


def _average(values: Tensor) -> float:
    """NaN are left out."""
    return float(values.nanmean())


def _spread(values: Tensor) -> float:
    """The standard deviation, NaN left out."""
    known = values[~values.isnan()]
    finite = known.numel() > 1 and bool(torch.isfinite(known).all())
    return float(known.std()) if finite else math.nan


def _equivalent_samples(variance: Tensor, stderr: Tensor, samples: int) -> int:
    """Plain samples of a Gaussian that know its variances as well, by the median output."""
    known = (variance > 0) & (stderr > 0)
    if not bool(known.any()):
        return samples
    median = float((2 * (variance[known] / stderr[known]).square()).median())
    return max(samples, int(min(median, MOST)))


def wasserstein_of_sampling(values: Tensor, samples: int) -> Tensor:
    """The root of E[W2^2] between a Gaussian with these eigenvalues and what N samples give of it.

    sum_i l_i / N for the mean; for the covariance (1/2) sum_ij E[D_ij^2] / (l_i + l_j), to second
    order, with E[D_ij^2] = l_i l_j (1 + delta_ij) / N.
    """
    left, right = values[..., :, None], values[..., None, :]
    total = left + right
    pairs = torch.where(total > 0, left * right / torch.where(total > 0, total, 1), 0)
    covariance = (pairs.sum((-2, -1)) + pairs.diagonal(dim1=-2, dim2=-1).sum(-1)) / 2
    return ((values.sum(-1) + covariance) / samples).sqrt()


def _ratio(numerator: Tensor, denominator: Tensor, known: Tensor) -> Tensor:
    """A ratio where it is known, NaN elsewhere."""
    return torch.where(known, numerator / torch.where(known, denominator, 1), math.nan)


def _norm(matrix: Tensor) -> Tensor:
    """The Frobenius norm of each matrix."""
    return matrix.square().sum((-2, -1)).sqrt()
