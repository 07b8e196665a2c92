"""Samples that bear a probability out, by chance alone and by counting."""

import math

import pytest
import torch
from scipy.special import ndtri
from torch import Tensor

from covprop.diagnostics.verdict import SIGNIFICANCE, allowed_errors
from covprop.robustness import Probabilities
from covprop.robustness.classifier import agrees_with_samples
from tests.robustness.integrals import generator

REPEATS = 4000


def sampled(p: Tensor, samples: int, repeats: int) -> Probabilities:
    """Shares of the classes (repeats, classes), with the error that the library gives them."""
    drawn = torch.multinomial(p.expand(repeats, -1), samples, True, generator=generator(4))
    count = torch.nn.functional.one_hot(drawn, len(p)).sum(1).double()
    guess = (count + 1) / (samples + 2)
    return Probabilities(count / samples, (guess * (1 - guess) / samples).sqrt())


def exact(*p: float) -> Probabilities:
    value = torch.tensor(p, dtype=torch.float64)
    return Probabilities(value, torch.zeros_like(value))


@pytest.mark.parametrize(
    "p", [(0.5, 0.5), (0.6, 0.3, 0.1), (0.9, 0.09, 0.0095, 0.0005), (0.994, 0.003, 0.002, 0.001)]
)
def test_chance_alone_looks_wrong_no_oftener_than_it_says(p: tuple[float, ...]) -> None:
    seen = sampled(torch.tensor(p, dtype=torch.float64), 1000, REPEATS)
    alarms = 0
    for probability, stderr in zip(seen.probability, seen.stderr, strict=True):
        one = Probabilities(probability, stderr)
        alarms += not bool(agrees_with_samples(exact(*p), one, 1000).all())
    noise = math.sqrt(SIGNIFICANCE / REPEATS)
    assert alarms / REPEATS < SIGNIFICANCE + 5 * noise


def test_a_difference_of_four_standard_errors_is_seen() -> None:
    """Which five standard errors for every class would let pass."""
    samples, share = 10_000, 0.2
    error = math.sqrt(share * (1 - share) / samples)
    seen = Probabilities(torch.tensor([share, 1 - share]).double(), torch.tensor([error] * 2))
    off = share + 4 * error
    assert agrees_with_samples(exact(off, 1 - off), seen, samples).tolist() == [False, False]
    close = share + 2 * error
    assert agrees_with_samples(exact(close, 1 - close), seen, samples).tolist() == [True, True]


def test_a_class_that_was_not_seen_may_be_rare() -> None:
    seen = Probabilities(torch.tensor([1.0, 0.0]).double(), torch.tensor([1e-4, 1e-4]).double())
    for rare, fits in [(0.0, True), (1e-4, True), (3e-4, True), (2e-3, False)]:
        assert agrees_with_samples(exact(1 - rare, rare), seen, 10_000).tolist() == [fits] * 2


@pytest.mark.parametrize("tests", [1, 10, 10_000])
def test_the_standard_is_that_of_the_comparison_of_methods(tests: int) -> None:
    assert allowed_errors(tests) == pytest.approx(-ndtri(SIGNIFICANCE / 2 / tests), rel=1e-9)
