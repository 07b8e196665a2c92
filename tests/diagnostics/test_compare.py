"""What a comparison says, against figures made by hand and networks whose moments are known."""

import importlib
import json
import math
import re
import time
from typing import Any

import pytest
import torch
from torch import nn

import covprop as cp
from covprop.diagnostics.compare import METHODS, PeakTensors, footprint, method_name
from covprop.diagnostics.comparison import Agreement, Reference, wasserstein_of_sampling
from covprop.diagnostics.verdict import Grade
from covprop.error_estimate import SamplingError
from tests.layers import propagate
from tests.oracles import assert_close

COMPARE = "covprop.diagnostics.compare"
PLOTS = importlib.import_module("covprop.plots")
FINE = "within sampling error"
SE = "standard errors"
MEANS = "means 0.05 standard deviations off"
CPU = torch.device("cpu")
KILO = 1000 * 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    for layer in layers:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return nn.Sequential(*layers).double().eval().requires_grad_(requires_grad=False)


def gaussian(*batch: int, size: int = 3, stddev: float = 0.5) -> cp.Gaussian:
    factor = torch.randn((*batch, size, size), dtype=torch.float64, generator=generator()) * stddev
    mean = torch.randn((*batch, size), dtype=torch.float64, generator=generator(1)) + 2
    return cp.Gaussian(mean, factor @ factor.mT)


def relu_network() -> nn.Sequential:
    return network(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 2))


def compare(*args: Any, **kwargs: Any) -> cp.Comparison:
    kwargs.setdefault("generator", generator())
    return cp.compare(*args, show=False, **kwargs)


def by_hand(found: cp.Gaussian, truth: cp.Gaussian, samples: int = 10_000) -> Any:
    """Figures for a sampled Gaussian whose standard errors are 1 % of each entry, or 0.01."""
    error = SamplingError(
        samples, torch.full_like(truth.mean, 0.01), 0.01 * truth.covariance_matrix.abs()
    )
    sampled = cp.Gaussian(truth.mean, truth.covariance, sampling=error)
    reference = Reference.of(sampled, 1.0, 10, cp.MonteCarlo())
    return reference, Agreement.of(found, reference)


# Figures by hand.


def test_every_figure_of_two_outputs() -> None:
    truth = cp.Gaussian(
        torch.tensor([2.0, -1.0]).double(), torch.diag(torch.tensor([4.0, 1.0])).double()
    )
    found = cp.Gaussian(
        torch.tensor([2.2, -1.0]).double(), torch.diag(torch.tensor([5.0, 1.0])).double()
    )
    reference, agreement = by_hand(found, truth)
    close = torch.tensor
    assert_close(agreement.mean_ratio, close([1.1, 1.0]).double(), rtol=1e-6)
    assert_close(agreement.variance_ratio, close([1.25, 1.0]).double())
    assert_close(agreement.mean_error, close([0.1, 0.0]).double(), atol=1e-6)
    assert_close(agreement.covariance_error, close(1 / math.sqrt(17)).double(), rtol=1e-6)
    width = (math.sqrt(5) - 2) ** 2
    assert_close(agreement.wasserstein, close(math.sqrt(0.2**2 + width)).double(), rtol=1e-6)
    ratio = 4 / 5
    kl = (ratio - 1 - math.log(ratio) + 0.2**2 / 5) / 2
    assert_close(agreement.kl, close(kl).double(), rtol=1e-5)  # 2.2 is a float32
    assert agreement.verdict == (
        "standard deviations 12 % off (20 standard errors), "
        "means 0.1 standard deviations off (18 standard errors)"
    )
    assert_close(reference.mean_ratio, close([0.005, 0.01]).double(), rtol=1e-6)
    assert_close(reference.variance_ratio, close([0.01, 0.01]).double(), rtol=1e-6)
    assert_close(reference.mean_error, close([0.005, 0.01]).double(), rtol=1e-6)
    assert_close(reference.covariance_error, close(0.01).double(), rtol=1e-6)


