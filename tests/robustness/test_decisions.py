"""Decisions by the default method: counted at points or from third cumulants, and their errors."""

import math

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import robustness
from covprop.kernels import pearson
from covprop.robustness.decisions import decide
from covprop.robustness.logits import Logits, Randomisation
from covprop.robustness.pairs import normal_scores, pair_skewness, score_slopes
from covprop.robustness.probabilities import classes_of
from tests.layers import propagate
from tests.oracles import assert_close
from tests.robustness.integrals import generator, network

SAMPLES = 200_000
POINTS = Randomisation.draw(4096, generator())


def skewed(
    seed: int, inputs: int, classes: int, kind: type[nn.Module]
) -> tuple[nn.Module, cp.Gaussian]:
    """A network with large weights, whose logits are clearly skewed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, 32), kind(), nn.Linear(32, classes)).double()
    for weights in model.parameters():
        weights.data *= 2.0
    mean = 0.7 * torch.randn(inputs, dtype=torch.float64)
    return model, cp.Gaussian.isotropic(mean, stddev=0.6)


def truth(model: nn.Module, x: cp.Gaussian) -> Tensor:
    return robustness.sampled_probabilities(model, x, SAMPLES, generator(9)).probability


def test_two_logits_are_compared_by_the_skewness_of_their_difference() -> None:
    """With a skewness g of the difference: P(d > 0) is that of Pearson's type III."""
    model, x = skewed(2, 20, 2, nn.ReLU)
    found = decide(model, x, cp.Cumulants(), POINTS)
    with torch.no_grad():
        difference = propagate(lambda x: (y := model(x))[..., :1] - y[..., 1:], x, cp.Cumulants())
    assert difference.skewness is not None
    assert abs(float(difference.skewness)) > 0.01
    expected = 1 - difference.cdf(0.0)
    assert_close(found.classes().probability[0], expected[0], rtol=1e-9)
    assert float(found.classes().stderr.max()) == 0


def test_the_error_falls_with_third_cumulants() -> None:
    before, after = [], []
    for seed in range(12):
        model, x = skewed(seed, 12 + seed, 2 + seed % 3, (nn.ReLU, nn.GELU)[seed % 2])
        right = truth(model, x)
        gaussian = decide(model, x, cp.GaussianLayers(), POINTS).classes().probability
        third = decide(model, x, cp.Cumulants(), POINTS).classes().probability
        before.append(float((gaussian - right).abs().max()))
        after.append(float((third - right).abs().max()))
    assert sum(after) < 0.65 * sum(before), (before, after)


