"""Figures of calibration and of predictions along a line."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from covprop.bayes.likelihoods import Prediction
from covprop.bayes.metrics.classification import Reliability
from covprop.bayes.metrics.regression import Calibration
from covprop.report.predictions import calibration_figure, intervals_figure, reliability_figure


def plot_calibration(curves: Mapping[str, Calibration] | Calibration) -> Any:
    """Observed against expected shares below quantiles, and what chance alone would do."""
    named = {"": curves} if isinstance(curves, Calibration) else curves
    lines = {name: (_list(curve.expected), _list(curve.observed)) for name, curve in named.items()}
    return calibration_figure(lines, min(curve.data for curve in named.values()))


def plot_reliability(bins: Reliability) -> Any:
    """Accuracy against confidence, and how many data have it."""
    return reliability_figure(_list(bins.confidence), _list(bins.accuracy), _list(bins.share))


def plot_intervals(
    x: Tensor, prediction: Prediction, data: tuple[Tensor, Tensor] | None = None
) -> Any:
    """A prediction along one input (n,): the mean, two standard deviations, and the epistemic part.

    data: inputs and targets to show as points.
    """
    order = x.reshape(-1).argsort()

    def line(values: Tensor) -> list[float]:
        return _list(values.reshape(-1)[order])

    return intervals_figure(
        line(x),
        line(prediction.mean),
        line(prediction.stddev),
        line(prediction.epistemic.sqrt()),
        None if data is None else (_list(data[0].reshape(-1)), _list(data[1].reshape(-1))),
    )


def _list(values: Tensor) -> list[float]:
    if values.dim() != 1:
        raise ValueError(f"a figure shows one curve, not {tuple(values.shape)}; select a member")
    return [float(value) for value in values.detach()]