@pytest.mark.parametrize(
    ("shift", "scale", "across", "verdict"),
    [
        (0.0, 1.0, 0.0, FINE),
        (0.02, 1.02, 0.0, FINE),
        (0.05, 1.0, 0.0, f"{MEANS} (5 {SE})"),
        (0.0, 1.05, 0.0, f"standard deviations 2.5 % off (4.8 {SE})"),
        (0.05, 0.9, 0.0, f"standard deviations 5.1 % off (10 {SE}), {MEANS} (5 {SE})"),
        (0.0, 1.0, 0.05, f"covariance 4.5 % off (10 {SE})"),
    ],
)
def test_the_verdict_names_what_sampling_does_not_explain(
    shift: float, scale: float, across: float, verdict: str
) -> None:
    """One output is off, or the covariance of two; one standard error is 1 %."""
    matrix = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double()
    truth = cp.Gaussian(torch.tensor([1.0, 1.0]).double(), matrix)
    changed = matrix.clone()
    changed[0, 0] *= scale
    changed[0, 1] += across
    changed[1, 0] += across
    found = cp.Gaussian(torch.tensor([1.0 + shift, 1.0]).double(), changed)
    _, agreement = by_hand(found, truth)
    assert agreement.verdict == verdict


def test_errors_that_only_show_together_are_told_apart() -> None:
    """Two outputs of correlation 0.999: their difference has half the variance it should have."""

    def pair(correlation: float) -> cp.Gaussian:
        matrix = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=torch.float64)
        return cp.Gaussian(torch.ones(2, dtype=torch.float64), matrix)

    _, agreement = by_hand(pair(0.9995), pair(0.999), samples=20_000)
    ratios = torch.tensor([2.0, 1.999 / 1.9995])
    expected = float((ratios - 1 - ratios.log()).sum() / 2) / (2 * 5 / (4 * 20_000))
    (told,) = [float(word) for word in agreement.verdict.split() if word[0].isdigit()]
    assert agreement.verdict.startswith(f"{FINE} in each moment, but not in all together (KL")
    assert abs(told / expected - 1) < 0.05  # two digits


def test_a_mean_that_samples_do_not_tell_from_zero_has_no_ratio() -> None:
    truth = cp.Gaussian(torch.tensor([0.05, 1.0]).double(), torch.eye(2).double())
    found = cp.Gaussian(torch.tensor([0.06, 1.01]).double(), torch.eye(2).double())
    reference, agreement = by_hand(found, truth)
    assert agreement.mean_ratio.isnan().tolist() == [True, False]
    assert reference.mean_ratio.isnan().tolist() == [True, False]


def test_an_output_that_should_not_vary_is_infinitely_off() -> None:
    still = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double()
    truth = cp.Gaussian(torch.ones(2).double(), still)
    varying = cp.Gaussian(torch.ones(2).double(), torch.diag(torch.tensor([1.0, 1e-3])).double())
    _, agreement = by_hand(varying, truth)
    assert agreement.verdict == "standard deviations off where samples do not vary"
    assert agreement.variance_ratio.isnan().tolist() == [False, True]
    assert float(agreement.kl) == math.inf
    _, same = by_hand(truth, truth)
    assert same.verdict == FINE
    assert float(same.kl) == 0