def test_errors_are_estimated_before_they_are_made() -> None:
    """Of about nine in ten classes the error is below the estimate, which is not too large."""
    within, ratios = [], []
    for seed in range(12):
        model, x = skewed(seed, 12 + seed, 2 + seed % 3, (nn.ReLU, nn.GELU, nn.Tanh)[seed % 3])
        right = truth(model, x)
        found = decide(model, x, cp.Cumulants(), POINTS, with_error=True).classes()
        assert found.assumption is not None
        error = (found.probability - right).abs()
        chance = 3 * (right * (1 - right) / SAMPLES).sqrt()
        within += (error <= found.error + chance).tolist()
        ratios.append(float(found.error.max() / error.max()))
    assert sum(within) >= 0.85 * len(within)
    assert sorted(ratios)[len(ratios) // 2] < 8


def test_few_inputs_are_counted_and_nothing_is_assumed() -> None:
    """Two saturated units: Gaussian logits are off by 0.05 and more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    model.requires_grad_(False)
    model[0].weight.data = 20 * torch.eye(2).double()
    x = cp.Gaussian.isotropic(torch.tensor([0.1, 0.1]).double(), stddev=0.3)
    found = decide(model, x, cp.Auto(), POINTS)
    classes = found.classes()
    assert found.counted
    assert classes.assumption is not None
    assert float(classes.assumption.max()) == 0
    right = truth(model, x)
    error = (classes.probability - right).abs()
    assert bool((error <= 4 * (classes.stderr + (right / SAMPLES).sqrt())).all())
    assert float(error.max()) < 0.005
    gaussian = robustness.class_probabilities(propagate(model, x, cp.GaussianLayers())).probability
    assert float((gaussian - right).abs().max()) > 0.02
    wrong = found.misclassification(1)
    assert_close(wrong.probability, 1 - classes.probability[1], atol=1e-12)
    assert_close(classes.probability.sum(), torch.tensor(1.0).double(), atol=1e-3)
    assert_close(found.softmax().probability.sum(), torch.tensor(1.0).double(), atol=1e-12)


@pytest.mark.parametrize("classes", [1, 2, 3, 5])
def test_a_linear_network_is_exact_at_points(classes: int) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, classes).double()
    x = cp.Gaussian.isotropic(torch.randn(3, 4).double(), stddev=0.5, batch_dims=1)
    found = decide(model, x, cp.QuasiMonteCarlo(), POINTS).classes()
    expected = robustness.class_probabilities(propagate(model, x, cp.GaussianLayers()))
    slack = 5 * (found.stderr + expected.stderr) + 1e-9
    assert bool(((found.probability - expected.probability).abs() <= slack).all())
    if classes <= 3:
        assert float(found.stderr.max()) == 0


def test_one_of_a_batch_is_as_if_alone() -> None:
    model = network(12, 20, 3)
    x = cp.Gaussian.isotropic(
        torch.randn(3, 12, generator=generator()).double(), stddev=0.4, batch_dims=1
    )
    for method in (cp.Cumulants(), cp.QuasiMonteCarlo(1024)):
        both = decide(model, x, method, POINTS, with_error=True).classes()
        alone = decide(model, x[1], method, POINTS, with_error=True).classes()
        assert_close(both.probability[1], alone.probability, atol=1e-9)
        assert both.assumption is not None
        assert alone.assumption is not None
        assert_close(both.assumption[1], alone.assumption, atol=1e-6)


def test_a_copula_gives_the_skewness_of_a_difference() -> None:
    """Against samples of z + g (z^2 - 1) / 6, correlated."""
    covariance = torch.tensor([[1.0, 0.3], [0.3, 0.5]]).double()
    skewness = torch.tensor([0.3, -0.2]).double()
    z = cp.Gaussian(torch.zeros(2).double(), covariance).sample(2_000_000, generator())
    scale = covariance.diagonal().sqrt()
    z = z / scale
    y = scale * (z + skewness * (z.square() - 1) / 6)
    d = y[:, 0] - y[:, 1]
    expected = ((d - d.mean()) / d.std()).pow(3).mean()
    found = pair_skewness(covariance[None], skewness[None])[0]
    assert_close(found[0, 1], expected, atol=0.015)
    assert_close(found, -found.mT, atol=1e-15)
    assert pair_skewness(covariance[None] * 0, skewness[None]).abs().max() == 0


def test_scores_are_those_of_either_tail() -> None:
    z = torch.tensor([-8.0, -1.0, 0.0, 1.0, 8.0, 60.0]).double()
    for skewness in (-0.7, 0.0, 0.7):
        g = torch.full_like(z, skewness)
        scores = normal_scores(z, g)
        assert_close(scores, -normal_scores(-z, -g), rtol=1e-12, atol=1e-12)
        usual = slice(1, 4)
        below = pearson.cumulative(-z, g)[usual]
        assert_close(torch.special.ndtr(-scores[usual]), below, rtol=1e-10)
        assert bool((scores.abs() <= 100).all())
        if skewness == 0:
            assert_close(scores[:-1], z[:-1], rtol=1e-10, atol=1e-12)


def test_slopes_bound_derivatives_of_an_orthant() -> None:
    r = 0.6
    correlation = torch.tensor([[[1.0, r], [r, 1.0]]], dtype=torch.float64)
    for scores in ([0.3, -1.0], [2.0, 2.0], [-3.0, 1.0]):
        a = torch.tensor([scores], dtype=torch.float64)
        found = score_slopes(a, correlation)
        rest = math.sqrt(1 - r**2)
        exact = (-a.square() / 2).exp() / math.sqrt(2 * math.pi)
        exact = exact * torch.special.ndtr((a.flip(-1) - r * a) / rest)
        assert_close(found, exact, rtol=1e-9)


def test_gradients_are_those_of_gaussian_logits() -> None:
    covariance = torch.tensor([[1.0, 0.2], [0.2, 0.7]]).double()
    for skewness in (None, torch.tensor([0.8, -0.3]).double()):
        mean = torch.tensor([0.4, 0.1]).double().requires_grad_()
        y = cp.Gaussian(mean, covariance, skewness=skewness)
        p = robustness.class_probabilities(y).probability
        (slope,) = torch.autograd.grad(p[0], mean)
        if skewness is None:
            plain, first = slope, p.detach()
    assert_close(slope, plain, rtol=1e-12)
    assert float((p.detach() - first).abs().max()) > 0.005


def test_an_error_is_known_where_that_of_the_logits_is() -> None:
    covariance = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
    plain = cp.Gaussian(torch.tensor([1.0, 0.0]).double(), covariance)
    assert robustness.class_probabilities(plain).assumption is None
    half = torch.full((2,), 0.1, dtype=torch.float64)
    known = plain.with_error(cp.error_estimate.ErrorEstimate(half, 0 * half, "a test"))
    found = classes_of(Logits.of(known), POINTS)
    assert found.assumption is not None
    z = 1 / math.sqrt(2)
    expected = 1.5 * 0.1 * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    assert_close(found.assumption, torch.full((2,), expected, dtype=torch.float64), rtol=1e-9)
    wrong = robustness.misclassification_probability(known, 0)
    assert "(assumed distribution)" not in wrong.explained()  # two classes are exact otherwise
    both = robustness.Probabilities(*torch.tensor([0.241, 2e-6, 0.012]).double())
    assert both.explained() == "0.241 ± 0.01 (assumed distribution) ± 2e-06 (integration)"
    assert both.written() == "0.241 ± 0.01"


def test_what_is_certain_is_not_said_to_be_counted() -> None:
    """The error of an assumption is 0 where no other class can win; it is an assumption still."""
    model, x = network(12, 4), cp.Gaussian.isotropic(torch.ones(12).double(), stddev=1e-6)
    for method, counted in ((cp.GaussianLayers(), False), (cp.QuasiMonteCarlo(1024), True)):
        found = robustness.analyse(model, x, method=method, samples=100, generator=generator())
        assert found.misclassification.assumption is not None
        assert float(found.misclassification.assumption) == 0
        assert found.counted is counted
        assert ("decisions are counted" in str(found)) == counted


def test_many_directions_use_third_cumulants_by_default() -> None:
    model = network(20, 30, 3)
    x = cp.Gaussian.isotropic(torch.randn(20, generator=generator()).double(), stddev=0.3)
    found = robustness.analyse(model, x, samples=20_000, generator=generator())
    assert found.error is not None
    assert found.error.sentence in " ".join(str(found).split())
    assert found.record()["error"]["basis"] == found.error.basis
    slack = found.probabilities.error + 4 * found.sampled.stderr
    assert bool((found.differences <= slack).all())
    assert found.method == "Cumulants()"
    assert found.probabilities.assumption is not None
    assert float(found.probabilities.assumption.max()) > 0
    assert not bool(found.budget.error.isnan())
