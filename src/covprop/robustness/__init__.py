"""What noise on the inputs does to decisions."""

from covprop.robustness.adversary import Adversarial, adversarial_accuracy
from covprop.robustness.analysis import analyse
from covprop.robustness.balls import Ball
from covprop.robustness.budget import NoiseBudget, noise_budget
from covprop.robustness.fooling import FoolingRate, fooling_and_adversary, fooling_rate
from covprop.robustness.logits import margins
from covprop.robustness.probabilities import (
    Probabilities,
    class_probabilities,
    misclassification_probability,
)
from covprop.robustness.result import Robustness
from covprop.robustness.sampled import sampled_probabilities
from covprop.robustness.sensitivity import (
    ExpectedMargin,
    Misclassification,
    OutputVariance,
    StandardisedMargin,
    sensitivity,
)
from covprop.robustness.softmax import entropy, expected_softmax
from covprop.robustness.worst import VarianceBudget, WorstNoise, worst_noise

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