def test_what_sampling_does_to_the_distances_is_what_samples_do() -> None:
    """W2 and KL of a Gaussian to its own sampled moments, averaged over 400 runs."""
    x = gaussian(size=3)
    count, runs = 500, 400
    draws = x.sample(count * runs, generator(5)).reshape(runs, count, 3)
    mean = draws.mean(1)
    centred = draws - mean[:, None]
    sampled = cp.Gaussian(mean, centred.mT @ centred / (count - 1))
    truth = cp.Gaussian(x.mean.expand(runs, 3), x.covariance_matrix.expand(runs, 3, 3))
    squares = cp.wasserstein_distance(sampled, truth).square()
    values = torch.linalg.eigvalsh(x.covariance_matrix)
    expected = wasserstein_of_sampling(values, count).square()
    error = float(squares.std()) / math.sqrt(runs)
    assert abs(float(squares.mean() - expected)) < 5 * error + 0.02 * float(expected)  # 2nd order
    divergence = cp.kl_divergence(sampled, truth)
    error = float(divergence.std()) / math.sqrt(runs)
    expected_kl = 3 * 6 / (4 * count)
    assert abs(float(divergence.mean()) - expected_kl) < 5 * error + 0.02 * expected_kl


# Whole runs.


def test_every_method_agrees_on_a_linear_network() -> None:
    model = network(nn.Linear(3, 8), nn.Linear(8, 2))
    comparison = compare(model, gaussian(), samples=20_000)
    told = {row.name: row for row in comparison.rows}
    for name in ("GaussianLayers()", "Series(order=4)", "Linearized()", "Unscented()", "Wu2019()"):
        agreement = told[name].agreement
        assert agreement is not None, told[name].refusal
        assert agreement.verdict == FINE
        error = comparison.reference.variance_ratio
        assert bool(((agreement.variance_ratio - 1).abs() < 5 * error).all())
    assert "refused" in str(comparison)
    assert told["PiecewiseLinear()"].agreement is None
    assert "ReLU" in told["PiecewiseLinear()"].refusal


def test_a_wrong_method_is_found_out() -> None:
    comparison = compare(relu_network(), gaussian(stddev=1.5), samples=20_000)
    linearised = comparison["Linearized()"].agreement
    assert linearised is not None
    assert linearised.grade is Grade.WRONG
    exact = comparison["GaussianLayers()"].agreement
    assert exact is not None
    assert float(exact.wasserstein) < float(linearised.wasserstein)
    assert float(exact.kl) < float(linearised.kl)


def test_a_right_method_is_seldom_called_wrong() -> None:
    """Correlated ReLUs, which are not Gaussian and whose moments Exact has: 1 % by chance."""
    x = cp.Gaussian(torch.tensor([0.0, 0.5, -0.3]).double(), gaussian().covariance_matrix)
    methods = [cp.Exact()]
    wrong = [
        compare(torch.relu, x, methods=methods, samples=2000, generator=generator(seed)).rows[0]
        for seed in range(50)
    ]
    called = sum(row.agreement is not None and row.agreement.verdict != FINE for row in wrong)
    assert called <= 4  # of 50 where 1 in 100 is expected: 4 have a chance of 2e-4 to be exceeded


def test_a_method_off_by_five_standard_errors_is_always_called_wrong() -> None:
    x = gaussian()
    slight = {"wrong": cp.Exact(activations={torch.relu: cp.activations.Quadrature(
        lambda y: 1.05 * torch.relu(y), (0.0,))})}  # fmt: skip
    for seed in range(5):
        row = compare(torch.relu, x, methods=slight, samples=20_000, generator=generator(seed))
        agreement = row["wrong"].agreement
        assert agreement is not None
        assert agreement.grade.rank >= Grade.MODERATE.rank


def test_a_batch_has_figures_of_its_own_for_each_element() -> None:
    model, x = relu_network(), gaussian(4)
    comparison = compare(model, x, methods=[cp.Exact()], samples=2000)
    (row,) = comparison.rows
    found = row.agreement
    assert found is not None
    assert found.mean_ratio.shape == found.variance_ratio.shape == (4, 2)
    assert found.covariance_error.shape == found.wasserstein.shape == found.kl.shape == (4,)
    assert row.gaussian is not None
    expected = propagate(model, x)
    assert_close(row.gaussian.mean, expected.mean)
    truth = comparison.reference.gaussian
    assert_close(found.mean_ratio, expected.mean / truth.mean)
    assert_close(found.wasserstein[2], cp.wasserstein_distance(expected[2], truth[2]))
    assert_close(found.kl[1], cp.kl_divergence(truth[1], expected[1]))


