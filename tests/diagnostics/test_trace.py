"""What a trace says of each operation, against propagate and against closed forms."""

import importlib
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.diagnostics.steps import median_and_worst
from tests.architectures import ARCHITECTURES
from tests.layers import propagate
from tests.oracles import assert_close

TRACE = importlib.import_module("covprop.diagnostics.trace")
PLOTS = importlib.import_module("covprop.plots")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def network(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    for layer in layers:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return nn.Sequential(*layers).double().eval().requires_grad_(requires_grad=False)


def isotropic(*shape: int, stddev: float = 0.1, batch_dims: int = 0) -> cp.Gaussian:
    mean = torch.randn(shape, dtype=torch.float64, generator=generator())
    return cp.Gaussian.isotropic(mean, stddev=stddev, batch_dims=batch_dims)


def standard(stddev: float = 1.0) -> cp.Gaussian:
    return cp.Gaussian(torch.zeros(1).double(), torch.full((1, 1), stddev**2).double())


class Residual(nn.Module):
    """Modules, functions, methods, operators, in-place forms, a skip and properties."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})

    def forward(self, x: Any) -> Any:
        y = self.inner["down"](F.relu(self.inner["up"](x), inplace=True))
        y += x
        z = torch.tanh(y).mT
        w = z.clone().tanh_()
        return (2 - z.mT) @ w.view(w.shape)


# What it says without samples.


def test_steps_in_order_with_paths_names_and_shapes() -> None:
    model = network(nn.Linear(4, 6), nn.Sequential(nn.GELU(), nn.Linear(6, 3)), nn.ReLU())
    steps = cp.trace(model, isotropic(4)).steps
    assert [(s.module, s.operation, s.shape) for s in steps] == [
        ("", "input", (4,)),
        ("0", "linear", (6,)),
        ("1.0", "gelu", (6,)),
        ("1.1", "linear", (3,)),
        ("2", "relu", (3,)),
    ]


def test_functions_operators_and_in_place_forms_are_steps_of_the_module_that_calls_them() -> None:
    model = network(Residual())[0]
    steps = cp.trace(model, isotropic(2, 4)).steps
    assert [(s.module, s.operation) for s in steps] == [
        ("", "input"), ("inner.up", "linear"), ("", "relu"), ("inner.down", "linear"), ("", "add"),
        ("", "tanh"), ("", "transpose"), ("", "clone"), ("", "tanh"), ("", "transpose"),
        ("", "rsub"), ("", "reshape"), ("", "matmul"),
    ]  # fmt: skip


@pytest.mark.parametrize("method", [cp.Exact(), cp.Series(order=3), cp.AssumedDensity()], ids=repr)
def test_each_step_is_the_propagation_of_the_layers_so_far(method: Any) -> None:
    model = network(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    x = isotropic(3, 4, stddev=0.5, batch_dims=1)
    steps = cp.trace(model, x, method=method, keep=True).steps
    for depth, step in enumerate(steps):
        expected = propagate(model[:depth], x, method)
        assert step.gaussian is not None
        assert_close(step.mean, expected.mean)
        assert_close(step.variance, expected.variance)
        assert_close(step.gaussian.mean, expected.mean)
        matrix = expected.covariance_matrix
        assert_close(step.gaussian.covariance_matrix, matrix)
        rho = expected.correlation_matrix - torch.eye(matrix.shape[-1]).double()
        assert abs(step.largest_correlation - float(rho.abs().max())) < 1e-12


@pytest.mark.parametrize("name", ["ResNet, basic", "ViT", "LSTM"])
def test_tracing_changes_nothing(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, x = architecture.build(), isotropic(2, *architecture.shape, batch_dims=1)
    with torch.no_grad():
        expected = propagate(model, x)
    trace = cp.trace(model, x)
    assert torch.equal(trace.output.mean, expected.mean)
    assert torch.equal(trace.output.covariance_matrix, expected.covariance_matrix)
    last = trace.steps[-1]
    assert torch.equal(last.mean, expected.mean)
    assert torch.equal(last.variance, expected.variance)


def test_paths_of_a_residual_network() -> None:
    architecture = ARCHITECTURES["ResNet, basic"]
    trace = cp.trace(architecture.build(), isotropic(2, *architecture.shape, batch_dims=1))
    block = [(s.module, s.operation) for s in trace.at("2")]
    assert block == [
        ("2.first.0", "conv2d"), ("2.first.1", "batch_norm"), ("2.first.2", "relu"),
        ("2.second.0", "conv2d"), ("2.second.1", "batch_norm"), ("2.skip.0", "conv2d"),
        ("2.skip.1", "batch_norm"), ("2", "add"), ("2", "relu"),
    ]  # fmt: skip


def test_of_operations_made_of_others_the_outer_one_is_told() -> None:
    lstm = cp.trace(ARCHITECTURES["LSTM"].build(), isotropic(2, 6, 4, batch_dims=1))
    inside = [(s.operation, s.shape) for s in lstm.at("lstm")]
    assert inside == [("lstm 0", (2, 6, 8)), ("lstm 1", (1, 2, 8)), ("lstm 2", (1, 2, 8))]
    assert lstm.at("lstm")[1].mean.shape == (2, 1, 8)  # the batch first
    vit = cp.trace(ARCHITECTURES["ViT"].build(), isotropic(2, 1, 8, 8, batch_dims=1))
    attention = [s.operation for s in vit.at("blocks.0.attention")]
    assert attention == ["transpose", "multi_head_attention_forward", "transpose"]


def test_only_summaries_are_kept_unless_asked() -> None:
    model, x = network(nn.Linear(4, 6), nn.ReLU()), isotropic(4)
    assert all(step.gaussian is None for step in cp.trace(model, x).steps)
    assert all(step.gaussian is not None for step in cp.trace(model, x, keep=True).steps)


def test_the_order_of_a_series_is_its_own_or_what_its_tolerance_needs() -> None:
    model, x = network(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)), isotropic(4)
    assert [s.orders for s in cp.trace(model, x, cp.Series(order=5)).steps] == [(), (), (5,), ()]
    rough, fine = (
        cp.trace(model, x, cp.Series(tolerance=tolerance)).steps[2].orders
        for tolerance in (1e-2, 1e-8)
    )
    assert len(rough) == len(fine) == 1
    assert rough[0] < fine[0]


def test_the_exact_method_tells_which_orders_its_blocks_used() -> None:
    """Weak correlation needs a short series, a strong one longer ones or the direct formula."""
    size = 200

    def orders(rho: float) -> tuple[int, ...]:
        matrix = (1 - rho) * torch.eye(size).double() + rho
        x = cp.Gaussian(torch.linspace(-1, 1, size).double(), matrix)
        (_, step) = cp.trace(torch.relu, x).steps
        return step.orders

    assert orders(1e-3) == (4,)
    assert orders(0.2)[0] > 4
    assert orders(0.999) == (0,)
    (_, small) = cp.trace(torch.relu, isotropic(4)).steps
    assert small.orders == ()  # independent: no pairs
    (_, exponential) = cp.trace(torch.exp, isotropic(4)).steps
    assert exponential.orders == ()


def test_times_add_up_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(TRACE.time, "perf_counter", lambda: float(next(ticks)))
    steps = cp.trace(lambda x: torch.stack(x.chunk(2)).relu(), isotropic(4)).steps
    told = [(s.operation, s.seconds) for s in steps]
    assert told == [
        ("input", 0.0), ("chunk 0", 1.0), ("chunk 1", 0.0), ("stack", 1.0), ("relu", 1.0),
    ]  # fmt: skip


def test_a_wide_streamed_layer_is_traced_too() -> None:
    model = network(nn.Linear(4, 1200), nn.ReLU(), nn.Linear(1200, 2)).float()
    x = isotropic(4).to(torch.float32)
    trace = cp.trace(model, x)
    wide = propagate(model[:2], x)
    rho = wide.correlation_matrix - torch.eye(1200)
    assert abs(trace.steps[2].largest_correlation - float(rho.abs().max())) < 1e-5
    assert trace.steps[2].orders != ()
    assert_close(trace.output.covariance_matrix, propagate(model, x).covariance_matrix)


# With samples.


def moments_of(step: Any) -> tuple[float, float]:
    return float(step.normality.skewness), float(step.normality.excess_kurtosis)


def errors_of_sampling(function: Any, stddev: float, samples: int) -> tuple[float, float]:
    """Standard errors of skewness and kurtosis, from how they spread over 50 runs."""
    runs = []
    for seed in range(50):
        draw = torch.randn(samples, generator=torch.Generator().manual_seed(seed)).double()
        y = function(stddev * draw)
        z = (y - y.mean()) / y.std()
        runs.append((float((z**3).mean()), float((z**4).mean() - 3)))
    spread = torch.tensor(runs).std(0)
    return float(spread[0]), float(spread[1])


def test_the_shape_of_a_relu_is_the_closed_form() -> None:
    """relu(N(0, 1)): E y^k = 1/2 E |x|^k."""
    half = 1 / math.sqrt(2 * math.pi)
    raw = [half, 0.5, 2 * half, 1.5]
    m, v = raw[0], raw[1] - raw[0] ** 2
    third = raw[2] - 3 * m * raw[1] + 2 * m**3
    fourth = raw[3] - 4 * m * raw[2] + 6 * m**2 * raw[1] - 3 * m**4
    trace = cp.trace(torch.relu, standard(), samples=50_000, generator=generator())
    expected = third / v**1.5, fourth / v**2 - 3
    allowed = errors_of_sampling(torch.relu, 1.0, 50_000)
    for found, value, error in zip(moments_of(trace.steps[1]), expected, allowed, strict=True):
        assert abs(found - value) < 5 * error
        assert abs(value) > 10 * error  # a wrong value would be seen


def test_the_shape_of_an_exponential_is_the_closed_form() -> None:
    """The log-normal: (e^v + 2) sqrt(e^v - 1), e^4v + 2 e^3v + 3 e^2v - 6."""
    e = math.exp(0.3**2)
    expected = (e + 2) * math.sqrt(e - 1), e**4 + 2 * e**3 + 3 * e**2 - 6
    trace = cp.trace(torch.exp, standard(0.3), samples=50_000, generator=generator())
    allowed = errors_of_sampling(torch.exp, 0.3, 50_000)
    for found, value, error in zip(moments_of(trace.steps[1]), expected, allowed, strict=True):
        assert abs(found - value) < 5 * error
        assert abs(value) > 10 * error
    assert trace.first_non_gaussian(0.03) is trace.steps[1]


def test_a_linear_network_departs_nowhere() -> None:
    model = network(nn.Linear(4, 30), nn.Linear(30, 5), nn.Linear(5, 2))
    trace = cp.trace(model, isotropic(4, stddev=2.0), samples=20_000, generator=generator())
    for step in trace.steps:
        assert step.normality is not None
        assert float(step.normality.mean_error.abs().max()) < 5 * step.normality.mean_stderr
        ratio = step.normality.variance_error / step.normality.variance_stderr
        assert float(ratio.abs().max()) < 5
        assert float(step.normality.skewness.abs().max()) < 5 * math.sqrt(6 / 20_000)
        assert float(step.normality.excess_kurtosis.abs().max()) < 5 * math.sqrt(24 / 20_000)
        assert float(step.normality.kolmogorov.max()) < 1.5 * step.normality.kolmogorov_noise
    assert trace.first_non_gaussian() is None
    assert trace.first_error() is None
    assert trace.advice == ""
    assert "ControlVariate" not in str(trace)


@pytest.mark.parametrize("samples", [100, 300, 500])
def test_gaussian_steps_are_seldom_called_anything_else(samples: int) -> None:
    """The worst of 120 elements: 5 % by chance; more than 5 of 30 have one of 4e-3."""
    model = network(nn.Linear(20, 50), nn.Linear(50, 50))
    x = cp.Gaussian(torch.zeros(20).double(), torch.eye(20).double())
    called = 0
    for seed in range(30):
        own = torch.Generator().manual_seed(seed)
        called += (
            cp.trace(model, x, samples=samples, generator=own).first_non_gaussian() is not None
        )
    assert called <= 5


@pytest.mark.parametrize("samples", [100, 300])
def test_right_variances_are_seldom_called_wrong(samples: int) -> None:
    """Behind one ReLU they are exact, and some units are rarely active."""
    model = network(nn.Linear(20, 50), nn.ReLU())
    x = isotropic(20, stddev=0.5)
    called = 0
    for seed in range(30):
        own = torch.Generator().manual_seed(seed)
        called += cp.trace(model, x, samples=samples, generator=own).first_error() is not None
    assert called <= 3


@pytest.mark.parametrize("samples", [1, 2, -3, 99, 1e3])
def test_too_few_samples_are_refused(samples: Any) -> None:
    with pytest.raises(ValueError, match="whole number from 100"):
        cp.trace(torch.relu, isotropic(2), samples=samples)


def test_the_covariance_of_the_input_is_factorised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    base = importlib.import_module("covprop.covariance.base")
    original = base.square_root

    def counted(matrix: Tensor) -> Tensor:
        made.append(matrix.shape)
        return original(matrix)

    monkeypatch.setattr(base, "square_root", counted)
    monkeypatch.setattr(TRACE, "CHUNK", 8 * 8 * 50)  # 8 numbers for each sample
    x = cp.Gaussian(torch.zeros(4).double(), torch.eye(4).double() + 0.3)
    trace = cp.trace(torch.relu, x, samples=1000, generator=generator())
    assert made == [(4, 4)]
    assert trace.first_error() is None


def test_where_the_gaussian_fails_is_the_step_that_is_named() -> None:
    """A ReLU at its kink is exact itself, and the square of a copy of it is then off."""
    model = network(nn.Identity())
    trace = cp.trace(
        lambda x: model(x).relu().clone().square(),
        standard(),
        samples=20_000,
        generator=generator(),
    )
    assert [s.operation for s in trace.steps] == ["input", "relu", "clone", "square"]
    bent, wrong = trace.first_non_gaussian(), trace.first_error()
    assert bent is trace.first_departure() is trace.steps[1]  # by its former name, too
    assert bent.departure is bent.normality
    assert wrong is trace.steps[3]
    m, v = 1 / math.sqrt(2 * math.pi), 0.5 - 1 / (2 * math.pi)
    as_if_gaussian, truth = 2 * v**2 + 4 * m**2 * v, 1.5 - 0.25
    found, error = wrong.normality.variance_error, wrong.normality.variance_stderr
    assert abs(float(found) - (as_if_gaussian / truth - 1)) < 5 * float(error)
    foot = " ".join(str(trace).split())
    assert foot.endswith(f"variances are off from there on; {trace.advice}")
    for offer in ("cp.propagate(model, x, method=cp.ControlVariate(10_000))", "cp.Split()"):
        assert offer in trace.advice
    assert trace.to_dict()["advice"] == trace.advice


@pytest.mark.parametrize("name", ["ResNet, basic", "ViT", "LSTM"])
@pytest.mark.parametrize("batched", [True, False])
def test_samples_pass_the_same_operations(name: str, batched: bool) -> None:
    """Every step has its samples, and their mean agrees where the noise is small."""
    architecture = ARCHITECTURES[name]
    model, shape = architecture.build(), (2, *architecture.shape)
    x = isotropic(*shape, stddev=1e-3, batch_dims=1)
    if not batched:  # a batch of one that is part of the event: samples cannot be more of it
        x = isotropic(1, *architecture.shape, stddev=1e-3)
        if name == "ViT":
            x = isotropic(*shape, stddev=1e-3, batch_dims=1)[:1]
    trace = cp.trace(model, x, samples=300, generator=generator())
    for step in trace.steps:
        assert step.normality is not None, step.name
        assert step.normality.samples == 300
        _, worst = median_and_worst(step.normality.mean_error)
        assert worst < 6 * step.normality.mean_stderr, step.name


def test_a_batch_of_one_is_sampled_as_a_larger_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM has no batching rule for vmap, and puts the batch second."""
    runs = []
    one_by_one = TRACE.SampledRuns._one_by_one

    def counted(self: Any, samples: Any) -> Any:
        runs.append(len(samples[0]))
        return one_by_one(self, samples)

    monkeypatch.setattr(TRACE.SampledRuns, "_one_by_one", counted)
    model, x = ARCHITECTURES["LSTM"].build(), isotropic(1, 6, 4, batch_dims=1)
    trace = cp.trace(model, x, samples=300, generator=generator())
    assert runs == [1]  # the one that the batch is checked with
    assert all(step.normality is not None for step in trace.steps)


def test_every_spelling_finds_its_samples() -> None:
    model, x = network(Residual())[0], isotropic(2, 4, stddev=1e-3)
    trace = cp.trace(model, x, samples=500, generator=generator())
    for step in trace.steps:
        assert step.normality is not None, step.name
        _, worst = median_and_worst(step.normality.mean_error)
        assert worst < 6 * step.normality.mean_stderr, step.name


def test_a_function_of_the_users_is_one_step_of_samples_too() -> None:
    @cp.activation
    def swish(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.5 * x)

    trace = cp.trace(lambda x: swish(x) * 2, isotropic(3), samples=400, generator=generator())
    assert [s.operation for s in trace.steps] == ["input", "activated", "mul"]
    assert all(step.normality is not None for step in trace.steps)


def test_constants_of_the_model_are_no_samples() -> None:
    """zeros_like gives a constant: what is made of it is none of the steps."""

    def model(x: Any) -> Any:
        ones = torch.zeros_like(x).exp() * 3
        return x.exp() * ones

    trace = cp.trace(model, isotropic(3, stddev=0.01), samples=400, generator=generator())
    assert [s.operation for s in trace.steps] == ["input", "exp", "mul"]
    for step in trace.steps:
        assert step.normality is not None
        _, worst = median_and_worst(step.normality.mean_error)
        assert worst < 6 * step.normality.mean_stderr


def test_iterating_over_a_tensor_is_one_operation() -> None:
    def model(x: Any) -> Any:
        first, second = x
        return first * x[0] + second

    trace = cp.trace(model, isotropic(2, 3, stddev=0.01), samples=400, generator=generator())
    assert [s.operation for s in trace.steps][:4] == ["input", "unbind 0", "unbind 1", "getitem"]
    for step in trace.steps:
        assert step.normality is not None
        assert median_and_worst(step.normality.mean_error)[1] < 6 * step.normality.mean_stderr


def test_operations_that_samples_call_more_often_are_not_guessed_at() -> None:
    """A model that does something else with plain tensors: those steps have no samples."""

    def model(x: Any) -> Any:
        if not isinstance(x, cp.GaussianTensor):
            x.exp()
        return x.exp() + 1

    trace = cp.trace(model, isotropic(3), samples=100, generator=generator())
    told = [(step.operation, step.normality is not None) for step in trace.steps]
    assert told == [("input", True), ("exp", False), ("add", True)]
    _, _, *below = str(trace.table.below).splitlines()
    assert below[0].split() == ["exp", "-", "-", "-", "-", "-"]


def test_a_model_that_looks_at_the_size_of_its_batch_is_sampled_as_it_is_run() -> None:
    def model(x: Any) -> Any:
        return x * x.shape[0]

    x = isotropic(2, 3, stddev=0.01, batch_dims=1)
    trace = cp.trace(model, x, samples=400, generator=generator())
    normality = trace.steps[-1].normality
    assert normality is not None
    assert float(normality.mean_error.abs().max()) < 6 * normality.mean_stderr


def test_several_inputs_and_constants_beside_them() -> None:
    x, y = isotropic(3), cp.Gaussian.isotropic(torch.ones(3).double(), stddev=0.2)
    trace = cp.trace(
        lambda x, scale, y: x * scale + y, x, torch.arange(3).double(), y=y, samples=500,
        generator=generator(),
    )  # fmt: skip
    names = [(s.operation, s.normality is not None) for s in trace.steps]
    assert names == [("input 0", True), ("input 1", True), ("mul", True), ("add", True)]
    assert trace.first_error() is None


def test_chunks_do_not_change_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk or many, each draw is of the same distribution; counts and errors agree."""
    model, x = network(nn.Linear(4, 6), nn.ReLU()), isotropic(4)
    monkeypatch.setattr(TRACE, "CHUNK", 8 * 16 * 37)  # 16 numbers for each sample
    trace = cp.trace(model, x, samples=1000, generator=generator())
    for step in trace.steps:
        assert step.normality is not None
        assert step.normality.samples == 1000
    assert trace.first_error() is None


def test_a_generator_makes_it_repeatable_and_nothing_global_is_drawn() -> None:
    model, x = network(nn.Linear(4, 6), nn.ReLU()), isotropic(4)
    state = torch.get_rng_state()
    first, second = (
        cp.trace(model, x, samples=200, generator=generator()).to_dict() for _ in range(2)
    )
    for told in (first, second):
        for step in told["steps"]:
            del step["seconds"]
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)


# What it looks like.


def test_the_table_has_a_line_for_each_step() -> None:
    model, x = network(nn.Linear(4, 6), nn.ReLU()), isotropic(4)
    lines = str(cp.trace(model, x)).splitlines()
    assert lines[0].split() == [
        "module", "operation", "shape", "mean", "variance", "largest", "max", "|rho|", "order",
        "time",
    ]  # fmt: skip
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["input", "4"], ["0", "linear"], ["1", "relu"],
    ]  # fmt: skip
    text = str(cp.trace(model, x, samples=300, generator=generator()))
    for word in ("skewness", "kurtosis", "Kolmogorov", "300 samples", "not Gaussian"):
        assert word in text


def test_the_table_fits_a_page_of_a_hundred_characters() -> None:
    model, x = network(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 300), nn.Tanh()), isotropic(4)
    deep = nn.Sequential(nn.Sequential(nn.Sequential(model)))
    trace = cp.trace(deep, x, samples=1_000, generator=generator())
    lines = str(trace).splitlines()
    assert max(map(len, lines)) <= 100
    heads = [line for line in lines if line.startswith("module")]
    assert [head.split()[2] for head in heads] == ["shape", "skewness"]


def test_it_is_json_and_html() -> None:
    model, x = network(nn.Linear(4, 6), nn.ReLU()), isotropic(4)
    trace = cp.trace(model, x, samples=300, generator=generator())
    told = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    assert told["samples"] == 300
    assert [step["operation"] for step in told["steps"]] == ["input", "linear", "relu"]
    assert told["steps"][1]["variance"] == float(trace.steps[1].variance.mean())
    assert trace._repr_html_().count("<tr>") == 8


@pytest.mark.parametrize("samples", [0, 300])
def test_the_figure_has_labelled_axes(samples: int) -> None:
    model, x = network(nn.Linear(4, 6), nn.ReLU()), isotropic(4)
    figure = cp.trace(model, x, samples=samples, generator=generator()).plot()
    assert len(figure.axes) == (4 if samples else 2)
    assert all(axis.get_ylabel() for axis in figure.axes)
    names = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert names == ["input", "0 linear", "1 relu"]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(PLOTS.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install '\.\[plots\]'"):
        cp.trace(torch.relu, isotropic(2)).plot()


def test_what_cannot_be_propagated_is_refused_with_the_module() -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.inv(x)

    with pytest.raises(cp.UnsupportedOperation, match=r"0 \(Odd\)"):
        cp.trace(nn.Sequential(Odd()), isotropic(2, 2))


def test_noise_of_the_model_is_sampled_too() -> None:
    """Dropout in training mode: every sample draws its own mask."""
    model = network(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 2)).train()
    x = isotropic(2, 3, batch_dims=1)
    torch.manual_seed(0)  # dropout draws from there alone
    trace = cp.trace(model, x, samples=4000, generator=generator())
    assert trace.first_error(0.05) is None
    assert all(step.normality is not None for step in trace.steps)


@pytest.mark.parametrize("samples", [0, 100])
def test_nothing_and_what_does_not_vary_can_be_traced(samples: int) -> None:
    model = network(nn.Linear(3, 4), nn.ReLU())
    empty = cp.Gaussian(torch.zeros(0, 3).double(), torch.zeros(0, 3, 3).double())
    point = cp.Gaussian(torch.ones(3).double(), torch.zeros(3, 3).double())
    for x in (empty, point):
        trace = cp.trace(model, x, samples=samples)
        assert len(str(trace).splitlines()) >= 4
        assert json.dumps(trace.to_dict(), allow_nan=False)
        assert trace.plot().axes
        assert trace.first_error() is None


def test_a_method_without_layers_is_refused() -> None:
    with pytest.raises(TypeError, match="samples=10_000"):
        cp.trace(torch.relu, isotropic(2), cp.MonteCarlo(10))


# Gaussians of modules, by their paths.


def prefix(model: nn.Sequential, length: int, x: cp.Gaussian) -> cp.Gaussian:
    with torch.no_grad():
        return propagate(model[:length], x)


@pytest.mark.parametrize("keep", [True, ("3", "1", "4")])
def test_a_module_has_the_gaussian_of_what_it_returns(keep: Any) -> None:
    layers = nn.Linear(4, 6), nn.GELU(), nn.Dropout(), nn.Linear(6, 5), nn.Identity()
    model, x = network(*layers), isotropic(2, 4, batch_dims=1)
    trace = cp.trace(model, x, keep=keep)
    for path, length in (("1", 2), ("3", 4), ("4", 5)):
        expected = prefix(model, length, x)
        assert_close(trace[path].mean, expected.mean)
        assert_close(trace[path].covariance_matrix, expected.covariance_matrix)
    assert set(trace.outputs) == ({"", *"01234"} if keep is True else set(keep))
    assert all((step.gaussian is not None) == (keep is True) for step in trace.steps)


class Twofold(nn.Module):
    """Returns what it made before its last operation, changed in place, beside another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        first = self.layer(x)
        other = self.other(first)
        first += 1
        return {"first": first, "known": torch.ones(1), "pair": (other.relu(), other)}


def test_a_module_is_asked_for_what_it_returns_and_not_for_its_last_operation() -> None:
    model, x = network(Twofold()), isotropic(4)
    returned = cp.trace(model, x, keep="0")["0"]
    layer = propagate(model[0].layer, x)
    other = propagate(lambda y: model[0].other(model[0].layer(y)), x)
    assert_close(returned["first"].mean, layer.mean + 1)
    assert_close(returned["first"].covariance_matrix, layer.covariance_matrix)
    assert torch.equal(returned["known"], torch.ones(1))
    assert_close(returned["pair"][1].covariance_matrix, other.covariance_matrix)
    assert_close(returned["pair"][0].mean, propagate(torch.relu, other).mean)
    whole = cp.trace(model, x, keep=True)
    assert_close(whole["0.layer"].mean, layer.mean)  # before it was changed in place
    assert_close(whole["0"]["first"].mean, layer.mean + 1)


def test_an_lstm_has_all_that_it_returns() -> None:
    trace = cp.trace(
        ARCHITECTURES["LSTM"].build(), isotropic(2, 6, 4, batch_dims=1), keep=["lstm", ""]
    )
    sequence, (hidden, cell) = trace["lstm"]
    assert sequence.mean.shape == (2, 6, 8)
    assert_close(sequence.mean[:, -1], hidden.mean[:, 0])  # the batch first
    assert not torch.equal(hidden.mean, cell.mean)
    assert_close(trace[""].covariance_matrix, trace.output.covariance_matrix)


def test_a_module_that_has_no_gaussian_is_a_sentence() -> None:
    twice = nn.Linear(4, 4)
    model, x = network(twice, nn.ReLU(), twice), isotropic(4)
    with pytest.raises(ValueError, match=r"give cp\.trace keep=True"):
        cp.trace(model, x)["0"]
    with pytest.raises(ValueError, match=r"'5' is none; there are '', '0', '1'"):
        cp.trace(model, x, keep="5")
    with pytest.raises(ValueError, match="a function has no modules"):
        cp.trace(torch.relu, x, keep="0")
    trace = cp.trace(model, x, keep=("0", "1"))
    with pytest.raises(ValueError, match="no output of a module '' was kept; there are '0', '1'"):
        trace[""]
    with pytest.raises(ValueError, match="the module '0' was called 2 times"):
        trace["0"]
    assert len(trace.outputs["0"]) == 2


class Refusing(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.fft.fft(x)


def test_no_hook_is_left() -> None:
    hooks = nn.modules.module._global_forward_hooks
    before = dict(hooks)
    with pytest.raises(cp.UnsupportedOperation):
        cp.trace(network(nn.Linear(4, 4), Refusing()), isotropic(4), keep=True)
    assert dict(hooks) == before
