"""`covprop propagate`, `compare` and `robustness`: their results, reports and shared batches."""

import dataclasses
import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from covprop.attribution import UncertaintyBudget, uncertainty_budget
from covprop.cli import arrays
from covprop.cli.joining import concatenate, joined, without_generator
from covprop.cli.output import (
    CommandResult,
    ExitCode,
    Refusal,
    check_dense,
    printable,
    quoted,
    writing,
)
from covprop.cli.ranks import Ranks
from covprop.cli.request import Request, running, single_output
from covprop.diagnostics.compare import METHODS, compare, method_name
from covprop.diagnostics.comparison import Comparison, ComparisonRow
from covprop.diagnostics.trace import trace
from covprop.diagnostics.verdict import ADVISED_SAMPLES
from covprop.errors import ApproximationWarning, UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods import LayerwiseMethod, Method, MonteCarlo, QuasiMonteCarlo
from covprop.propagate import GAUSSIAN_LAYERS, propagate
from covprop.report import page
from covprop.robustness import Robustness, analyse
from covprop.text_table import Table, in_digits, place_words

SHOWN = 20  # outputs in the table
LARGEST_SEARCH = 2000  # outputs whose correlations are searched for the strongest
DIGITS = 5
LEVEL = 0.95
MOST_ELEMENTS = 1_000_000  # of a group
TRACE_SAMPLES = 2000  # through every layer, to see where its output is not Gaussian
Partial = TypeVar("Partial")
NORMS = {"2": 2.0, "inf": torch.inf}


def run(request: Request, method: Method, seed: int, ranks: Ranks) -> Gaussian:
    """The Gaussian of the output, with a progress bar on a terminal."""
    torch.manual_seed(seed + ranks.rank)  # for models that draw random numbers themselves

    def work(request: Request, _: slice) -> Gaussian:
        with running(), torch.no_grad():
            bar = sys.stderr.isatty() and not ranks.rank
            y = single_output(propagate(request.module, request.x, method=method, progress=bar))
            y.error  # noqa: B018  (estimated now, where it can be, and while the model is here)
        return y if ranks.size == 1 else without_generator(y)

    return distribute(request, ranks, work, lambda parts: concatenate(parts, method))


def record(request: Request, y: Gaussian) -> dict[str, Any]:
    """The moments as JSON has them."""
    check_dense(y)
    values: dict[str, Any] = {
        "model": request.name, "method": method_name(y.method),
        "dtype": str(y.dtype).removeprefix("torch."), "batch_shape": list(y.batch_shape),
        "event_shape": list(y.event_shape), "mean": y.mean.tolist(), "stddev": y.stddev.tolist(),
        "covariance": y.covariance_matrix.tolist(),
    }  # fmt: skip
    if y.mean_stderr is not None and y.covariance_stderr is not None:
        values["samples"] = y.samples
        values["mean_stderr"] = y.mean_stderr.tolist()
        values["covariance_stderr"] = y.covariance_stderr.tolist()
    if y.skewness is not None:
        values["skewness"] = y.skewness.tolist()
    if y.error is not None:
        values["error"] = {
            "mean": y.error.mean.tolist(), "stddev": y.error.stddev.tolist(),
            "basis": y.error.basis,
        }  # fmt: skip
    if y.notes:
        values["notes"] = list(y.notes)
    return values


def result(request: Request, y: Gaussian, as_json: bool) -> CommandResult:
    """The record or the table; the other is not computed."""
    if as_json:
        return CommandResult(record(request, y), (), True)
    inputs, outputs = ("x".join(map(str, mean.shape)) or "1" for mean in (request.x.mean, y.mean))
    head = f"{request.name}: {inputs} in, {outputs} out, by {method_name(y.method)}"
    return CommandResult({}, (head, table(y)), False)


def table(y: Gaussian) -> Table:
    """A row for each output, the first `SHOWN`."""
    means, stddevs = y.mean.flatten(), y.stddev.flatten()
    columns = [means, stddevs, *(end.flatten() for end in y.interval(LEVEL))]
    rows = []
    for number in range(min(SHOWN, means.numel())):
        cells = (in_digits(float(column[number]), DIGITS) for column in columns)
        rows.append((place_words(number, y.mean.shape), *cells))
    notes = list(y.notes) if y.error is None else [y.error.sentence, *y.notes]
    if means.numel() > SHOWN:
        notes.append(f"and {means.numel() - SHOWN:,} more: --out and --json have them all")
    undefined = stddevs.isnan().nonzero()[:, 0].tolist()
    if undefined:
        names = ", ".join(place_words(number, y.mean.shape) for number in undefined[:SHOWN])
        least = in_digits(float(y.variance.min()), DIGITS)
        notes.append(
            f"no standard deviation for {len(undefined):,} with a negative variance (the least is "
            f"{least}; outputs {names}): the method does not suit this model, take another"
        )
    if not y.batch_shape and 1 < y.event_shape.numel() <= LARGEST_SEARCH:
        notes.append(_strongest_correlation(y))
    return Table(("output", "mean", "stddev", "2.5 %", "97.5 %"), tuple(rows), notes=tuple(notes))


