"""Whether samples of a network bear out a probability, by the standard of `cp.compare`."""

import torch
from torch import Tensor

from covprop.robustness.probabilities import Probabilities
from covprop.verdict import allowed_errors


def borne_out(ours: Probabilities, sampled: Probabilities, samples: int) -> Tensor:
    """Which probabilities differ from shares of so many samples by no more than chance explains.

    Chance makes any one of all of them look wrong with a probability of about 0.01. The standard
    error of a share is the larger of what the samples say and of what ours says it is,
    sqrt(p (1 - p) / n), since a class that was not seen says little; and at least 1 / n.
    """
    p, share = ours.probability.double(), sampled.probability.double()
    expected = (p * (1 - p)).clamp(min=0) / samples
    variance = torch.maximum(sampled.stderr.double().square(), expected)
    variance = variance.clamp(min=1 / samples**2) + ours.stderr.double().square()
    return (p - share).abs() <= allowed_errors(p.numel()) * variance.sqrt()