def test_the_reference_is_monte_carlo_with_the_users_samples_and_generator() -> None:
    model, x = relu_network(), gaussian()
    comparison = compare(model, x, methods=[cp.Exact()], samples=3000)
    expected = propagate(model, x, method=cp.MonteCarlo(3000, generator()))
    assert torch.equal(comparison.reference.gaussian.mean, expected.mean)
    assert comparison.reference.samples == 3000
    assert_close(comparison.reference.mean_error, expected.mean_stderr / expected.stddev)


def test_names_tell_what_was_set() -> None:
    names = [cp.Exact(), cp.Series(order=3), cp.Series(tolerance=1e-3, exact_variance=False),
             cp.MonteCarlo(100, generator()), cp.Split(5), cp.Split(base=cp.Linearized()),
             cp.ControlVariate(200, cp.Series(order=3), generator())]  # fmt: skip
    assert [method_name(method) for method in names] == [
        "GaussianLayers()", "Series(order=3)", "Series(tolerance=0.001, exact_variance=False)",
        "MonteCarlo(samples=100)", "Split(components=5)", "Split(base=Linearized())",
        "ControlVariate(samples=200, base=Series(order=3))",
    ]  # fmt: skip
    comparison = compare(torch.relu, gaussian(), methods={"mine": cp.Exact()}, samples=100)
    assert comparison["mine"].method == cp.Exact()
    with pytest.raises(KeyError, match="none of mine"):
        comparison["GaussianLayers()"]


def test_several_inputs_and_named_ones() -> None:
    x, y = gaussian(), gaussian(stddev=0.2)
    comparison = compare(
        lambda x, scale, y: scale * x + y, x, 2.0, y=y, methods=[cp.Exact()], samples=5000
    )
    (row,) = comparison.rows
    assert row.agreement is not None
    assert row.agreement.verdict == FINE


def test_costs_are_measured() -> None:
    comparison = compare(relu_network(), gaussian(), methods=[cp.Exact()], samples=2000)
    (row,) = comparison.rows
    assert row.seconds > 0
    assert row.peak_bytes >= 2 * 8 * 20**2  # the covariances before and after the first ReLU
    assert comparison.reference.peak_bytes >= 2000 * 2 * 8


def test_nothing_global_is_drawn_with_a_generator() -> None:
    model = relu_network()
    state = torch.get_rng_state()
    compare(model, gaussian(), samples=100)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_that_returns_a_nest_is_refused_before_it_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{COMPARE}.timed", lambda *_: pytest.fail("it was sampled"))
    with pytest.raises(TypeError, match="one tensor"):
        compare(lambda x: (x, x), gaussian(), samples=10_000)


