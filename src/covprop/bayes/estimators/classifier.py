"""Classes with their probabilities."""

from typing import Any, final

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from covprop.bayes.estimators import settings
from covprop.bayes.estimators.base import BayesEstimator
from covprop.bayes.estimators.scaling import Floats, Scaling, array
from covprop.bayes.likelihoods import Bernoulli
from covprop.bayes.training import History

TWO = 2
"""Classes that one logit tells apart."""
LABELS = (bool, int, float, str)
"""What a file has for them."""


@final
class BayesClassifier(ClassifierMixin, BayesEstimator):
    """Classification with a Bayesian network, trained without sampling.

    likelihood: `bernoulli` (default for two classes), `categorical` (default for more), or an
    object such as `bayes.Categorical(bayes.Delta())`; the other parameters are those of
    `BayesRegressor`. Features are standardised inside; labels may be of any kind.
    """

    classes_: Any

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "BayesClassifier":
        """Train on features (rows, features) and labels (rows,)."""
        x, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        rows, weight = self._begin(x, sample_weight)
        x = x[rows]
        self.classes_, labels = np.unique(y[rows], return_inverse=True)
        if len(self.classes_) < TWO:
            raise ValueError(
                f"y has one class, {self.classes_.tolist()[0]!r}; a classifier needs at least two"
            )
        self._choose()
        kind = torch.long
        if isinstance(self.likelihood_, Bernoulli):
            kind = settings.torch_dtype(self.dtype)
        self._train(x, torch.as_tensor(labels).to(kind), weight, labels)
        return self

    def predict_proba(self, X: Any) -> Floats:
        """Probabilities (rows, classes), averaged over networks."""
        mean = array(self._moments(self._inputs(self._features(X))).mean)
        return np.hstack([1 - mean, mean]) if mean.shape[1] == 1 else mean

    def predict(self, X: Any) -> Any:
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_log_proba(self, X: Any) -> Floats:
        """Logarithms of the probabilities."""
        return np.log(self.predict_proba(X))

    def mutual_information(self, X: Any) -> Floats:
        """How much of the uncertainty (nats) is for want of knowing the weights: large far off."""
        return array(self._moments(self._inputs(self._features(X))).mutual_information)

    def _choose(self) -> None:
        two = len(self.classes_) == TWO
        default = "bernoulli" if two else "categorical"
        self.likelihood_ = self._own_likelihood(settings.LABELLINGS, default)
        if isinstance(self.likelihood_, Bernoulli) and not two:
            raise ValueError(f"bernoulli is for two classes, and y has {len(self.classes_)}")
        self.targets_ = Scaling.none(1)

    def _outputs(self) -> int:
        classes = len(self.classes_)
        return self.likelihood_.outputs(1 if isinstance(self.likelihood_, Bernoulli) else classes)

    def _facts(self) -> dict[str, Any]:
        labels = self.classes_.tolist()
        if not all(isinstance(label, LABELS) for label in labels):
            raise ValueError("a file cannot hold labels other than numbers and strings; use pickle")
        return {"classes": labels, "dtype": self.classes_.dtype.str}

    def _recall(self, facts: dict[str, Any]) -> None:
        labels = facts["classes"]
        if not all(isinstance(label, LABELS) for label in labels) or len(set(labels)) < TWO:
            raise ValueError("its classes are no list of labels")
        self.classes_ = np.array(labels, dtype=np.dtype(facts["dtype"]))
        self.history_ = History()
        self._choose()