def _strongest_correlation(y: Gaussian) -> str:
    matrix = y.correlation_matrix.triu(1)
    pair = divmod(int(matrix.abs().argmax()), len(matrix))
    value = float(matrix[pair])
    if value == 0 or math.isnan(value):
        return "no two outputs are correlated"
    names = " and ".join(place_words(number, y.event_shape) for number in pair)
    return f"strongest correlation: outputs {names}, {value:.3f}"


def run_comparison(
    request: Request, methods: Sequence[Method], samples: int | None, seed: int
) -> Comparison:
    """Compare methods with so many samples, or as many as are needed."""
    with running():  # a model of several outputs is refused here, with advice
        single_output(propagate(request.module, request.x, method=MonteCarlo(2)))
    torch.manual_seed(seed)  # for models that draw random numbers themselves
    generator = torch.Generator(request.x.device).manual_seed(seed)
    with running():
        return compare(
            request.module, request.x, methods=methods or METHODS, samples=samples,
            generator=generator, show=False, progress=sys.stderr.isatty(),
        )  # fmt: skip


def comparison_result(
    request: Request, comparison: Comparison, tolerance: float | None, as_json: bool
) -> CommandResult:
    """The table; the answer is no if the error of the first method exceeds the tolerance."""
    first = comparison.rows[0]
    values = {"model": request.name, **comparison.to_dict(), "tolerance": tolerance}
    parts: list[str | Table] = [comparison.table]
    if comparison.advice(first):
        name = f"controlvariate:{ADVISED_SAMPLES}"
        parts.append(f"on the command line: covprop propagate ... --method {name}")
    if tolerance is None:
        return CommandResult(values, tuple(parts), as_json)
    error = _largest_error(first)
    within = error <= tolerance
    values |= {"error": error, "within_tolerance": within}
    word = "within" if within else "beyond"
    parts.append(f"{first.name} is off by {error:.3g} at most, {word} the tolerance {tolerance:g}")
    return CommandResult(values, tuple(parts), as_json, ExitCode.OK if within else ExitCode.NO)


def _largest_error(row: ComparisonRow) -> float:
    """The largest error of a mean, in standard deviations, or of a covariance."""
    if row.agreement is None:
        return math.inf
    errors = (row.agreement.mean_error, row.agreement.covariance_error)
    known = torch.cat([error.flatten().abs() for error in errors])
    known = known[~known.isnan()]
    return float(known.max()) if known.numel() else 0.0


def write_report(
    path: Path, request: Request, y: Gaussian | None, seed: int, **findings: Any
) -> None:
    """Write a page with `findings` of `page.write`, and with every layer of a layerwise method.

    Of evaluations at points, which see no layers, with those of Gaussian layers.
    """
    layers = None
    if y is not None and isinstance(y.method, LayerwiseMethod | QuasiMonteCarlo):
        method = y.method if isinstance(y.method, LayerwiseMethod) else GAUSSIAN_LAYERS
        generator = torch.Generator(request.x.device).manual_seed(seed)
        with running(), suppress(UnsupportedOperation):
            layers = trace(
                request.module, request.x, method=method, samples=TRACE_SAMPLES,
                generator=generator,
            )  # fmt: skip
    with writing(path):
        page.write(path, model_name=request.name, x=request.x, y=y, trace=layers, **findings)


def distribute(
    request: Request,
    ranks: Ranks,
    work: Callable[[Request, slice], Partial],
    join: Callable[[Sequence[Partial]], Partial],
) -> Partial:
    """Share a batch among the processes of torchrun; those other than the first end here.

    work: the result for a part of the batch, given which part that is.
    """
    count = request.x.batch_shape[0] if request.x.batch_shape else 0
    if ranks.size == 1 or count <= 1:
        ranks.finish_unless_first()
        return work(request, slice(None))
    part = ranks.part(count)
    own = None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ApproximationWarning)
        if part.start < part.stop:
            own = work(dataclasses.replace(request, x=request.x[part]), part)
    notes = [str(item.message) for item in seen if item.category is ApproximationWarning]
    gathered = ranks.gather((own, notes))
    for note in dict.fromkeys(note for _, notes in gathered for note in notes):
        warnings.warn(note, ApproximationWarning, stacklevel=2)
    return join([part_result for part_result, _ in gathered if part_result is not None])


