"""The commands of `covprop`: their options, and who computes their results."""

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from covprop import __version__
from covprop.attribution.budget import ORDERS
from covprop.cli import doctor, propagation
from covprop.cli.output import (
    WRITERS,
    CommandResult,
    ExitCode,
    Refusal,
    check_writable,
    write_moments,
)
from covprop.cli.ranks import Ranks
from covprop.cli.request import Request, method, read_request, running
from covprop.diagnostics.compare import SAMPLES as DEFAULT_SAMPLES
from covprop.methods.names import METHOD_NAMES, MOST_SAMPLES
from covprop.propagate import plan as plan_of
from covprop.robustness.analysis import SAMPLES as ANALYSIS_SAMPLES

app = typer.Typer(
    name="covprop",
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # panels leave little width for text, and ":factory:" becomes a picture
    epilog="Exit codes: 0 fine, 1 a fault of covprop, 2 bad input or usage, 3 the answer is no, "
    "4 a process lost, 130 interrupted.",
)

METHOD = f"One of {METHOD_NAMES}."
METHODS = f"Of {METHOD_NAMES}; may be given several times, and the first is judged. All by default."
OUT = "Write the moments: .npz, .pt or .json."
SAMPLES = "Of the network, to check with."
REFERENCE_SAMPLES = (
    "Plain ones, for the reference; by default a control variate where it takes fewer, and else "
    f"{DEFAULT_SAMPLES:,}."
)
TOLERANCE = (
    "Exit with 3 if the first method's mean is off by more than this many standard deviations, or "
    "its covariance by more than this share."
)
LABEL = "The class to keep, N or N,N,... or a file of them; by default the network's own decision."
PROBABILITY = "With which the noise budget keeps the label."
REQUIRED = "Exit with 3 if a label is kept with less than this."
RADIUS = "Of the attack by PGD; by default the noise's length."
NORM = "In which the attack is bounded."
GROUP = (
    "Elements of the input that count as one, by their numbers; may be given several times. All "
    "elements, one by one, by default."
)
ORDER = "Random orders of the inputs, where there are more than six."
MOST_ORDERS = 10_000
SEED = "Of everything that is drawn."
PAGE = "The page that it ends with."

