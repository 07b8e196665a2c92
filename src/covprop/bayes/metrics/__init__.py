"""How good predictions are: of numbers, of classes, and of knowing what one does not know.

Every measure averages over the last dimension of the batch, so that members keep their own.
"""

from covprop.bayes.metrics.classification import (
    Reliability,
    accuracy,
    auroc,
    brier_score,
    expected_calibration_error,
    predictive_entropy,
    reliability,
)
from covprop.bayes.metrics.figures import plot_calibration, plot_intervals, plot_reliability
from covprop.bayes.metrics.regression import (
    Calibration,
    calibration_curve,
    calibration_error,
    coverage,
    crps,
    gaussian_cumulative,
    log_predictive_density,
    rmse,
    sharpness,
)

__all__ = [
    "Calibration",
    "Reliability",
    "accuracy",
    "auroc",
    "brier_score",
    "calibration_curve",
    "calibration_error",
    "coverage",
    "crps",
    "expected_calibration_error",
    "gaussian_cumulative",
    "log_predictive_density",
    "plot_calibration",
    "plot_intervals",
    "plot_reliability",
    "predictive_entropy",
    "reliability",
    "rmse",
    "sharpness",
]
