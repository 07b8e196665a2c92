"""Everything about a classifier under noise, in one result."""

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import robustness
from covprop.robustness.analysis import STAGES
from tests.layers import propagate
from tests.oracles import assert_close
from tests.robustness.integrals import generator, network, random_gaussian

WIDTH = 0.4


def analysed(
    model: nn.Module, x: cp.Gaussian, label: Tensor | int | None = None, **options: object
) -> robustness.Robustness:
    return robustness.analyse(
        model, x, label, **({"samples": 2000, "generator": generator()} | options)
    )


QUICK: dict[str, object] = {"method": cp.GaussianLayers(), "samples": 200, "steps": 2}
"""For tests of what the numbers are not."""


def noisy(*batch: int, size: int = 6) -> cp.Gaussian:
    mean = random_gaussian(*batch, size=size).mean
    return cp.Gaussian.isotropic(mean, stddev=WIDTH, batch_dims=len(batch))


def test_every_field_is_what_its_own_function_gives() -> None:
    model, x = network(6, 30, 4), noisy(3)
    labels = torch.tensor([1, 2, 3])
    found = analysed(model, x, labels, method=cp.GaussianLayers())
    y = propagate(model, x, cp.GaussianLayers())
    assert torch.equal(found.label, labels)
    assert torch.equal(found.predicted, model(x.mean).argmax(-1))
    direct = robustness.class_probabilities(y, generator=generator(5))
    error = 5 * (direct.stderr + found.probabilities.stderr)
    assert bool(((direct.probability - found.probabilities.probability).abs() <= error).all())
    wrong = 1 - found.probabilities.probability.gather(-1, labels[:, None])[:, 0]
    assert_close(found.misclassification.probability, wrong, atol=1e-3)
    margin = robustness.margins(y, labels)
    assert_close(found.margin_mean, margin.mean, rtol=1e-12, atol=0)
    assert_close(found.margin_stddev, margin.stddev, rtol=1e-12, atol=0)
    assert found.rivals.tolist() == [[0, 2, 3], [0, 1, 3], [0, 1, 2]]
    softmax = robustness.expected_softmax(y, generator=generator(5)).probability
    assert_close(found.softmax.probability, softmax, atol=1e-4)
    assert_close(found.entropy, robustness.entropy(found.softmax), rtol=1e-12, atol=0)
    assert_close(
        found.decision_entropy, robustness.entropy(found.probabilities), rtol=1e-12, atol=0
    )
    heat = robustness.sensitivity(model, x, labels)
    assert_close(found.sensitivity, heat, atol=1e-3)
    attack = robustness.adversarial_accuracy(model, x.mean, labels, WIDTH * math.sqrt(6))
    assert_close(found.adversary.margin, attack.margin, atol=1e-12)
    assert found.input_shape == (6,)
    assert found.method == "GaussianLayers()"


def test_the_sampled_check_agrees_with_the_network() -> None:
    model, x = network(6, 30, 4), noisy(2)
    found = analysed(model, x, samples=20_000)
    best = model(x.sample(20_000, generator(7))).argmax(-1)
    shares = torch.stack([(best == c).double().mean(0) for c in range(4)], dim=-1)
    assert_close(found.sampled.probability, shares, atol=0.02)
    kept = found.sampled.probability.gather(-1, found.label[:, None])[:, 0]
    assert_close(found.sampled_misclassification.probability, 1 - kept, atol=0)
    assert_close(found.sampled.probability, found.probabilities.probability, atol=0.05)
    assert_close(
        found.budget_sampled.probability, torch.full((2,), 0.99, dtype=torch.float64), atol=0.02
    )


def test_one_of_a_batch_is_as_if_alone() -> None:
    model, x = network(6, 30, 4), noisy(3)
    found = analysed(model, x)
    one, alone = found[1], analysed(model, x[1])
    assert_close(one.probabilities.probability, alone.probabilities.probability, atol=1e-10)
    assert_close(one.sensitivity, alone.sensitivity, atol=1e-10)
    assert_close(one.budget.level, alone.budget.level, rtol=1e-3)
    assert one.budget.reason == alone.budget.reason
    assert not bool(one.budget.levels.isnan().any())
    assert_close(one.adversary.margin, alone.adversary.margin, atol=1e-10)
    assert_close(one.margin_mean, alone.margin_mean, atol=1e-12)
    assert one.label.shape == ()
    with pytest.raises(IndexError, match="pick one of a batch"):
        found[0, 1]


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_few_classes_go_all_the_way(classes: int) -> None:
    model = network(6, 30, classes)
    found = analysed(model, noisy(), **QUICK)
    assert found.probabilities.probability.shape == (max(2, classes),)
    assert float(found.probabilities.stderr.max()) == 0
    assert found.margin_mean.shape == (max(2, classes) - 1,)
    json.dumps(found.record())


