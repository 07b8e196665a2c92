"""Attacks and fooling rates against the closed forms of linear networks, and against samples."""

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import covprop as cp
from covprop import robustness
from tests.layers import propagate
from tests.oracles import assert_close
from tests.robustness.integrals import generator, network, normal_cdf, random_gaussian, within

LEVELS = (0.0, 0.3, 1.0, 3.0)


@pytest.mark.parametrize("norm", [2.0, math.inf])
@pytest.mark.parametrize("classes", [1, 2])
def test_a_linear_network_loses_the_norm_of_its_weights(norm: float, classes: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, classes).double()
    inputs = random_gaussian(20, size=6).mean
    logits = model(inputs).detach()
    weights = model.weight.detach()
    if classes == 1:
        difference, margin = weights[0], logits[:, 0]
        labels = torch.ones(20, dtype=torch.long)
    else:
        difference, margin = weights[0] - weights[1], logits[:, 0] - logits[:, 1]
        labels = torch.zeros(20, dtype=torch.long)
    dual = difference.norm() if norm == 2 else difference.abs().sum()
    radius = 0.4
    found = robustness.adversarial_accuracy(model, inputs, labels, radius, norm=norm)
    assert_close(found.margin, margin - radius * dual, atol=1e-9)
    assert torch.equal(found.correct, margin > 0)
    assert torch.equal(found.robust, margin > radius * dual)
    assert found.accuracy == float((margin > radius * dual).double().mean())
    assert found.clean_accuracy == float((margin > 0).double().mean())
    moved = found.found - inputs
    length = moved.norm(dim=-1) if norm == 2 else moved.abs().amax(-1)
    assert_close(length, torch.full((20,), radius, dtype=torch.float64), rtol=1e-9)


def test_a_linear_network_of_many_classes_is_attacked_through_its_nearest_rival() -> None:
    torch.manual_seed(1)
    model = nn.Linear(8, 5).double()
    inputs = random_gaussian(30, size=8, seed=4).mean
    logits, weights = model(inputs).detach(), model.weight.detach()
    labels = logits.argmax(-1)
    radius = 0.2
    worst = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        others = [j for j in range(5) if j != label]
        lost = radius * (weights[label] - weights[others]).norm(dim=-1)
        worst.append((row[label] - row[others] - lost).min())
    found = robustness.adversarial_accuracy(model, inputs, labels, radius)
    bound = torch.stack(worst)
    assert bool((found.margin >= bound - 1e-12).all())  # nobody can do more
    assert float((found.margin - bound < 1e-6).double().mean()) > 0.8  # where it is the nearest


def test_a_nearest_class_out_of_reach_does_not_hide_another() -> None:
    # class 1 comes nearer to the right and never wins within 1; class 2 wins below x = -0.5
    weights = torch.tensor([[0.0], [0.01], [-1.0]], dtype=torch.float64)
    model = nn.Linear(1, 3).double()
    model.load_state_dict({"weight": weights, "bias": torch.tensor([0.0, -0.1, -0.5]).double()})
    found = robustness.adversarial_accuracy(model, torch.zeros(1, 1).double(), 0, 1.0)
    assert not bool(found.robust)
    assert_close(found.margin, torch.tensor([-0.5], dtype=torch.float64), atol=1e-9)


def test_a_larger_ball_and_restarts_do_not_help_the_network() -> None:
    model = network(6, 20, 4)
    inputs = random_gaussian(12, size=6).mean
    labels = model(inputs).argmax(-1)
    margins = []
    for radius in (0.0, 0.1, 0.3, 1.0):
        found = robustness.adversarial_accuracy(model, inputs, labels, radius)
        margins.append(found.margin)
    for smaller, larger in pairwise(margins):
        assert bool((larger <= smaller + 1e-3).all())
    again = robustness.adversarial_accuracy(
        model, inputs, labels, 0.3, restarts=3, generator=generator()
    )
    assert bool((again.margin <= margins[2]).all())
    same = robustness.adversarial_accuracy(
        model, inputs, labels, 0.3, restarts=3, generator=generator()
    )
    assert torch.equal(again.found, same.found)


