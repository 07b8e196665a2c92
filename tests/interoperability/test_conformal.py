"""Deviations as normalisers of conformal prediction: docs/conformal.md, MAPIE and crepes."""

import math
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, RegressorMixin

from tests.docs.test_pages import words
from tests.pages import ROOT, run

ROWS, CONFIDENCE = 157, 0.9


def package(name: str) -> ModuleType:
    """One that may not be installed; what it imports may warn of its own future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: ModuleType = pytest.importorskip(name, exc_type=ImportError)
    return found


def test_the_page_prints_what_it_shows() -> None:
    needed = [None, "mapie.regression", "crepes"]
    pieces = run((ROOT / "docs" / "conformal.md").read_text(), page="conformal.md")
    for name in needed:
        if name is not None:
            package(name)
        example, printed = next(pieces)
        assert example.shown is not None
        assert words(printed) == words(example.shown)
        shares = [int(word.rstrip("%,")) for word in printed.split() if "%" in word]
        assert 85 <= shares[0] <= 97  # of 1,000 rows 0.9 is within three standard errors
    assert next(pieces, None) is None


def data(seed: int) -> tuple[Any, ...]:
    """Predictions, their deviations and targets."""
    draw = np.random.default_rng(seed)
    mean, stddev = draw.normal(size=ROWS), draw.uniform(0.1, 2.0, ROWS)
    return mean, stddev, mean + stddev * draw.normal(size=ROWS)


def half_widths() -> Any:
    """By the formula: the ceil((n + 1) c)-th smallest error in deviations, times the deviation."""
    mean, stddev, target = data(0)
    scores = np.sort(np.abs(target - mean) / stddev)
    return scores[math.ceil((ROWS + 1) * CONFIDENCE) - 1] * data(1)[1]


def test_crepes_takes_deviations_as_sigmas() -> None:
    crepes = package("crepes")
    mean, stddev, target = data(0)
    regressor = crepes.ConformalRegressor().fit(target - mean, sigmas=stddev)
    mean, stddev, _ = data(1)
    found = regressor.predict_int(mean, sigmas=stddev, confidence=CONFIDENCE)
    expected = np.stack([mean - half_widths(), mean + half_widths()], 1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


class Column(RegressorMixin, BaseEstimator):
    """A regressor that knows its predictions: a column of what it is given."""

    def __init__(self, column: int = 0) -> None:
        self.column = column
        self.n_features_in_ = 2

    def fit(self, X: Any, y: Any) -> "Column":
        del X, y
        return self

    def predict(self, X: Any) -> Any:
        return X[:, self.column]


def test_mapie_takes_deviations_as_a_residual_estimator() -> None:
    package("mapie")
    regression = package("mapie.regression")
    scores = package("mapie.conformity_scores")
    mean, stddev, target = data(0)
    score = scores.ResidualNormalisedScore(Column(1), prefit=True)
    conformal = regression.SplitConformalRegressor(
        Column(), confidence_level=CONFIDENCE, conformity_score=score
    )
    conformal.conformalize(np.stack([mean, stddev], 1), target)
    mean, stddev, _ = data(1)
    _, found = conformal.predict_interval(np.stack([mean, stddev], 1))
    expected = np.stack([mean - half_widths(), mean + half_widths()], 1)
    np.testing.assert_allclose(found[:, :, 0], expected, rtol=1e-12)