def test_a_record_is_json_with_every_field() -> None:
    found = analysed(network(6, 20, 4), noisy(2))
    told = json.loads(json.dumps(found.record()))
    assert set(told) == {*vars(found), "agrees", "budget_agrees"}
    for name in ("probabilities", "sampled", "softmax"):
        value = getattr(found, name)
        known = {part: values for part, values in vars(value).items() if values is not None}
        assert told[name] == {part: values.tolist() for part, values in known.items()}
    assert told["probabilities"]["assumption"] == [[0.0] * 4] * 2  # they are counted
    assert told["sensitivity"] == found.sensitivity.tolist()
    assert told["budget"]["reason"] == list(found.budget.reason)
    assert told["adversary"]["robust"] == found.adversary.robust.tolist()
    assert told["adversary"]["radius"] == found.adversary.ball.radius.tolist()


def test_a_table_of_one_input_has_a_row_for_each_class() -> None:
    found = analysed(network(6, 20, 4), noisy())
    lines = str(found).splitlines()
    assert lines[0].split() == ["class", "probability", "sampled", "margin", "expected", "softmax"]
    numbers = [int(line.split()[0]) for line in lines[1:5]]
    order = found.probabilities.probability.argsort(descending=True).tolist()
    assert numbers == order
    assert lines[1].split()[1] == "*"
    assert "in 2,000 samples" in str(found)
    assert "99 % noise budget: found" in str(found)
    assert "PGD in the 2-norm" in str(found)
    assert found._repr_html_().count("<tr>") == 5


def test_a_table_of_a_batch_has_a_row_for_each_input() -> None:
    model, x = network(6, 20, 4), noisy(3)
    wrong = (model(x.mean).argmax(-1) + 1) % 4
    text = str(analysed(model, x, wrong, **QUICK))
    assert text.count("misclassified without noise") == 3
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["0", "1", "2"]
    assert "accuracy without noise 0 %" in text
    single = analysed(model, noisy(1), **QUICK)  # a batch of one
    assert str(single).startswith("class")