def test_inputs_stay_within_bounds() -> None:
    model = network(6, 20, 4)
    inputs = torch.rand(5, 6, dtype=torch.float64, generator=generator())
    for norm in (2.0, math.inf):
        found = robustness.adversarial_accuracy(
            model, inputs, 0, 0.8, norm=norm, bounds=(0.0, 1.0), restarts=2, generator=generator()
        )
        assert float(found.found.min()) >= 0
        assert float(found.found.max()) <= 1
        moved = found.found - inputs
        length = moved.norm(dim=-1) if norm == 2 else moved.abs().amax(-1)
        assert float(length.max()) <= 0.8 + 1e-12


def test_nothing_is_touched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, state = torch.rand(3, 1, 4, 4), torch.get_rng_state()
    with torch.no_grad():
        robustness.adversarial_accuracy(model, inputs, 1, 0.1, steps=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training


def test_models_and_arguments_that_cannot_be_are_refused() -> None:
    inputs = torch.rand(3, 4)
    with pytest.raises(cp.UnsupportedOperation, match=r"call model\.eval"):
        robustness.adversarial_accuracy(nn.Sequential(nn.Linear(4, 3), nn.Dropout()), inputs, 0, 1)
    with pytest.raises(cp.UnsupportedOperation, match="batch norm"):
        robustness.adversarial_accuracy(
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), inputs, 0, 1
        )
    with pytest.raises(ValueError, match="steps is a whole number"):
        robustness.adversarial_accuracy(nn.Linear(4, 3), inputs, 0, 1, steps=0)
    with pytest.raises(ValueError, match="none of the 3 classes"):
        robustness.adversarial_accuracy(nn.Linear(4, 3), inputs, 3, 1)
    with pytest.raises(cp.UnsupportedOperation, match="one tensor of logits"):
        robustness.adversarial_accuracy(lambda x: (x, 2 * x), inputs, 0, 1)


def test_a_linear_network_has_a_closed_rate() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 2).double()
    inputs = random_gaussian(40, size=5).mean
    found = robustness.fooling_rate(model, inputs, None, LEVELS, samples=500, generator=generator())
    logits, weights = model(inputs).detach(), model.weight.detach()
    margin = (logits[:, 0] - logits[:, 1]).abs()
    spread = (weights[0] - weights[1]).norm()
    each = torch.stack([normal_cdf(-margin / (s * spread)) for s in LEVELS[1:]])
    assert_close(found.each[1:], each, rtol=1e-9)
    assert_close(found.rate.probability[1:], each.mean(-1), rtol=1e-9)
    assert float(found.rate.probability[0]) == 0
    assert_close(found.rate.stderr, torch.zeros(4, dtype=torch.float64), atol=0)
    assert within(found.sampled.probability, found.rate.probability, found.sampled.stderr)
    expected = (each * (1 - each) / 500).sum(-1).sqrt() / 40
    assert_close(found.sampled.stderr[1:], expected, rtol=0.1)  # with one more of each kind
    assert_close(found.levels, torch.tensor(LEVELS, dtype=torch.float64), atol=0)


def test_a_network_agrees_with_its_samples() -> None:
    model = network(6, 40, 40, 4)
    x = cp.Gaussian(
        random_gaussian(10, size=6).mean, 0.02 * random_gaussian(10, size=6).covariance_matrix
    )
    labels = torch.arange(10) % 4
    found = robustness.fooling_rate(model, x, labels, (0.5, 1, 2), generator=generator())
    assert bool((found.rate.stderr > 0).any())
    assert_close(found.rate.probability, found.sampled.probability, atol=0.02)
    wrong = (model(x.mean).argmax(-1) != labels).double().mean()
    still = robustness.fooling_rate(model, x, labels, (0.0,), samples=1, generator=generator())
    assert_close(still.rate.probability, wrong[None], atol=0)
    assert_close(still.sampled.probability, wrong[None], atol=0)


