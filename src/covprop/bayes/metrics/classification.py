"""Predictions of classes, and scores that are to tell the known from the unknown.

Probabilities are (*members, data, classes), targets class numbers (*members, data).
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

BINS = 15
"""Of confidence, as is usual for the expected calibration error."""


def accuracy(probabilities: Tensor, target: Tensor) -> Tensor:
    """The share of data whose most probable class is theirs."""
    return (probabilities.argmax(-1) == target).to(probabilities).mean(-1)


def brier_score(probabilities: Tensor, target: Tensor) -> Tensor:
    """Average of sum_c (p_c - [t = c])^2: from 0, the best, to 2."""
    chosen = torch.nn.functional.one_hot(target.long(), probabilities.shape[-1])
    return (probabilities - chosen.to(probabilities)).square().sum(-1).mean(-1)


@final
@dataclass(frozen=True)
class Reliability:
    """Confidence and accuracy in bins of confidence, (bins,) each; NaN in those without data."""

    confidence: Tensor
    accuracy: Tensor
    share: Tensor
    """Of the data, that is in each bin."""

    @property
    def error(self) -> Tensor:
        """Average of |accuracy - confidence|, each bin by its share of the data."""
        return (self.share * (self.accuracy - self.confidence).nan_to_num().abs()).sum(-1)


def reliability(probabilities: Tensor, target: Tensor, bins: int = BINS) -> Reliability:
    """How often the predicted class is right, by how probable it was said to be."""
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
    """Average of |accuracy - confidence| over bins of confidence (Guo et al. 2017)."""
    return reliability(probabilities, target, bins).error


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """-sum_c p_c log p_c of each datum, in nats: a score for what is unlike the training data.

    `Prediction.mutual_information` is the part of it that more training data would remove.
    """
    return torch.special.entr(probabilities).sum(-1)


def auroc(unknown: Tensor, known: Tensor) -> Tensor:
    """The probability that a score is higher for unknown than for known data; ties count half.

    1 is perfect, 1/2 is chance. Scores have shapes (n,) and (m,); n log n work.
    """
    if unknown.dim() != 1 or known.dim() != 1 or not len(unknown) or not len(known):
        raise ValueError("scores are two vectors, neither of them empty")
    if bool(unknown.isnan().any() or known.isnan().any()):
        raise ValueError("a score is nan, which is neither high nor low; leave it out")
    ordered = known.sort().values
    below = torch.searchsorted(ordered, unknown.contiguous(), side="left")
    up_to = torch.searchsorted(ordered, unknown.contiguous(), side="right")
    return (below + up_to).double().mean() / (2 * len(known))