def test_methods_in_the_wrong_place_are_told_where_they_belong() -> None:
    x = gaussian()
    for inputs, named in (((x, cp.Exact()), {}), ((x, [cp.Exact()]), {}), ((x, cp.Series), {}),
                          ((x,), {"method": cp.Exact()})):  # fmt: skip
        with pytest.raises(TypeError, match=r"compare takes methods as methods=\[cp\."):
            compare(torch.relu, *inputs, samples=10, **named)


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ([cp.Exact], r"write cp.GaussianLayers\(\)"),
        (cp.Exact, r"write cp.GaussianLayers\(\)"),
        ({"a": cp.Exact}, r"write cp.GaussianLayers\(\)"),
        (3, r"a method is an object such as cp.GaussianLayers\(\)"),
    ],
)
def test_what_is_no_method_is_refused(methods: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        compare(torch.relu, gaussian(), methods=methods, samples=10)


def test_methods_have_names() -> None:
    found = compare(torch.relu, gaussian(), methods=["exact", "series:4"], samples=100)
    assert [row.method for row in found.rows] == [cp.GaussianLayers(), cp.Series(order=4)]
    with pytest.raises(ValueError, match="'exakt' is no method; there are auto"):
        compare(torch.relu, gaussian(), methods="exakt", samples=100)


def test_one_method_need_not_be_a_list() -> None:
    (row,) = compare(torch.relu, gaussian(), methods=cp.Exact(), samples=100).rows
    assert row.name == "GaussianLayers()"


def test_methods_of_one_name_are_numbered() -> None:
    methods = [cp.Exact(), cp.MonteCarlo(50), cp.Exact(), cp.Exact()]
    rows = compare(torch.relu, gaussian(), methods=methods, samples=100).rows
    assert [row.name for row in rows] == [
        "GaussianLayers()", "MonteCarlo(samples=50)", "GaussianLayers() 2", "GaussianLayers() 3"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_a_method_that_fails_does_not_stop_the_others(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise kind("the weights do not add up\nfor long")

    monkeypatch.setattr(cp.Unscented, "estimate", fail)
    failed, fine = compare(
        torch.relu, gaussian(), methods=[cp.Unscented(), cp.Exact()], samples=100
    ).rows
    assert failed.refusal == "the weights do not add up"
    assert fine.agreement is not None


def test_a_control_variate_is_a_reference_worth_many_more_samples() -> None:
    model = network(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    x = cp.Gaussian(gaussian().mean, 0.01 * gaussian().covariance_matrix)
    reference = cp.ControlVariate(512, generator=generator())
    quick = cp.compare(model, x, methods=cp.Exact(), reference=reference, show=False)
    plain = cp.compare(model, x, methods=cp.Exact(), samples=512, generator=generator(), show=False)
    assert quick.reference.name == "ControlVariate(512)"
    assert "\nControlVariate(512): its own standard errors" in str(quick)
    assert "Monte" not in str(quick)
    assert quick.reference.samples == plain.reference.samples == 512
    for figure in ("mean_error", "variance_ratio", "covariance_error", "wasserstein"):
        ours, theirs = (getattr(one.reference, figure).mean() for one in (quick, plain))
        assert float(ours) < 0.5 * float(theirs)
    assert torch.equal(quick.reference.kl, plain.reference.kl)  # of what hardly varies, no better


def test_a_reference_that_does_not_sample_is_refused() -> None:
    with pytest.raises(TypeError, match="reference samples"):
        cp.compare(torch.relu, gaussian(), reference=cp.Exact())  # type: ignore[arg-type]


# What to do about it.


def offered(table: str) -> str:
    """The call in the foot of a table."""
    (call,) = re.findall(r"cp\.propagate\(.*?\(.*?\)\)", table)
    return str(call)


def test_what_is_offered_where_methods_are_off_is_right() -> None:
    model, x = relu_network(), gaussian(stddev=1.5)
    comparison = compare(model, x, methods=cp.Exact(), samples=75_000)
    table, truth = str(comparison), comparison.reference.gaussian
    assert table.startswith("GaussianLayers() is a few percent off: standard deviations 6.")
    assert "\nadvice: unbiased moments" in table
    assert table.endswith("method=cp.Split()")
    torch.manual_seed(0)
    y = eval(offered(table), {"cp": cp, "model": model, "x": x})
    error = (y.covariance_stderr.square() + truth.covariance_stderr.square()).sqrt()
    assert bool(((y.covariance_matrix - truth.covariance_matrix).abs() < 5 * error).all())
    told = comparison.to_dict()["rows"][0]["advice"]
    assert " ".join(table.split()).endswith(told)


def test_a_split_that_was_tried_is_not_offered_again() -> None:
    methods = [cp.GaussianLayers(), cp.Split()]
    table = str(compare(relu_network(), gaussian(stddev=1.5), methods=methods, samples=75_000))
    assert "Split()" in table
    assert "\nadvice: " in table
    assert "method=cp.Split()" not in table


def test_a_method_that_is_right_is_named_to_who_asks_for_one_that_is_not() -> None:
    methods = [cp.Linearized(), cp.Exact()]
    comparison = compare(torch.relu, gaussian(stddev=1.5), methods=methods, samples=20_000)
    assert str(comparison).startswith("Linearized() is wrong: standard deviations ")
    assert "\nadvice: GaussianLayers() is within sampling error; unbiased" in str(comparison)
    assert "method=cp.Split()" not in str(comparison)
    assert comparison.advice(comparison["GaussianLayers()"]) == ""
    assert "advice" not in str(compare(torch.relu, gaussian(), methods=cp.Exact(), samples=2000))


def test_a_split_is_compared_by_object_and_by_name() -> None:
    methods = {"five parts": cp.Split(5), "two ways": cp.Split(directions=2)}
    named = compare(relu_network(), gaussian(), methods=methods, samples=2000)
    bare = compare(relu_network(), gaussian(), methods=list(methods.values()), samples=2000)
    assert [row.name for row in bare.rows] == ["Split(components=5)", "Split(directions=2)"]
    for ours, theirs in zip(named.rows, bare.rows, strict=True):
        assert ours.gaussian is not None
        assert theirs.gaussian is not None
        assert torch.equal(ours.gaussian.covariance_matrix, theirs.gaussian.covariance_matrix)
    assert named["five parts"].method == cp.Split(5)


# What it looks like.


def test_it_prints_unless_told_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = cp.compare(torch.relu, gaussian(), samples=100, generator=generator())
    assert capsys.readouterr().out == f"{comparison}\n"
    cp.compare(torch.relu, gaussian(), samples=100, generator=generator(), show=False)
    assert capsys.readouterr().out == ""


def test_the_table_has_a_line_for_each_method_and_each_refusal() -> None:
    comparison = compare(network(nn.Linear(3, 2)), gaussian(), samples=500)
    text = str(comparison)
    assert text.startswith(f"Auto() is {FINE} (standard errors: standard deviations ")
    lines = text[text.index("method ") :].splitlines()
    assert lines[0].split() == ["method", "verdict", "std", "(s.e.)", "mean", "(s.e.)", "cov.",
                                "KL", "time", "memory"]  # fmt: skip
    assert lines[1].split()[:4] == ["MonteCarlo(500)", "the", "reference", "±"]
    assert [line.split()[0] for line in lines[2 : 2 + len(comparison.rows)]] == [
        row.name for row in comparison.rows
    ]
    assert lines[-2].startswith("PiecewiseLinear() refused: ")


def test_methods_that_refuse_for_one_reason_share_a_line() -> None:
    methods = [cp.Exact(), cp.Linearized(), cp.Series(order=4)]
    text = str(compare(torch.lgamma, gaussian(stddev=0.1), methods=methods, samples=100))
    assert text.startswith("Linearized() is ")
    assert "\nGaussianLayers(), Series(order=4) refused: covprop has no rule" in text


class Long(nn.Module):
    """A network with a path of modules that fills a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({"a_block_of_layers_with_a_long_name": nn.Linear(3, 2)})
        self.encoder_of_the_first_stage_of_the_whole_pipeline = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (layer,) = self.encoder_of_the_first_stage_of_the_whole_pipeline.values()
        return torch.lgamma(layer(x).square() + 1)


def cancelling(x: torch.Tensor) -> torch.Tensor:
    """Two branches that nearly cancel, which variances alone miss by factors."""
    return torch.relu(x) - torch.relu(x + 1e-6)


WIDE_MODELS = {
    "ReLU": (relu_network(), 0.5), "linear": (network(nn.Linear(3, 2)), 1e-9),
    "without a rule": (Long().double().requires_grad_(requires_grad=False), 0.5),
    "off by factors": (cancelling, 3.0), "huge": (lambda x: 1e120 * torch.relu(x), 1e-3),
    "still": (lambda x: 0 * x, 1.0), "cubes": (lambda x: (x**3).softmax(-1), 3.0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.parametrize(
    ("name", "samples"),
    [
        *((name, 200) for name in WIDE_MODELS),
        ("off by factors", 2),
        *((name, samples) for name in ("ReLU", "huge", "cubes") for samples in (2, None)),
    ],
)
def test_no_line_is_wider_than_a_hundred_columns(name: str, samples: int | None) -> None:
    model, stddev = WIDE_MODELS[name]
    methods: dict[str, Any] = {method_name(method): method for method in METHODS}
    methods["a" * 150] = cp.Linearized()
    methods["control by a Series of low order with samples " * 3] = cp.MonteCarlo(50, generator())
    base = cp.ControlVariate(200, cp.Series(order=3), generator())
    methods[method_name(base)] = base
    comparison = compare(model, gaussian(stddev=stddev), methods=methods, samples=samples)
    lines = str(comparison).splitlines()
    assert max(map(len, lines)) <= 100
    assert all("\0" not in line for line in lines)


def test_the_verdict_comes_first_and_the_advice_last_in_text_and_html() -> None:
    methods = [cp.Linearized(), cp.Exact()]
    comparison = compare(relu_network(), gaussian(stddev=1.5), methods=methods, samples=20_000)
    text, page = " ".join(str(comparison).split()), comparison._repr_html_()
    advice = comparison.advice(comparison.rows[0])
    assert text.startswith(comparison.headline)
    assert text.endswith(f"advice: {advice}")
    assert page.startswith(f"<p>{comparison.headline}</p><table>")
    assert page.endswith(f"advice: {advice}</p>")
    assert comparison.to_dict()["verdict"] == comparison.headline
    assert [row["grade"] for row in comparison.to_dict()["rows"]] == ["wrong", "wrong"]


def test_a_small_error_is_not_called_off() -> None:
    """Half a percent in every standard deviation, which a control variate sees clearly."""
    slightly = cp.activations.Quadrature(lambda y: 1.005 * torch.tanh(y))
    model = network(nn.Linear(3, 3, bias=False), nn.Tanh())
    x = cp.Gaussian.isotropic(torch.zeros(3).double(), stddev=0.05)
    methods = {"mine": cp.GaussianLayers(activations={torch.tanh: slightly})}
    comparison = compare(model, x, methods=methods, reference=cp.ControlVariate(20_000))
    agreement = comparison["mine"].agreement
    assert agreement is not None
    assert agreement.grade is Grade.SMALL
    assert comparison.headline.startswith("mine is less than 1 % off: standard deviations 0.5")
    assert "\nadvice: if that matters, unbiased" in str(comparison)


def test_a_comparison_of_nothing_says_so() -> None:
    assert str(compare(torch.relu, gaussian(), methods=[], samples=100)).startswith("no method")
    refused = compare(network(nn.Linear(3, 2)), gaussian(), methods=cp.PiecewiseLinear(),
                      samples=100)  # fmt: skip
    assert refused.headline == "every method refused"


def test_it_is_json_and_html() -> None:
    comparison = compare(relu_network(), gaussian(), samples=500)
    told = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert told["reference"]["samples"] == 500
    first, agreement = told["rows"][0], comparison.rows[0].agreement
    assert agreement is not None
    assert first["name"] == "Auto()"
    assert first["variance_ratio"]["values"] == agreement.variance_ratio.tolist()
    assert first["variance_ratio"]["average"] == float(agreement.variance_ratio.mean())
    assert first["verdict"] == agreement.verdict
    assert comparison._repr_html_().count("<tr>") == 2 + len(comparison.rows)


def test_the_figure_has_labelled_axes_and_the_methods() -> None:
    comparison = compare(network(nn.Linear(3, 2)), gaussian(), samples=500)
    figure = comparison.plot()
    panels = [axis for axis in figure.axes if axis.axison]
    labels = [axis.get_xlabel() for axis in panels]
    assert len(labels) == 7
    assert all(labels)
    (distances,) = (axis for axis in panels if axis.get_xlabel().startswith("W2"))
    marks = [line.get_xdata()[0] for line in distances.lines[:-1]]
    rows = [row.agreement for row in comparison.rows if row.agreement is not None]
    assert marks == [float(agreement.wasserstein) for agreement in rows]
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [row.name for row in comparison.rows if row.agreement is not None]


def test_a_figure_can_show_an_infinite_divergence_and_no_row_at_all() -> None:
    repeated = compare(lambda x: torch.cat([x, x]), gaussian(), methods=[cp.AssumedDensity()],
                       samples=100)  # fmt: skip
    assert repeated.plot().axes
    assert compare(torch.relu, gaussian(), methods=[], samples=100).plot().axes


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    comparison = compare(torch.relu, gaussian(), methods=[cp.Exact()], samples=100)
    monkeypatch.setattr(PLOTS.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install '\.\[plots\]'"):
        comparison.plot()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_through_a_transformer_layer_is_compared(dtype: torch.dtype) -> None:
    layer = network(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True))[0].to(dtype)
    mean = torch.randn((2, 4, 6), generator=generator()).to(dtype)
    x = cp.Gaussian.isotropic(mean, stddev=1e-2, batch_dims=1)
    methods = [cp.Linearized(), cp.Unscented()]
    result = compare(layer, x, methods=methods, samples=300)
    assert [row.refusal for row in result.rows] == ["", ""]


def test_points_that_are_nowhere_are_a_refusal_among_others() -> None:
    methods = [cp.Unscented(kappa=-5), cp.Exact()]
    rows = compare(nn.ReLU(), gaussian(), methods=methods, samples=100).rows
    assert "n + kappa must be positive" in rows[0].refusal
    assert rows[1].refusal == ""


# Memory and time of a call.


def of_size(kilos: int) -> torch.Tensor:
    return torch.zeros(1000 * kilos, dtype=torch.float64)


def peak(function: object) -> int:
    with PeakTensors() as counted:
        function()  # type: ignore[operator]
    return counted.most


def test_tensors_that_live_together_count_together() -> None:
    def both() -> None:
        first = of_size(3)
        second = of_size(5)
        del first, second

    def in_turn() -> None:
        for _ in range(4):
            of_size(5)

    assert peak(both) == 8 * KILO
    assert peak(in_turn) == 5 * KILO


def test_views_and_in_place_operations_make_nothing() -> None:
    given = of_size(4)

    def use() -> None:
        given.view(2, -1).t()[0].mul_(2).add_(1)
        given.reshape(-1)[::2].zero_()

    assert peak(use) == 0


def test_what_is_returned_is_counted_and_what_was_there_is_not() -> None:
    given = of_size(7)
    found = footprint(lambda: given + 1, CPU)
    assert found.peak_bytes == 7 * KILO
    assert torch.equal(found.result, given + 1)


def test_vectorised_functions_are_seen_inside() -> None:
    samples = torch.zeros(10, 1000, dtype=torch.float64)
    assert peak(lambda: torch.func.vmap(torch.exp)(samples)) == 10 * KILO


def test_a_brief_call_is_timed_without_the_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    footprint(lambda: calls.append(1), CPU)
    assert len(calls) == 2
    footprint(lambda: calls.append(1), CPU, repeat=False)
    assert len(calls) == 3
    monkeypatch.setattr(f"{COMPARE}.BRIEF", 0.01)
    long = footprint(lambda: (calls.append(1), time.sleep(0.03)), CPU)
    assert len(calls) == 4
    assert 0.03 <= long.seconds < 3