def saturated() -> tuple[nn.Module, cp.Gaussian]:
    """Two saturated units make logits that are far from Gaussian."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[20.0, 0.0], [0.0, 20.0]]))
        model[2].bias.copy_(torch.tensor([0.5, 0.0, 0.0]))
    mean = torch.tensor([[0.1, 0.1], [0.05, -0.1]]).double()
    return model, cp.Gaussian.isotropic(mean, stddev=0.3, batch_dims=1)


def test_a_budget_that_samples_do_not_bear_out_says_what_they_say() -> None:
    model, x = saturated()
    found = analysed(model, x, probability=0.9, samples=4000, method=cp.GaussianLayers())
    assert found.budget.found.tolist() == [True, True]
    noisy = cp.Gaussian.isotropic(x.mean, stddev=found.budget.stddev, batch_dims=1)
    truth = robustness.sampled_probabilities(model, noisy, 100_000, generator(9)).probability
    kept = truth.gather(-1, found.label[:, None])[:, 0]
    assert found.budget_agrees.tolist() == ((kept - 0.9).abs() < 0.02).tolist()
    assert not bool(found.budget_agrees.all())
    for place in range(2):
        share = 100 * float(found.budget_sampled.probability[place])
        words = f"samples keep it with {share:.2g} %"
        refuted = not bool(found.budget_agrees[place])
        assert (words in str(found[place])) == refuted
        assert (f"at the budget {words}" in str(found).splitlines()[1 + place]) == refuted
        assert found[place].record()["budget_agrees"] == (not refuted)


def test_a_budget_that_samples_bear_out_says_no_more() -> None:
    linear = analysed(network(6, 4), noisy(3), samples=4000, steps=2)
    assert linear.budget.found.tolist() == [True] * 3
    assert linear.budget_agrees.tolist() == [True] * 3
    assert "keep it with" not in str(linear) + str(linear[0])


def test_samples_may_keep_a_label_more_often_than_at_least_or_lose_what_has_no_budget() -> None:
    model, x = network(6, 20, 4), noisy(3)
    wrong = (model(x.mean).argmax(-1) + 1) % 4
    assert analysed(model, x, wrong, **QUICK).budget_agrees.tolist() == [True] * 3

    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x + 1, x], dim=-1)

    kept = analysed(
        shifted, cp.Gaussian.isotropic(torch.zeros(1).double(), stddev=0.5), probability=0.5
    )
    assert kept.budget.bounded.tolist() is True
    assert float(kept.budget_sampled.probability) == 1
    assert kept.budget_agrees.tolist() is True
    fewer = dataclasses.replace(
        kept, budget_sampled=robustness.Probabilities(*torch.tensor([0.4, 0.01]).double())
    )
    assert fewer.budget_remark() == "samples keep it with 40 %"


def test_it_says_where_samples_disagree() -> None:
    found = analysed(*saturated(), 0, method=cp.GaussianLayers())
    assert found.agrees.tolist() == [False, False]
    assert str(found).count("samples disagree") == 2
    assert "more than chance" in str(found[0])
    linear = analysed(network(6, 4), noisy(3), steps=2)
    assert linear.agrees.tolist() == [True] * 3
    assert "disagree" not in str(linear)
    assert "more than chance" not in str(linear[0])


def test_an_input_without_noise_has_no_budget_and_says_so() -> None:
    model, mean = network(6, 20, 4), random_gaussian(2, size=6).mean
    width = torch.tensor([0.0, WIDTH]).double()
    found = analysed(model, cp.Gaussian.isotropic(mean, stddev=width, batch_dims=1), **QUICK)
    first, second = str(found).splitlines()[1:3]
    assert "there is no noise to scale" in first
    assert "there is no noise to scale" not in second
    assert found.budget_sampled.probability[0] == 1
    lines = str(found[0]).splitlines()
    assert "99 % noise budget: there is no noise to scale" in lines
    json.dumps(found.record(), allow_nan=False)


def test_a_label_that_is_never_lost_has_a_bound_in_words() -> None:
    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x + 1, x], dim=-1)

    x = cp.Gaussian.isotropic(torch.zeros(2, 1).double(), stddev=0.5, batch_dims=1)
    found = analysed(shifted, x, steps=2)
    assert " ".join(str(found).split()).count("at least 1,024") == 2
    assert (
        "kept up to the largest level, at least 1,024 times this noise (standard deviation 512"
        in " ".join(str(found[0]).split())
    )


def test_images_batch_norm_and_dense_noise() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ).eval()  # fmt: skip
    before = {name: value.clone() for name, value in model.state_dict().items()}
    matrix = 0.02 * random_gaussian(2, size=16).covariance_matrix.float()
    x = cp.Gaussian(torch.rand(2, 1, 4, 4), matrix)
    found = analysed(model, x, bounds=(0.0, 1.0), norm=math.inf, radius=0.05, steps=5)
    assert found.sensitivity.shape == (2, 1, 4, 4)
    assert found.sensitivity.dtype == torch.float32
    assert found.adversary.ball.norm == math.inf
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "inf-norm" in str(found[0])


def test_other_methods_and_their_mixtures() -> None:
    """Split inputs are closer to sampling than two moments; the result says which method it was."""
    model = network(4, 8, 3)
    x = cp.Gaussian.isotropic(random_gaussian(size=4).mean, stddev=1.5)
    sampled = robustness.sampled_probabilities(model, x, 100_000, generator(3)).probability
    plain, split = (
        analysed(model, x, method=method, steps=2)
        for method in (cp.GaussianLayers(), cp.Split(7, 2))
    )
    errors = [
        float((found.probabilities.probability - sampled).abs().max()) for found in (plain, split)
    ]
    assert errors[1] < 0.7 * errors[0]
    assert split.method == "Split(components=7, directions=2)"
    y = propagate(model, x, cp.Split(7, 2))
    parts = robustness.class_probabilities(y.mixture.components).probability
    expected = (y.mixture.weights[:, None] * parts).sum(0)
    assert_close(split.probabilities.probability, expected, atol=1e-12)
    softmax = robustness.expected_softmax(y.mixture.components, points=2**14).probability
    expected = (y.mixture.weights[:, None] * softmax).sum(0)
    assert_close(split.softmax.probability, expected, atol=1e-4)


def test_it_is_deterministic_and_nothing_global_is_touched() -> None:
    model, x = network(6, 20, 4), noisy(2)
    state = torch.get_rng_state()
    few = {"samples": 200, "steps": 2}
    first, second = analysed(model, x, **few), analysed(model, x, **few)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.record() == second.record()
    assert not any(
        value.requires_grad for value in vars(first).values() if isinstance(value, Tensor)
    )


def test_models_that_draw_or_learn_are_refused() -> None:
    x = noisy()
    with pytest.raises(cp.UnsupportedOperation, match=r"call model\.eval"):
        analysed(nn.Sequential(nn.Dropout(), nn.Linear(6, 2)).double(), x)
    with pytest.raises(cp.UnsupportedOperation, match="batch norm"):
        analysed(nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)).double(), noisy(3))
    with pytest.raises(cp.UnsupportedOperation, match="gives no gradients"):
        analysed(network(6, 2), x, method=cp.MonteCarlo(10))
    with pytest.raises(ValueError, match="does not vary"):
        analysed(network(6, 2), cp.Gaussian.constant(x.mean))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [0.0, 0.1])
def test_probabilities_in_place_of_logits_are_warned_of(dtype: torch.dtype, width: float) -> None:
    logits = network(6, 20, 4).to(dtype)
    model = nn.Sequential(logits, nn.Softmax(dim=-1))
    x = cp.Gaussian.isotropic(random_gaussian(2, size=6).mean.to(dtype), stddev=width, batch_dims=1)
    options = QUICK if dtype == torch.float32 else {"steps": 2}
    with pytest.warns(cp.ApproximationWarning, match="leave the last softmax out") as told:
        found = analysed(model, x, **options)
    assert told[0].filename == __file__
    without = analysed(logits, x, **options)  # which warns of nothing: warnings are errors here
    assert torch.equal(found.predicted, without.predicted)


@pytest.mark.parametrize(
    "last", [nn.Sigmoid(), nn.LogSoftmax(dim=-1), nn.ReLU(), nn.Softplus()], ids=repr
)
def test_other_outputs_are_no_probabilities(last: nn.Module) -> None:
    analysed(nn.Sequential(network(6, 20, 3), last), noisy(2), **QUICK)


def test_logits_that_sum_to_one_at_the_mean_alone_are_logits() -> None:
    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x + 1, x], dim=-1)

    analysed(shifted, cp.Gaussian.isotropic(torch.zeros(1).double(), stddev=0.0), **QUICK)


@pytest.mark.parametrize("samples", [0, -1, 2.0])
def test_samples_are_counted_from_one(samples: object) -> None:
    with pytest.raises(ValueError, match="samples is a whole number from 1"):
        analysed(network(6, 30, 4), noisy(2), samples=samples)


NEED_GRADIENTS = {
    "analyse": lambda model, x: robustness.analyse(model, x, **QUICK),
    "sensitivity": robustness.sensitivity,
    "worst_noise": robustness.worst_noise,
    "adversarial_accuracy": lambda model, x: robustness.adversarial_accuracy(model, x.mean, 0, 0.1),
    "fooling_and_adversary": lambda model, x: robustness.fooling_and_adversary(
        model, x, levels=[0.1], samples=10
    ),
}


@pytest.mark.parametrize("name", NEED_GRADIENTS)
def test_inference_mode_is_refused_but_what_it_made_is_not(name: str) -> None:
    model = network(6, 20, 4)
    with torch.inference_mode():
        x = noisy(2)
        with pytest.raises(cp.UnsupportedOperation, match=rf"robustness\.{name} .*torch\.no_grad"):
            NEED_GRADIENTS[name](model, x)
        budget = robustness.noise_budget(model, x, method=cp.GaussianLayers())
        assert budget.level.shape == (2,)
    assert x.mean.is_inference()
    NEED_GRADIENTS[name](model, x)
    ball = robustness.Ball(0.1)
    assert robustness.worst_noise(model, x, 0, ball, steps=1).shift.shape == (2, 6)


def test_no_inputs_are_refused() -> None:
    model, nothing = network(6, 20, 4), torch.zeros(0, 6).double()
    x = cp.Gaussian.isotropic(nothing, stddev=0.1, batch_dims=1)
    for call in (
        lambda: analysed(model, x),
        lambda: robustness.fooling_rate(model, nothing),
        lambda: robustness.fooling_and_adversary(model, x),
        lambda: robustness.adversarial_accuracy(model, nothing, 0, 0.1),
    ):
        with pytest.raises(ValueError, match=r"no inputs: the batch has shape \(0,\)"):
            call()


def test_a_bar_counts_every_stage_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = network(6, 20, 4), noisy(2)
    silent = analysed(model, x, **QUICK)
    assert capsys.readouterr() == ("", "")
    shown = analysed(model, x, **QUICK, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.split("\r")[-1]
    assert "100%" in last
    assert f"{STAGES}/{STAGES}" in last
    assert shown.record() == silent.record()