@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_an_attack_of_the_same_size_fools_more(norm: float) -> None:
    model = network(6, 20, 4)
    x = cp.Gaussian.isotropic(random_gaussian(10, size=6).mean, stddev=0.1, batch_dims=1)
    found = robustness.fooling_and_adversary(
        model, x, None, (0.5, 1, 3), norm=norm, samples=200, generator=generator()
    )
    assert found.adversarial is not None
    assert bool((found.adversarial >= found.rate.probability - 1e-9).all())
    size = math.sqrt(6) if norm == 2 else 1.0
    levels = torch.tensor([0.05, 0.1, 0.3], dtype=torch.float64)
    assert_close(found.radius, size * levels, rtol=1e-9)
    direct = robustness.adversarial_accuracy(
        model, x.mean, model(x.mean).argmax(-1), 0.1 * size, norm=norm
    )
    assert float(found.adversarial[1]) == 1 - direct.accuracy


def test_it_prints_and_records_every_level() -> None:
    model = network(3, 10, 4)
    inputs = random_gaussian(5, size=3).mean
    options = {"samples": 50, "generator": generator()}
    plain = robustness.fooling_rate(model, inputs, None, (0.1, 1), **options)
    lines = str(plain).splitlines()
    assert lines[0].split() == ["level", "fooled", "sampled"]
    assert [line.split()[0] for line in lines[1:3]] == ["0.1", "1"]
    assert "50 samples of each of 5 inputs" in lines[3]
    both = robustness.fooling_and_adversary(model, inputs, None, (0.1, 1), **options)
    assert "fooled by PGD" in str(both)
    assert both._repr_html_().count("<tr>") == 3
    told = json.loads(json.dumps(both.record()))
    assert told["levels"] == [0.1, 1]
    assert len(told["each"][0]) == 5
    assert told["adversarial"] == both.adversarial.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("levels", [[], [-1.0], [math.nan], [[1.0]]])
def test_levels_that_cannot_be_are_refused(levels: list) -> None:
    with pytest.raises(ValueError, match="levels are numbers from 0"):
        robustness.fooling_rate(network(3, 2), torch.zeros(1, 3).double(), None, levels)


def test_samples_of_the_network_share_ties_and_count_all() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(2, 1).double(), stddev=1.0, batch_dims=1)

    def tied(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x, x - 1], dim=-1)

    found = robustness.sampled_probabilities(tied, x, 10, generator())
    assert_close(found.probability, torch.tensor([[0.5, 0.5, 0.0]] * 2).double(), atol=0)
    q = 1 / 12
    assert float(found.stderr[0, 2]) == pytest.approx(math.sqrt(q * (1 - q) / 10))
    with pytest.raises(ValueError, match="samples is a whole number"):
        robustness.sampled_probabilities(tied, x, 0)


@pytest.mark.parametrize("alone", [True, False])
def test_noise_of_low_rank_is_sampled_in_its_directions(alone: bool) -> None:
    torch.manual_seed(0)
    model, draw = nn.Linear(5, 2).double().requires_grad_(requires_grad=False), generator(4)
    mean, factor = torch.zeros(1, 5).double(), torch.randn(1, 5, 2, generator=draw).double()
    variance = None if alone else torch.ones(1, 5).double()
    x = cp.Gaussian.low_rank(mean, factor, variance=variance, batch_dims=1)
    found = robustness.sampled_probabilities(model, x, 20_000, generator())
    margin = propagate(lambda x: model(x) @ torch.tensor([1.0, -1.0]).double(), x)
    expected = normal_cdf(margin.mean / margin.stddev)
    assert within(found.probability[..., 0], expected, found.stderr[..., 0])
