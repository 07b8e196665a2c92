"""What noise on the inputs does to decisions."""

from covprop.robustness.adversary import (
    Adversarial,
    FoolingRate,
    adversarial_accuracy,
    fooling_and_adversary,
    fooling_rate,
)
from covprop.robustness.analysis import Robustness, analyse
from covprop.robustness.budget import NoiseBudget, noise_budget
from covprop.robustness.classifier import Ball, sampled_probabilities
from covprop.robustness.estimates import Probabilities
from covprop.robustness.logits import entropy, expected_softmax, margins
from covprop.robustness.probabilities import class_probabilities, misclassification_probability
from covprop.robustness.sensitivity import (
    ExpectedMargin,
    Misclassification,
    OutputVariance,
    StandardisedMargin,
    VarianceBudget,
    WorstNoise,
    sensitivity,
    worst_noise,
)

__all__ = [
    "Adversarial",
    "Ball",
    "ExpectedMargin",
    "FoolingRate",
    "Misclassification",
    "NoiseBudget",
    "OutputVariance",
    "Probabilities",
    "Robustness",
    "StandardisedMargin",
    "VarianceBudget",
    "WorstNoise",
    "adversarial_accuracy",
    "analyse",
    "class_probabilities",
    "entropy",
    "expected_softmax",
    "fooling_and_adversary",
    "fooling_rate",
    "margins",
    "misclassification_probability",
    "noise_budget",
    "sampled_probabilities",
    "sensitivity",
    "worst_noise",
]


def __dir__() -> list[str]:
    return list(__all__)
