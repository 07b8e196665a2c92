"""How good predictions are: of numbers, of classes, and of telling known from unknown data.

Every measure averages over the last dimension of the batch, so that members keep their own. For
numbers, means, deviations and targets have the same shape (*members, data); for classes,
probabilities are (*members, data, classes) and targets class numbers (*members, data). Calibration
is measured from cumulative probabilities P(T <= t): `gaussian_cumulative` of a mean and a
deviation, or the likelihood's own `cumulative`, as noise of unknown size has heavier tails.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from covprop.bayes.likelihoods import Likelihood, Prediction
from covprop.gaussian import Gaussian
from covprop.kernels.normal import SQRT_PI, cumulative, density, standardise
from covprop.plots import calibration_figure, intervals_figure, reliability_figure

__all__ = [
    "Calibration", "Reliability", "accuracy", "auroc", "brier_score", "calibration_curve",
    "calibration_error", "coverage", "crps", "expected_calibration_error", "gaussian_cumulative",
    "log_predictive_density", "plot_calibration", "plot_intervals", "plot_reliability",
    "predictive_entropy", "reliability", "rmse", "sharpness",
]  # fmt: skip

BINS = 15
"""Of confidence, as is usual for the expected calibration error."""
LEVELS = 99
"""Quantiles that a calibration curve has: 1 % ... 99 %."""


def log_predictive_density(likelihood: Likelihood, output: Gaussian, target: Tensor) -> Tensor:
    """Average log E[p(t | f)], in nats for each datum: larger is better.

    Args:
        likelihood: The distribution of the target given the outputs f.
        output: The Gaussian of the outputs.
        target: As the likelihood takes it.

    Example:
        output = cp.Gaussian.isotropic(torch.zeros(5, 1), stddev=0.1, batch_dims=1)
        metrics.log_predictive_density(bayes.HomoskedasticGaussian(), output, torch.ones(5))
    """
    return likelihood.log_predictive(output, target).mean(-1)


def rmse(mean: Tensor, target: Tensor) -> Tensor:
    """Root of the average squared error of the mean.

    Args:
        mean: Predicted means (*members, data).
        target: The targets (*members, data).

    Example:
        metrics.rmse(torch.zeros(5), torch.ones(5))
    """
    _check(mean, target)
    return (mean - target).square().mean(-1).sqrt()


def crps(mean: Tensor, stddev: Tensor, target: Tensor) -> Tensor:
    """Average continuous ranked probability score of a Gaussian prediction: smaller is better.

    s [z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)], z = (t - m) / s   (Gneiting & Raftery 2007)

    in the units of the target; |t - m| where s = 0.

    Args:
        mean: Predicted means (*members, data).
        stddev: Predicted standard deviations (*members, data).
        target: The targets (*members, data).

    Example:
        metrics.crps(torch.zeros(5), torch.ones(5), torch.ones(5))
    """
    _check(mean, stddev, target)
    distance = (target - mean).abs()
    z = standardise(distance, stddev)
    inside = distance * (1 - 2 * cumulative(-z)) + stddev * (2 * density(z) - 1 / SQRT_PI)
    return inside.mean(-1)


def sharpness(stddev: Tensor) -> Tensor:
    """Root of the average predicted variance: small if predictions are narrow.

    Args:
        stddev: Predicted standard deviations (*members, data).

    Example:
        metrics.sharpness(torch.ones(5))
    """
    return stddev.square().mean(-1).sqrt()


def gaussian_cumulative(mean: Tensor, stddev: Tensor, target: Tensor) -> Tensor:
    """P(T <= t) of a Gaussian prediction, uniform over [0, 1] if it is calibrated.

    Args:
        mean: Predicted means (*members, data).
        stddev: Predicted standard deviations (*members, data).
        target: The targets (*members, data).

    Example:
        metrics.gaussian_cumulative(torch.zeros(5), torch.ones(5), torch.randn(5))
    """
    _check(mean, stddev, target)
    return cumulative(standardise(target - mean, stddev))


def coverage(probability: Tensor, level: float = 0.95) -> Tensor:
    """Share of targets within the central interval of this probability.

    Args:
        probability: P(T <= t) of each target.
        level: The probability of the interval.

    Example:
        metrics.coverage(torch.rand(100), level=0.9)
    """
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval is between 0 and 1, not {level}")
    return ((probability - 0.5).abs() <= level / 2).to(probability).mean(-1)


@final
@dataclass(frozen=True)
class Calibration:
    """Expected and observed shares of targets below the quantiles of their predictions.

    Attributes:
        expected: (levels,).
        observed: (*members, levels).
        data: How many targets there were.

    Example:
        curve = metrics.calibration_curve(torch.rand(100))
        curve.observed - curve.expected, curve.error
    """

    expected: Tensor
    observed: Tensor
    data: int

    @property
    def error(self) -> Tensor:
        """Average of |observed - expected|: 0 is calibrated, 1/2 the worst."""
        return (self.observed - self.expected).abs().mean(-1)


def calibration_curve(probability: Tensor, levels: int = LEVELS) -> Calibration:
    """Shares of targets below the quantiles 1 / (levels + 1) ... levels / (levels + 1).

    Args:
        probability: P(T <= t) of each target.
        levels: How many quantiles.

    Example:
        metrics.calibration_curve(torch.rand(100)).observed
    """
    expected = torch.arange(1, levels + 1).to(probability) / (levels + 1)
    below = (probability[..., None, :] <= expected[:, None]).to(probability)
    return Calibration(expected, below.mean(-1), probability.shape[-1])


def calibration_error(probability: Tensor, levels: int = LEVELS) -> Tensor:
    """Average of |observed - expected| over the quantiles of a `calibration_curve`.

    Args:
        probability: P(T <= t) of each target.
        levels: How many quantiles.

    Example:
        metrics.calibration_error(torch.rand(100))
    """
    return calibration_curve(probability, levels).error


def accuracy(probabilities: Tensor, target: Tensor) -> Tensor:
    """Share of data whose most probable class is the target.

    Args:
        probabilities: (*members, data, classes).
        target: Class numbers (*members, data).

    Example:
        metrics.accuracy(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))
    """
    return (probabilities.argmax(-1) == target).to(probabilities).mean(-1)


def brier_score(probabilities: Tensor, target: Tensor) -> Tensor:
    """Average of sum_c (p_c - [t = c])^2: from 0, the best, to 2.

    Args:
        probabilities: (*members, data, classes).
        target: Class numbers (*members, data).

    Example:
        metrics.brier_score(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))
    """
    chosen = torch.nn.functional.one_hot(target.long(), probabilities.shape[-1])
    return (probabilities - chosen.to(probabilities)).square().sum(-1).mean(-1)


@final
@dataclass(frozen=True)
class Reliability:
    """Confidence and accuracy in bins of confidence, (*members, bins) each; NaN without data.

    Attributes:
        confidence: The average probability of the predicted class.
        accuracy: How often the predicted class is right.
        share: Of the data, that is in each bin.

    Example:
        bins = metrics.reliability(torch.tensor([[0.2, 0.8], [0.6, 0.4]]), torch.tensor([1, 0]))
        bins.accuracy, bins.error
    """

    confidence: Tensor
    accuracy: Tensor
    share: Tensor

    @property
    def error(self) -> Tensor:
        """Average of |accuracy - confidence|, each bin by its share of the data."""
        return (self.share * (self.accuracy - self.confidence).nan_to_num().abs()).sum(-1)


def reliability(probabilities: Tensor, target: Tensor, bins: int = BINS) -> Reliability:
    """Compare how often the predicted class is right with its predicted probability.

    Args:
        probabilities: (*members, data, classes).
        target: Class numbers (*members, data).
        bins: How many bins of confidence.

    Example:
        metrics.reliability(torch.tensor([[0.2, 0.8]]), torch.tensor([1])).accuracy
    """
    confidence, predicted = probabilities.max(-1)
    right = (predicted == target).to(probabilities)
    # Bins are (b / bins, (b + 1) / bins], so that full confidence is in the last.
    place = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
    member = torch.nn.functional.one_hot(place, bins).to(probabilities)  # (..., data, bins)
    count = member.sum(-2)
    return Reliability(
        (member * confidence[..., None]).sum(-2) / count,
        (member * right[..., None]).sum(-2) / count,
        count / probabilities.shape[-2],
    )


def expected_calibration_error(probabilities: Tensor, target: Tensor, bins: int = BINS) -> Tensor:
    """Average of |accuracy - confidence| over bins of confidence (Guo et al. 2017).

    Args:
        probabilities: (*members, data, classes).
        target: Class numbers (*members, data).
        bins: How many bins of confidence.

    Example:
        metrics.expected_calibration_error(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))
    """
    return reliability(probabilities, target, bins).error


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """-sum_c p_c log p_c of each datum, in nats: a score for what is unlike the training data.

    `Prediction.mutual_information` is the part of it that more training data would remove.

    Args:
        probabilities: (*members, data, classes).

    Example:
        metrics.predictive_entropy(torch.tensor([[0.2, 0.8]]))
    """
    return torch.special.entr(probabilities).sum(-1)


def auroc(unknown: Tensor, known: Tensor) -> Tensor:
    """Probability that a score is higher for unknown than for known data; ties count half.

    Args:
        unknown: Scores (n,) of data unlike those of training.
        known: Scores (m,) of data like them.

    Returns:
        1 is perfect, 1/2 is chance; n log n work.

    Example:
        metrics.auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    """
    if unknown.dim() != 1 or known.dim() != 1 or not len(unknown) or not len(known):
        raise ValueError("scores are two vectors, neither of them empty")
    if bool(unknown.isnan().any() or known.isnan().any()):
        raise ValueError("a score is nan, which is neither high nor low; leave it out")
    ordered = known.sort().values
    below = torch.searchsorted(ordered, unknown.contiguous(), side="left")
    up_to = torch.searchsorted(ordered, unknown.contiguous(), side="right")
    return (below + up_to).double().mean() / (2 * len(known))


def plot_calibration(curves: Mapping[str, Calibration] | Calibration) -> Any:
    """Plot observed against expected shares below quantiles, with the band of chance alone.

    Args:
        curves: One curve, or several by name.

    Example:
        metrics.plot_calibration(metrics.calibration_curve(torch.rand(100)))
    """
    named = {"": curves} if isinstance(curves, Calibration) else curves
    lines = {name: (_list(curve.expected), _list(curve.observed)) for name, curve in named.items()}
    return calibration_figure(lines, min(curve.data for curve in named.values()))


def plot_reliability(bins: Reliability) -> Any:
    """Plot accuracy against confidence, and how many data have it.

    Args:
        bins: The result of `reliability`.

    Example:
        p = torch.rand(100, 3).softmax(-1)
        metrics.plot_reliability(metrics.reliability(p, torch.randint(3, (100,))))
    """
    return reliability_figure(_list(bins.confidence), _list(bins.accuracy), _list(bins.share))


def plot_intervals(
    x: Tensor, prediction: Prediction, data: tuple[Tensor, Tensor] | None = None
) -> Any:
    """Plot a prediction along one input: mean, two standard deviations, and the epistemic part.

    Args:
        x: The input (n,).
        prediction: Of one target.
        data: Inputs and targets to show as points.

    Example:
        x, one = torch.linspace(0, 1, 5), torch.ones(5)
        metrics.plot_intervals(x, bayes.Prediction(x, one, one))
    """
    order = x.reshape(-1).argsort()

    def line(values: Tensor) -> list[float]:
        return _list(values.reshape(-1)[order])

    return intervals_figure(
        line(x), line(prediction.mean), line(prediction.stddev), line(prediction.epistemic.sqrt()),
        None if data is None else (_list(data[0].reshape(-1)), _list(data[1].reshape(-1))),
    )  # fmt: skip


def _check(*tensors: Tensor) -> None:
    # A (data, 1) against a (data,) would broadcast to all pairs.
    for tensor in tensors[1:]:
        if tensor.shape != tensors[0].shape:
            raise ValueError(
                f"predictions have the shape of the targets, not {tuple(tensors[0].shape)} and "
                f"{tuple(tensor.shape)}; select one target with [..., 0]"
            )


def _list(values: Tensor) -> list[float]:
    if values.dim() != 1:
        raise ValueError(f"a figure shows one curve, not {tuple(values.shape)}; select a member")
    return [float(value) for value in values.detach()]