Reader: TypeAlias = Callable[[], Request]
MethodName = Annotated[str, typer.Option("--method", metavar="NAME", help=METHOD)]
Report = Annotated[str | None, typer.Option(metavar="FILE.html", help="Write a page with figures.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="N", help=SEED)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]


def with_request(command: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Give a command the options of `read_request`, and as its second argument what reads them.

    A command reads when its own options are known to be good. Meanwhile what a model prints goes
    to standard error: standard output is for the result.
    """

    @functools.wraps(command)
    def wrapped(context: typer.Context, **values: Any) -> CommandResult:
        read = functools.partial(read_request, **{name: values.pop(name) for name in shared})
        with redirect_stdout(sys.stderr):
            return command(context, read, **values)

    shared = inspect.signature(read_request).parameters
    context, _, *own = inspect.signature(command).parameters.values()
    parameters = [context, *shared.values(), *own]
    keywords = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    wrapped.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {item.name: item.annotation for item in parameters}
    return wrapped


def _page(report: str | None) -> Path | None:
    return None if report is None else check_writable(report, (".html",), "--report")


@app.callback()
def covprop(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """The mean and covariance of a neural network's output for Gaussian input."""
    del debug  # the entry has seen it
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.REFUSED)


@app.command()
@with_request
def propagate(
    context: typer.Context,
    read: Reader,
    method_name: MethodName = "auto",
    out: Annotated[str | None, typer.Option(metavar="FILE", help=OUT)] = None,
    report: Report = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> CommandResult:
    """Mean and covariance of the output for a Gaussian input."""
    ranks: Ranks = context.obj
    chosen = method(method_name, seed, ranks.rank)
    file = None if out is None else check_writable(out, tuple(WRITERS), "--out")
    page = _page(report)
    request = read()
    y = propagation.run(request, chosen, seed, ranks)
    result = propagation.result(request, y, as_json)
    if page is not None:
        propagation.write_report(page, request, y, seed)
    if file is not None:
        write_moments(file, y, propagation.record(request, y))
    return result


@app.command()
@with_request
def compare(
    context: typer.Context,
    read: Reader,
    method_names: Annotated[
        list[str] | None, typer.Option("--method", metavar="NAME", help=METHODS)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=2, max=MOST_SAMPLES, metavar="N", help=REFERENCE_SAMPLES)
    ] = None,
    tolerance: Annotated[float | None, typer.Option(min=0, metavar="X", help=TOLERANCE)] = None,
    report: Report = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> CommandResult:
    """Methods against samples, on this network and input."""
    context.obj.finish_unless_first()
    methods = [method(name, seed) for name in method_names or ()]
    page = _page(report)
    request = read()
    comparison = propagation.run_comparison(request, methods, samples, seed)
    if page is not None:
        y = comparison.rows[0].gaussian
        propagation.write_report(page, request, y, seed, comparison=comparison)
    return propagation.comparison_result(request, comparison, tolerance, as_json)


@app.command()
@with_request
def plan(
    context: typer.Context,
    read: Reader,
    method_name: MethodName = "gaussian-layers",
    as_json: Json = False,
) -> CommandResult:
    """Shape, memory and time of every operation, before it is run."""
    context.obj.finish_unless_first()
    request = read()
    chosen = method(method_name, seed=0)
    with running():
        planned = plan_of(request.module, request.x, method=chosen)
    rates = planned.rates()
    steps = [
        {**dataclasses.asdict(step), "work": step.work, "seconds": step.counts.seconds(rates)}
        for step in planned.steps
    ]
    record = {
        "model": request.name, "steps": steps, "seconds": planned.seconds,
        "peak_bytes": planned.peak_bytes, "free_bytes": planned.free_bytes, "work": planned.work,
        "fits": planned.fits,
    }  # fmt: skip
    verdict, code = ("it fits", ExitCode.OK) if planned.fits else ("it does not fit", ExitCode.NO)
    return CommandResult(record, (planned.table, verdict), as_json, code)


@app.command()
@with_request
def budget(
    context: typer.Context,
    read: Reader,
    groups: Annotated[
        list[str] | None, typer.Option("--group", metavar="NAME=0:8,12", help=GROUP)
    ] = None,
    method_name: MethodName = "auto",
    orders: Annotated[int, typer.Option(min=1, max=MOST_ORDERS, metavar="N", help=ORDER)] = ORDERS,
    report: Report = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> CommandResult:
    """Which input the uncertainty of the output comes from: an uncertainty budget."""
    context.obj.finish_unless_first()
    chosen = method(method_name, seed)
    page = _page(report)
    request = read()
    found = propagation.run_budget(request, groups or (), chosen, orders, seed)
    if page is not None:
        propagation.write_report(page, request, found.output, seed, uncertainty_budget=found)
    return CommandResult({"model": request.name, **found.to_dict()}, (found.table,), as_json)


@app.command()
@with_request
def robustness(
    context: typer.Context,
    read: Reader,
    label: Annotated[str | None, typer.Option(metavar="N|FILE", help=LABEL)] = None,
    probability: Annotated[float, typer.Option(metavar="P", help=PROBABILITY)] = 0.99,
    require_probability: Annotated[
        float | None, typer.Option(min=0, max=1, metavar="P", help=REQUIRED)
    ] = None,
    method_name: MethodName = "auto",
    samples: Annotated[
        int, typer.Option(min=2, max=MOST_SAMPLES, metavar="N", help=SAMPLES)
    ] = ANALYSIS_SAMPLES,
    radius: Annotated[float | None, typer.Option(min=0, metavar="X", help=RADIUS)] = None,
    norm: Annotated[str, typer.Option(metavar="2|inf", help=NORM)] = "2",
    report: Report = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> CommandResult:
    """How a classifier decides under noise: probabilities, sensitivity, noise budget."""
    ranks: Ranks = context.obj
    chosen = method(method_name, seed, ranks.rank)
    page = _page(report)
    request = read()
    analysis = propagation.run_robustness(
        request, ranks, seed, label, norm, method=chosen, probability=probability,
        samples=samples, radius=radius,
    )  # fmt: skip
    if page is not None:
        y = propagation.run(request, chosen, seed, Ranks())
        propagation.write_report(page, request, y, seed, robustness=analysis)
    return propagation.robustness_result(request, analysis, require_probability, as_json)


@app.command()
def demo(
    context: typer.Context,
    report: Annotated[str, typer.Option(metavar="FILE.html", help=PAGE)] = "covprop-demo.html",
    as_json: Json = False,
) -> CommandResult:
    """A classifier of digits behind a noisy sensor, trained and asked."""
    context.obj.finish_unless_first()
    page = check_writable(report, (".html",), "--report")
    try:
        module = importlib.import_module("covprop.demo")
    except ModuleNotFoundError as error:
        raise Refusal(
            f"the demo needs {error.name}; install it with "
            "pip install '.[demo]' in covprop's folder"
        ) from error
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # it prints as it goes
        return CommandResult(module.main(page), (), as_json)


@app.command("doctor")
def examine(context: typer.Context, as_json: Json = False) -> CommandResult:
    """Versions, device, and a self-test against known values."""
    context.obj.finish_unless_first()
    return doctor.result(as_json)
