"""`field`: all methods on the same networks, with the error of the truth in every row.

Networks of seven classes, independent or correlated noise of 0.1, 0.3 and 1 of the input's spread,
and behind one call the methods of covprop, those of papers, packages, points and samples. Errors
are those of means (in standard deviations), standard deviations and covariances (relative), the
divergence of Kullback and Leibler from the true Gaussian, and the 2-Wasserstein distance over the
root of the trace; seconds are CPU time, memory that of torch's tensors. What a method refuses is a
row with its sentence.
"""

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import covprop as cp
from covprop.diagnostics.compare import PeakTensors
from experiments import field_networks, field_pages
from experiments.corpus_truth import Truth
from experiments.options import Options
from experiments.rivals import OURS, RIVALS, Refused, Rival

NAME = "field"
INPUTS = 2
"""Points of each network, unless told otherwise."""
METHODS: dict[str, Rival] = {**OURS, **RIVALS}
SMOKE = (
    "GaussianLayers()", "Petersen 2024 (SDP)", "Gast & Roth 2018 (ADF)",
    "polynomial chaos, degree 4", "Monte Carlo 1,000",
)  # fmt: skip
BRIEF, RUNS = 0.1, 3
"""Seconds of a run that is timed again, and how many times at most."""
FAILURES = (cp.CovpropError, Refused, ValueError, RuntimeError)
"""What a method may raise on a network that samples go through."""

tables = field_pages.tables
figures = field_pages.figures


def settings(options: Options) -> dict[str, Any]:
    """What results depend on."""
    return {"seed": options.seed, "smoke": options.smoke, "noises": field_networks.NOISES}


def units(options: Options) -> list[str]:
    """Network, noise, point and method."""
    inputs = 1 if options.smoke else options.instances or INPUTS
    methods = SMOKE if options.smoke else METHODS
    return [
        "/".join((name, str(noise), str(index), method))
        for name, noise, index in field_networks.keys(options, inputs)
        for method in methods
    ]


def measure(key: str, options: Options) -> dict[str, Any]:
    """Errors of one method on one case beside those of the truth, or why there are none."""
    name, noise, index, method = key.split("/")
    (model, x), truth = field_networks.prepared(name, float(noise), int(index), options.smoke)
    rival = METHODS[method]
    row: dict[str, Any] = {"truth": truth_errors(truth), "samples": truth.samples}
    torch.manual_seed(options.seed)  # samples are drawn from torch's own generator
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", cp.ApproximationWarning)  # notes are counted
            y, seconds, peak = footprint(lambda: rival(model, x))
    except FAILURES as error:
        sentence = str(error).strip().partition("\n")[0]
        return {**row, "refused": sentence or type(error).__name__}
    found = y.mean.flatten(), y.covariance_matrix.reshape(y.mean.numel(), -1)
    return {
        **row, **errors(found, (truth.mean, truth.covariance), truth.counted, rival.joint),
        "seconds": seconds, "bytes": peak if rival.counted else None, "notes": len(y.notes),
    }  # fmt: skip


def footprint(run: Callable[[], cp.Gaussian]) -> tuple[cp.Gaussian, float, int]:
    """The result, CPU seconds without the counting of memory, and the most bytes of tensors."""
    with PeakTensors() as peak:
        started = time.process_time()
        y = run()
        seconds = time.process_time() - started - peak.counting
    if seconds < BRIEF:
        seconds = min(_timed(run) for _ in range(RUNS))
    return y, round(max(seconds, 0.0), 6), peak.most


def _timed(run: Callable[[], cp.Gaussian]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def errors(
    found: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor], counted: Tensor, joint: bool = True
) -> dict[str, float | None]:  # fmt: skip
    """Of a mean and a covariance by the true ones, at outputs that vary; None if not finite.

    joint: whether the method has covariances. Without them it has no error of those, and its
    divergence and distance are those of independent outputs.
    """
    (mean, covariance), (centre, truth) = (
        (first[counted], second[counted][:, counted]) for first, second in (found, true)
    )
    stddev = truth.diagonal().sqrt()
    of_mean = (mean - centre).abs() / stddev
    of_stddev = (covariance.diagonal().clamp(min=0).sqrt() / stddev - 1).abs()
    pair = [
        cp.Gaussian(*moments, validate_args=False)
        for moments in ((centre, truth), (mean, covariance))
    ]
    values = {
        "mean": _rms(of_mean), "worst mean": float(of_mean.max()),
        "stddev": _rms(of_stddev), "worst stddev": float(of_stddev.max()),
        "covariance": float((covariance - truth).norm() / truth.norm()) if joint else None,
        "KL": float(cp.kl_divergence(*pair)),
        "W2": float(cp.wasserstein_distance(*pair) / truth.trace().sqrt()),
    }  # fmt: skip
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in values.items()
    }


def truth_errors(truth: Truth) -> dict[str, float | None]:
    """Half of what the two halves of the points differ by, of the divergence a quarter.

    The difference of two independent halves has twice the deviation of their average.
    """
    mean, covariance, other_mean, other_covariance = truth.halves
    found = errors((other_mean, other_covariance), (mean, covariance), truth.counted)
    return {
        name: None if value is None else value / (4 if name == "KL" else 2)
        for name, value in found.items()
    }


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
