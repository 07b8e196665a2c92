"""The commands of `covprop`: what they are called with, and who answers."""

import functools
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Annotated, ParamSpec, TypeVar

import typer

from covprop.cli import (
    comparing,
    demonstration,
    doctor,
    options,
    output,
    planning,
    propagation,
    reporting,
)
from covprop.cli import robustness as deciding
from covprop.cli.answers import Answer
from covprop.cli.gaussians import Input
from covprop.cli.methods import method
from covprop.cli.question import asked
from covprop.cli.refusals import ExitCode
from covprop.ranks import Ranks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

app = typer.Typer(
    name="covprop",
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # panels leave no room for text, and ":factory:" becomes a picture
    epilog="Exit codes: 0 fine, 1 a fault of covprop, 2 bad input or usage, 3 the answer is no, "
    "4 a process lost, 130 interrupted.",
)


def undisturbed(command: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """What a model prints goes to standard error: standard output is for the answer."""

    @functools.wraps(command)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with redirect_stdout(sys.stderr):
            return command(*args, **kwargs)

    return wrapped


@app.callback()
def covprop(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """The mean and covariance of a neural network's output for Gaussian input."""
    del debug  # the entry has seen it
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.REFUSED)


@app.command()
@undisturbed
def propagate(
    context: typer.Context,
    model: options.ModelName,
    mean: options.Mean,
    covariance: options.Covariance = None,
    stddev: options.Stddev = None,
    method_name: options.MethodName = "exact",
    out: options.Out = None,
    report: options.Report = None,
    batch_dims: options.BatchDims = 0,
    shape: options.Shape = None,
    weights: options.Weights = None,
    which: options.Output = None,
    allow_pickle: options.AllowPickle = False,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> Answer:
    """Mean and covariance of the output for a Gaussian input."""
    ranks: Ranks = context.obj
    chosen = method(method_name, seed + ranks.rank)
    file = output.wanted(out, tuple(output.WRITERS), "--out")
    page = output.wanted(report, (reporting.SUFFIX,), "--report")
    given = Input(mean, covariance, stddev, batch_dims, shape)
    question = asked(model, given, weights, allow_pickle, which)
    y = propagation.run(question, chosen, seed, ranks)
    answer = propagation.answer(question, y, as_json)
    if page is not None:
        reporting.write(page, question, y, seed)
    if file is not None:
        output.write_moments(file, y, propagation.told(question, y))
    return answer


@app.command()
@undisturbed
def compare(
    context: typer.Context,
    model: options.ModelName,
    mean: options.Mean,
    covariance: options.Covariance = None,
    stddev: options.Stddev = None,
    method_names: options.MethodNames = None,
    samples: options.PlainSamples = None,
    tolerance: options.Tolerance = None,
    report: options.Report = None,
    batch_dims: options.BatchDims = 0,
    shape: options.Shape = None,
    weights: options.Weights = None,
    which: options.Output = None,
    allow_pickle: options.AllowPickle = False,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> Answer:
    """Methods against samples, on this network and input."""
    context.obj.first_alone()
    methods = [method(name, seed) for name in method_names or ()]
    page = output.wanted(report, (reporting.SUFFIX,), "--report")
    given = Input(mean, covariance, stddev, batch_dims, shape)
    question = asked(model, given, weights, allow_pickle, which)
    comparison = comparing.run(question, methods, samples, seed)
    if page is not None:
        y = comparison.rows[0].gaussian
        reporting.write(page, question, y, seed, comparison=comparison)
    return comparing.answer(question, comparison, tolerance, as_json)


@app.command()
@undisturbed
def plan(
    context: typer.Context,
    model: options.ModelName,
    mean: options.Mean,
    covariance: options.Covariance = None,
    stddev: options.Stddev = None,
    method_name: options.MethodName = "exact",
    batch_dims: options.BatchDims = 0,
    shape: options.Shape = None,
    weights: options.Weights = None,
    which: options.Output = None,
    allow_pickle: options.AllowPickle = False,
    as_json: options.Json = False,
) -> Answer:
    """Shape, memory and work of every operation, before it is run."""
    context.obj.first_alone()
    given = Input(mean, covariance, stddev, batch_dims, shape)
    question = asked(model, given, weights, allow_pickle, which)
    return planning.answer(question, method(method_name, seed=0), as_json)


@app.command()
@undisturbed
def robustness(
    context: typer.Context,
    model: options.ModelName,
    mean: options.Mean,
    covariance: options.Covariance = None,
    stddev: options.Stddev = None,
    label: options.Label = None,
    probability: options.Probability = 0.99,
    require_probability: options.RequireProbability = None,
    method_name: options.MethodName = "exact",
    samples: options.Samples = deciding.SAMPLES,
    radius: options.Radius = None,
    norm: options.Norm = "2",
    report: options.Report = None,
    batch_dims: options.BatchDims = 0,
    shape: options.Shape = None,
    weights: options.Weights = None,
    which: options.Output = None,
    allow_pickle: options.AllowPickle = False,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> Answer:
    """How a classifier decides under noise: probabilities, sensitivity, noise budget."""
    ranks: Ranks = context.obj
    chosen = method(method_name, seed + ranks.rank)
    page = output.wanted(report, (reporting.SUFFIX,), "--report")
    given = Input(mean, covariance, stddev, batch_dims, shape)
    question = asked(model, given, weights, allow_pickle, which)
    settings = deciding.Settings(label, probability, samples, radius, norm, seed)
    found = deciding.run(question, chosen, settings, ranks)
    if page is not None:
        y = propagation.run(question, chosen, seed, Ranks())
        reporting.write(page, question, y, seed, robustness=found)
    return deciding.answer(question, found, require_probability, as_json)


@app.command()
def demo(
    context: typer.Context,
    report: options.DemoReport = "covprop-demo.html",
    as_json: options.Json = False,
) -> Answer:
    """A classifier of digits behind a noisy sensor, trained and asked."""
    context.obj.first_alone()
    page = output.check_writable(report, (reporting.SUFFIX,), "--report")
    return demonstration.answer(page, as_json)


@app.command("doctor")
@undisturbed
def examine(context: typer.Context, as_json: options.Json = False) -> Answer:
    """Versions, device, and a self-test against known values."""
    context.obj.first_alone()
    return doctor.answer(as_json)