def run_budget(
    request: Request, named: Sequence[str], method: Method, orders: int, seed: int
) -> UncertaintyBudget:
    """The uncertainty budget of groups such as `left=0:8,12`, or of all elements."""
    torch.manual_seed(seed)  # for models that draw random numbers themselves
    groups: dict[str, list[int]] = {}
    for name, elements in map(_group, named):
        if name in groups:
            raise Refusal(f"--group names {printable(name)} twice")
        groups[name] = elements
    with running():
        return uncertainty_budget(
            request.module, request.x, groups=groups or None, method=method, orders=orders,
            seed=seed, progress=sys.stderr.isatty(),
        )  # fmt: skip


def _group(text: str) -> tuple[str, list[int]]:
    """A name and the numbers of its elements."""
    name, _, places = text.partition("=")
    numbers: list[int] = []
    for word in places.split(","):
        ends = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", word)
        if ends is None or not name:
            raise Refusal(f"--group takes NAME=0:8,12, and not {quoted(text)}")
        start = int(ends[1])
        stop = int(ends[2] or start + 1)
        if not start < stop <= start + MOST_ELEMENTS:
            raise Refusal(f"--group {quoted(text)}: {quoted(word)} has no elements, or too many")
        numbers += range(start, stop)
    return name, numbers


def run_robustness(
    request: Request, ranks: Ranks, seed: int, label: str | None, norm: str, **options: Any
) -> Robustness:
    """The analysis with these options of `analyse`; all its randomness comes from the seed."""
    if norm not in NORMS:
        raise Refusal(f"--norm is 2 or inf, and not {quoted(norm)}")
    _check_logits(request)
    generator = torch.Generator(request.x.device).manual_seed(seed + ranks.rank)
    torch.manual_seed(seed + ranks.rank)  # for models that draw random numbers themselves
    labels = None if label is None else _labels(label)

    def work(request: Request, part: slice) -> Robustness:
        own = labels[part] if labels is not None and labels.dim() else labels
        bar = sys.stderr.isatty() and not ranks.rank
        with running():
            return analyse(
                request.module, request.x, own, norm=NORMS[norm], generator=generator,
                progress=bar, **options,
            )  # fmt: skip

    return distribute(request, ranks, work, joined)


def _check_logits(request: Request) -> None:
    """Refuse output that is no row of logits; most often a batch was not declared as one."""
    with running():
        y = single_output(propagate(request.module, request.x, method=MonteCarlo(2)))
    shape = y.event_shape
    if shape and shape.numel() != shape[-1]:
        dims = len(request.x.batch_shape) + 1
        raise Refusal(
            f"the model returns {tuple(shape)} for this mean, and logits have the shape (classes,);"
            f" if the mean is a batch of inputs, say --batch-dims {dims}"
        )


def _labels(text: str) -> Tensor:
    """One class number, several with commas between them, or those of a file."""
    if re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", text):
        numbers = torch.tensor([int(word) for word in text.split(",")])
        return numbers if "," in text else numbers[0]
    if arrays.split_name(text)[0].suffix.lower() not in arrays.READERS:
        raise Refusal(
            f"--label {text}: a label is a class number from 0, several with commas between them, "
            f"or a file of them ({', '.join(arrays.READERS)})"
        )
    values = arrays.load(text)
    numbers = values.long()
    if not torch.equal(numbers.to(values.dtype), values):
        raise Refusal(f"{text} holds numbers that are no class numbers")
    return numbers.flatten() if values.dim() == arrays.MATRIX and 1 in values.shape else numbers


def robustness_result(
    request: Request, analysis: Robustness, required: float | None, as_json: bool
) -> CommandResult:
    """The table; the answer is no if a label is kept with less than the required probability.

    Where samples disagree with propagation, samples decide.
    """
    wrong = torch.where(
        analysis.agrees,
        analysis.misclassification.probability,
        analysis.sampled_misclassification.probability,
    )
    kept = float(1 - wrong.max())
    record = {"model": request.name, **analysis.record(), "required_probability": required}
    record["lowest_probability"] = kept
    parts: list[str | Table] = [analysis.table]
    code = ExitCode.OK
    if required is not None:
        enough = kept >= required
        code = ExitCode.OK if enough else ExitCode.NO
        record["enough"] = enough
        word = "at least" if enough else "less than"
        parts.append(
            f"the label is kept with probability {kept:.4g}, {word} the required {required:g}"
        )
    return CommandResult(record, tuple(parts), as_json, code)
