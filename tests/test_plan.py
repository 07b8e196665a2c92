"""What a propagation will take, told before: sizes, memory, refusals, a bar."""

import gc
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.activations.moments import hermite_basis
from covprop.carriers import cross_covariance
from covprop.covariance import LinearMap
from covprop.methods import planning
from covprop.methods.plan import TYPICAL
from tests.architectures import ARCHITECTURES
from tests.layers import joint, propagate
from tests.oracles import assert_close
from tests.registry import registry_kept
from tests.test_networks import Peak

EXACT = cp.Exact()
RUNNING = "covprop.methods.planning"
PLANNED = "covprop.methods.layerwise.planned"


def gaussian(
    event: tuple[int, ...], batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(event).numel()
    factor = torch.randn(*batch, size, size, dtype=dtype, generator=generator) / size**0.5
    mean = torch.randn(*batch, *event, dtype=dtype, generator=generator)
    return cp.Gaussian(mean, factor @ factor.mT / 2 + torch.eye(size, dtype=dtype) / 10)


def fully_connected(*sizes: int, activation: Any = nn.ReLU) -> nn.Sequential:
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), activation())]
    return frozen(nn.Sequential(*layers[:-1]))


def frozen(model: Any) -> Any:
    return model.eval().requires_grad_(requires_grad=False)


class Residual(nn.Module):
    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.second(torch.relu(self.first(x))) + x)


def convolutional() -> nn.Sequential:
    return frozen(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.AvgPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10),
        )
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.inner(x, x, x, need_weights=False)[0]


# What it says.


def test_a_fully_connected_network_step_by_step() -> None:
    plan = cp.plan(fully_connected(7, 20, 30, 2), gaussian((7,)))
    assert isinstance(plan, cp.Plan)
    rows = [(s.module, s.operation, s.shape, s.features, s.covariance_bytes) for s in plan.steps]
    assert rows == [
        ("0", "linear", (20,), 20, 4 * 20**2),
        ("1", "relu", (20,), 20, 4 * 20**2),
        ("2", "linear", (30,), 30, 4 * 30**2),
        ("3", "relu", (30,), 30, 4 * 30**2),
        ("4", "linear", (2,), 2, 4 * 2**2),
    ]
    assert plan.peak_bytes == max(step.peak_bytes for step in plan.steps)
    assert plan.peak_bytes >= 2 * 4 * 30**2
    assert plan.work == pytest.approx(sum(step.work for step in plan.steps))
    assert all(step.work > 0 for step in plan.steps)


def test_a_convolutional_network_step_by_step() -> None:
    plan = cp.plan(convolutional().double(), gaussian((1, 16, 16), (2,), torch.float64))
    rows = [(s.operation, s.shape, s.features, s.covariance_bytes) for s in plan.steps]
    assert rows == [
        ("conv2d", (2, 4, 16, 16), 1024, 2 * 8 * 1024**2),
        ("batch_norm", (2, 4, 16, 16), 1024, 2 * 8 * 1024**2),
        ("relu", (2, 4, 16, 16), 1024, 2 * 8 * 1024**2),
        ("avg_pool2d", (2, 4, 8, 8), 256, 2 * 8 * 256**2),
        ("conv2d", (2, 8, 6, 6), 288, 2 * 8 * 288**2),
        ("relu", (2, 8, 6, 6), 288, 2 * 8 * 288**2),
        ("flatten", (2, 288), 288, 2 * 8 * 288**2),
        ("linear", (2, 10), 10, 2 * 8 * 10**2),
    ]


def test_a_residual_network_counts_its_skip() -> None:
    plain = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))
    x, matrix = gaussian((6, 4, 4), (1,)), 4 * 96**2
    plan = cp.plan(frozen(nn.Sequential(Residual(), Residual())), x)
    assert [s.operation for s in plan.steps] == 2 * ["conv2d", "relu", "conv2d", "add", "relu"]
    assert [s.module for s in plan.steps[:4]] == ["0.first", "0", "0.second", "0"]
    assert {s.features for s in plan.steps} == {96}
    assert plan.peak_bytes >= cp.plan(frozen(plain), x).peak_bytes + matrix


@pytest.mark.parametrize(
    ("make", "event"),
    [
        (Attention, (3, 8)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 8)),
        (lambda: nn.LSTM(4, 5, batch_first=True), (3, 4)),
        (lambda: nn.GRU(4, 5, batch_first=True), (3, 4)),
        (lambda: nn.RNN(4, 5), (3, 4)),
    ],
    ids=["attention", "transformer", "lstm", "gru", "rnn"],
)
def test_the_steps_are_the_operations_that_are_run(
    make: Callable[[], nn.Module], event: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes and features of all of them, in their order, as the propagation has them."""
    seen: list[tuple[tuple[int, ...], int]] = []
    plain = cp.GaussianTensor.__init__

    def watched(self: Any, loc: Tensor, node: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, loc, node, *args, **kwargs)
        seen.append((tuple(sorted(loc.shape)), node.covariance.size))

    model, x = frozen(make()), gaussian(event, (2,))
    if isinstance(model, nn.RNN) and not isinstance(model, nn.LSTM | nn.GRU):
        model.batch_first = True
    planned = [(tuple(sorted(s.shape)), s.features) for s in cp.plan(model, x).steps]
    monkeypatch.setattr(cp.GaussianTensor, "__init__", watched)
    propagate(model, x)
    made = iter(seen)
    assert len(planned) > 5
    assert all(any(step == one for one in made) for step in planned)  # a subsequence


def test_modules_are_named_and_functions_are_not() -> None:
    x = gaussian((4,))
    nested = frozen(nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2)))
    assert [step.module for step in cp.plan(nested, x).steps] == ["0.0", "0.1", "1"]
    steps = cp.plan(lambda z: torch.relu(z) * 2, x).steps
    assert [(s.module, s.operation) for s in steps] == [("", "relu"), ("", "mul")]


def test_several_and_named_inputs() -> None:
    x, y, z = gaussian((4,)), gaussian((5,)), gaussian((6,))

    def function(first: Any, others: Any, *, last: Any, scale: float) -> Any:
        return torch.cat([first, others[0] * scale, last], dim=-1).sum(-1)

    plan = cp.plan(function, x, [y], cp.Series(order=2), last=z, scale=2.0)
    assert [s.operation for s in plan.steps] == ["mul", "cat", "sum"]
    assert [s.features for s in plan.steps] == [5, 15, 1]
    inputs = 4 * (4**2 + 5**2 + 6**2)
    assert plan.peak_bytes >= inputs + 4 * 15**2


def test_a_batch_that_moves_is_counted_as_one_that_does_not() -> None:
    layer = frozen(nn.Linear(8, 4))
    x = gaussian((3, 8), (5,))
    moved = cp.plan(lambda z: torch.relu(layer(z.transpose(0, 1))), x)
    still = cp.plan(lambda z: torch.relu(layer(z)), x)
    assert [s.shape for s in moved.steps] == [(3, 5, 8), (3, 5, 4), (3, 5, 4)]
    for one, other in zip(moved.steps[1:], still.steps, strict=True):
        assert (one.features, one.covariance_bytes) == (other.features, other.covariance_bytes)
    first = frozen(nn.MultiheadAttention(8, 2))
    steps = cp.plan(lambda z: first(*3 * [z.transpose(0, 1)])[0].transpose(0, 1), x).steps
    assert (steps[-1].shape, steps[-1].features) == ((5, 3, 8), 24)


def test_streaming_is_planned_where_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covprop.covariance.dense.WIDE", 2**16)
    network = fully_connected(20, 300, 10)
    steps = cp.plan(network, gaussian((20,))).steps
    assert [s.covariance_bytes for s in steps] == [4 * 300 * 20, 4 * 300 * 20, 4 * 10**2]


def test_streaming_is_not_planned_where_autograd_forbids_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("covprop.covariance.dense.WIDE", 2**16)
    network = fully_connected(20, 300, 10).requires_grad_()
    assert cp.plan(network, gaussian((20,))).peak_bytes >= 4 * 300**2
    with torch.no_grad():
        assert cp.plan(network, gaussian((20,))).steps[0].covariance_bytes == 4 * 300 * 20


def test_the_table_has_a_line_for_each_step_and_the_peak() -> None:
    plan = cp.plan(convolutional(), gaussian((1, 16, 16), (2,)))
    head, *rows, last = str(plan).splitlines()
    assert head.split() == [
        "module", "operation", "shape", "features", "covariance", "peak", "work", "time"
    ]  # fmt: skip
    assert len(rows) == len(plan.steps)
    for row, step in zip(rows, plan.steps, strict=True):
        assert step.operation in row
        assert "x".join(map(str, step.shape)) in row
        assert f"{step.features:,}" in row
    assert last.startswith("peak ")
    assert "8.39 MB" in rows[0]  # 2 * 4 * 1024^2


def test_a_plan_of_nothing_is_empty() -> None:
    plan = cp.plan(nn.Identity(), gaussian((4,)))
    assert (plan.steps, plan.peak_bytes, plan.work) == ((), 0, 0)
    assert plan.fits
    assert len(str(plan).splitlines()) == 2


# It is an estimate of what is measured.

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "fully connected": (lambda: fully_connected(300, 600, 500, 10), (300,), ()),
    "batch": (lambda: fully_connected(50, 200, 200, 10), (50,), (8,)),
    "GELU": (lambda: fully_connected(300, 700, 10, activation=nn.GELU), (300,), ()),
    "convolutional": (convolutional, (1, 16, 16), (1,)),
    "residual": (lambda: frozen(nn.Sequential(*(Residual() for _ in range(3)))), (6, 8, 8), (1,)),
    "scaling": (lambda: frozen(nn.Sequential(nn.BatchNorm1d(700), nn.ReLU())), (700,), (1,)),
    "streamed": (lambda: fully_connected(300, 1100, 200), (300,), ()),
    "streamed batch": (lambda: fully_connected(300, 600, 60), (300,), (4,)),
    "streamed convolution": (lambda: wide_convolution(nn.Identity()), (2, 11, 11), (1,)),
    "streamed twice": (lambda: fully_connected(300, 1100, 300, 1200, 50), (300,), ()),
    "attention": (
        lambda: frozen(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)), (13, 32), (1,)
    ),
    "recurrent": (lambda: frozen(nn.LSTM(80, 240, batch_first=True)), (2, 80), (1,)),
    "many steps": (lambda: frozen(nn.GRU(5, 100, batch_first=True)), (6, 5), (1,)),
    "maximum": (
        lambda: frozen(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2))),
        (1, 14, 14), (1,),
    ),
    "padded maximum": (
        lambda: frozen(nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.MaxPool2d(3, 2, 1))),
        (1, 12, 12), (1,),
    ),
    "overlapping maximum": (
        lambda: frozen(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 1))),
        (1, 12, 12), (1,),
    ),
    "largest of all": (lambda: frozen(nn.AdaptiveMaxPool2d(1)), (6, 7, 7), (1,)),
    "streamed norm": (lambda: wide_convolution(nn.BatchNorm2d(10)), (2, 11, 11), (1,)),
}  # fmt: skip
LEAST, MOST = 0.9, 1.5
"""Of what is measured, that is planned."""


def wide_convolution(norm: nn.Module) -> nn.Module:
    layers = (nn.Conv2d(2, 10, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(10, 2, 3, stride=2))
    return frozen(nn.Sequential(*layers, nn.Flatten()))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of tests in as many blocks as large ones have, and released as soon as they."""
    small = {
        "dense.BLOCK": 2**12, "streamed.ROWS": 2**14, "streamed.PAIRS": 2**12, "base.CHUNK": 2**14,
        "congruence.ROWS": 2**14, "congruence.COLUMNS": 2**14, "dense.WIDE": 2**20,
        "congruence.WIDE": 2**20,
    }  # fmt: skip
    for constant, value in small.items():
        monkeypatch.setattr(f"covprop.covariance.{constant}", value)
    monkeypatch.setattr("covprop.flow.lineage.UNRELEASED", 0)


def share_planned(model: Any, x: cp.Gaussian, method: Any = EXACT) -> float:
    """The peak that is planned, in units of the one that is measured; that one is large enough."""
    planned = cp.plan(model, x, method=method).peak_bytes
    parts = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    gc.collect()
    hermite_basis.cache_clear()  # a table that an earlier test may have made
    with Peak([*parts, x.mean]) as measured:
        x.covariance.map(lambda tensor: tensor.detach())  # it is there from the beginning
        propagate(model, x, method=method)
    return planned / measured.most


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in NETWORKS),
        *((name, torch.float64) for name in ("batch", "residual")),
    ],
)
def test_the_peak_is_what_is_measured(name: str, dtype: torch.dtype) -> None:
    make, event, batch = NETWORKS[name]
    torch.manual_seed(0)
    with torch.no_grad():
        share = share_planned(make().to(dtype), gaussian(event, batch, dtype))
    assert LEAST <= share <= MOST


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "repeat": (lambda x: x.repeat(1, 8), (100,)),
    "flip": (lambda x: x.flip(-1), (500,)),
    "cat": (lambda x: torch.cat([x, torch.relu(x)], -1), (400,)),
    "stack": (lambda x: torch.stack([x, torch.relu(x), x], 1), (300,)),
    "sum": (lambda x: x + torch.relu(x).flip(-1), (500,)),
    "product": (lambda x: x * x.flip(-1), (500,)),
    "contraction": (lambda x: x @ x.mT, (20, 20)),
    "softmax": (lambda x: (1e-2 * x).softmax(-1), (400,)),
    "group norm": (lambda x: F.group_norm(1e-2 * x, 3), (6, 8, 8)),
    "dropout": (lambda x: F.dropout(x, 0.3), (500,)),
    "maximum": (lambda x: torch.maximum(x, x.flip(-1)), (300,)),
    "factor": (lambda x: 2 * x, (500,)),
    "broadcast product": (lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)), (500,)),
    "layer norm": (lambda x: F.layer_norm(x, (400,)), (400,)),
    "layer norm of groups": (lambda x: F.layer_norm(x, (20,)), (25, 20)),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_an_operation_holds_meanwhile_is_counted(name: str) -> None:
    function, event = FUNCTIONS[name]
    with torch.no_grad():
        assert LEAST <= share_planned(function, gaussian(event, (1,))) <= MOST


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "side"),
    [("ResNet, basic", 10), ("DenseNet", 8), ("U-Net", 12)],
)
def test_well_known_architectures_are_planned_as_they_are_measured(name: str, side: int) -> None:
    torch.manual_seed(0)
    model, x = frozen(ARCHITECTURES[name].make()), gaussian((1, side, side), (1,))
    small = cp.Gaussian(x.mean, 1e-4 * x.covariance_matrix)
    with torch.no_grad():
        assert LEAST <= share_planned(model, small) <= MOST


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("event", [(400,), (20, 20)], ids=["one group", "groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_autograd_keeps_of_a_norm_is_counted(
    norm: Any, event: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    width = event[-1]
    model = nn.Sequential(nn.Linear(width, width), norm(width), nn.Linear(width, width))
    share = share_planned(model.to(dtype), gaussian(event, (1,), dtype))
    assert LEAST <= share <= MOST


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "name", ["batch", "convolutional", "residual", "streamed batch", "many steps"]
)
def test_what_autograd_keeps_is_counted(name: str) -> None:
    make, event, batch = NETWORKS[name]
    torch.manual_seed(0)
    share = share_planned(make().requires_grad_(), gaussian(event, batch))
    assert LEAST <= share <= MOST


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "make",
    [
        lambda n: cp.Gaussian.diagonal(torch.zeros(n), variance=torch.rand(n)),
        lambda n: cp.Gaussian.low_rank(torch.zeros(n), torch.randn(n, 3)),
        lambda n: gaussian((n,)),
    ],
    ids=["diagonal", "low rank", "dense"],
)
@pytest.mark.parametrize("last", [nn.Identity(), nn.ReLU()], ids=["linear", "relu"])
def test_a_decoder_is_planned_with_its_result(make: Any, last: nn.Module) -> None:
    """Streamed layers have no matrix on the way, and the result has one."""
    torch.manual_seed(0)
    model, x = frozen(nn.Sequential(nn.Linear(60, 1100), last)), make(60)
    written = cp.plan(model, x).steps[-1]
    if isinstance(x.covariance, cp.covariance.LowRank):  # which a linear map leaves a factor
        assert written.covariance_bytes == 4 * 1100 * (3 if isinstance(last, nn.Identity) else 1100)
        return
    assert (written.operation, written.covariance_bytes) == ("result", 4 * 1100**2)
    with torch.no_grad():
        assert LEAST <= share_planned(model, x) <= MOST


@pytest.mark.usefixtures("small_blocks")
def test_a_series_is_planned_as_it_is_measured() -> None:
    torch.manual_seed(0)
    model, x = fully_connected(300, 600, 500, 10), gaussian((300,))
    with torch.no_grad():
        assert LEAST <= share_planned(model, x, cp.Series(order=4)) <= MOST


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_deep_residual_network_keeps_no_more_than_is_planned(dtype: torch.dtype) -> None:
    peaks = []
    for depth in (2, 5):
        torch.manual_seed(0)
        model = frozen(nn.Sequential(*(Residual() for _ in range(depth)))).to(dtype)
        x = gaussian((6, 6, 6), (1,), dtype)
        gc.collect()
        with torch.no_grad(), Peak([*model.parameters(), x.mean]) as measured:
            propagate(model, x)
        peaks.append(measured.most)
    assert peaks[1] <= peaks[0] + dtype.itemsize * 216**2


# It leaves everything as it was.


class Busy(nn.Module):
    """In-place forms, buffers, dropout and means that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.linear, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        x = self.act(self.norm(x))
        x += 1
        x.mul_(2)
        F.hardtanh(x, -3.0, 3.0, inplace=True)
        return self.drop(self.linear(x)).tanh_()


def test_model_inputs_and_random_numbers_stay() -> None:
    torch.manual_seed(0)
    model, x = Busy().eval(), gaussian((4,), (3,))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    mean, matrix = x.mean.clone(), x.covariance_matrix.clone()
    expected = propagate(model, x)
    random, grad = torch.get_rng_state(), torch.is_grad_enabled()
    plan = cp.plan(model, x)
    assert len(plan.steps) >= 6
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled() == grad
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(x.mean, mean)
    assert torch.equal(x.covariance_matrix, matrix)
    assert all(p.grad is None for p in model.parameters())
    assert_close(propagate(model, x).covariance_matrix, expected.covariance_matrix, rtol=0.0)


def test_active_dropout_draws_no_random_numbers() -> None:
    model, x = Busy().eval(), gaussian((4,), (3,))
    random = torch.get_rng_state()
    with cp.dropout_active(model):
        propagate(model, x)
        assert torch.equal(torch.get_rng_state(), random)
        cp.plan(model, x)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_plan_makes_no_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a covariance was made")

    model, x = convolutional(), gaussian((1, 16, 16), (2,))
    for door in ("push", "scale", "pairwise", "take", "matrix", "largest"):
        monkeypatch.setattr(cp.covariance.Dense, door, fail)
    cp.plan(model, x)


def test_an_input_that_is_changed_in_place_stays() -> None:
    x = gaussian((4,))
    mean = x.mean.clone()
    assert bool((mean < 0).any())
    cp.plan(lambda z: F.relu(z, inplace=True), x)
    cp.plan(lambda z: z.mul_(2).relu_(), x)
    assert torch.equal(x.mean, mean)


@torch.no_grad()
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["fully connected", "batch", "GELU", "convolutional", "residual"])
def test_blocks_of_third_cumulants_are_counted(name: str) -> None:
    """Every unit is counted as one that is not linear, and has a column."""
    make, event, batch = NETWORKS[name]
    torch.manual_seed(0)
    share = share_planned(make(), gaussian(event, batch), cp.Cumulants())
    assert LEAST <= share <= 2


RECURRENT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LSTM, both ways": (lambda: nn.LSTM(4, 12, batch_first=True, bidirectional=True), (24, 4)),
    "RNN of two layers": (lambda: nn.RNN(20, 80, 2, batch_first=True), (12, 20)),
    "RNN, relu": (lambda: nn.RNN(20, 60, nonlinearity="relu", batch_first=True), (12, 20)),
}


@torch.no_grad()
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", RECURRENT)
def test_many_steps_are_planned_by_one(name: str) -> None:
    make, event = RECURRENT[name]
    torch.manual_seed(0)
    model, x = frozen(make().double()), gaussian(event, (1,), torch.float64)
    assert LEAST <= share_planned(model, x) <= MOST
    longer = gaussian((2 * event[0], event[1]), (1,), torch.float64)
    assert len(cp.plan(model, longer).steps) == len(cp.plan(model, x).steps)


@torch.no_grad()
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("steps", "batch"),
    [(4, 1), (9, 1), (9, 2)],
    ids=["step by step", "told from few", "told from few, of a batch"],
)
def test_third_cumulants_of_recurrent_layers_are_counted(steps: int, batch: int) -> None:
    torch.manual_seed(0)
    model = frozen(nn.LSTM(4, 8, batch_first=True, bidirectional=True).double())
    x = gaussian((steps, 4), (batch,), torch.float64)
    assert LEAST <= share_planned(model, x, cp.Cumulants()) <= MOST


# It refuses what propagate refuses.

REFUSED: dict[str, Callable[[Any], Any]] = {
    "no rule": torch.digamma,
    "no rule, a method": lambda z: z.logcumsumexp(-1),
    "a value": lambda z: z if z.sum() > 0 else -z,
    "out": lambda z: torch.add(z, 1, out=torch.empty(4)),
    "numpy": lambda z: z.numpy(),
    "a product": lambda z: z.scatter_reduce(0, torch.zeros(4, dtype=torch.long), z, "prod"),
    "a random slope": lambda z: F.rrelu(z, training=True),
    "a bias": lambda z: F.linear(torch.ones(2, 4), torch.ones(4, 4), z),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_operations_raise_the_same_error(name: str) -> None:
    function, x = REFUSED[name], gaussian((4,))
    with pytest.raises(cp.UnsupportedOperation) as expected:
        propagate(function, x)
    with pytest.raises(cp.UnsupportedOperation) as raised:
        cp.plan(function, x)
    assert str(raised.value) == str(expected.value)


def test_the_error_names_the_module() -> None:
    class Digamma(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.digamma(x)

    model = frozen(nn.Sequential(nn.Linear(4, 3), Digamma()))
    with pytest.raises(cp.UnsupportedOperation, match=r"in module 1 \(Digamma\)"):
        cp.plan(model, gaussian((4,)))


def test_wrong_arguments_raise_the_same_error() -> None:
    x = gaussian((4,))
    for arguments in ((torch.zeros(4),), (x, x)):
        with pytest.raises((TypeError, ValueError)) as expected:
            propagate(torch.add, *arguments)
        with pytest.raises(expected.type, match=re.escape(str(expected.value))):
            cp.plan(torch.add, *arguments)
    with pytest.raises(TypeError, match="a method is"):
        cp.plan(torch.relu, x, method=4)  # type: ignore[arg-type]
    with pytest.raises(cp.UnsupportedOperation, match="running statistics"):
        cp.plan(nn.BatchNorm1d(4), gaussian((4,), (2,)))


@pytest.mark.parametrize("progress", [False, True])
def test_activations_of_the_user_are_planned(progress: bool) -> None:
    swish = cp.activation(lambda x: x * torch.sigmoid(1.5 * x))
    x = gaussian((4,))
    if progress:
        propagate(lambda z: swish(2 * z), x, progress=True)
    assert [s.features for s in cp.plan(lambda z: swish(2 * z), x).steps] == [4, 4]


@pytest.mark.parametrize("kind", ["residual", "doubling"])
def test_the_time_to_plan_does_not_double_with_each_block(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = frozen(nn.Linear(2, 2))
    calls = 0
    plain = cross_covariance.at_same_depth

    def counted(*nodes: Any) -> bool:
        nonlocal calls
        calls += 1
        return plain(*nodes)

    def residual(depth: int) -> Callable[[Any], Any]:
        def network(z: Any) -> Any:
            for _ in range(depth):
                z = torch.relu(layer(z)) + z
            return z

        return network

    def doubling(depth: int) -> Callable[[Any], Any]:
        def network(z: Any) -> Any:
            other, z = torch.tanh(z), torch.relu(z)
            for _ in range(depth):
                z = z + 0.1 * z.flip(-1)
            return z + other

        return network

    monkeypatch.setattr(cross_covariance, "at_same_depth", counted)
    counts = []
    run = cp.plan if kind == "residual" else propagate
    for depth in (6, 12):
        calls = 0
        run({"residual": residual, "doubling": doubling}[kind](depth), gaussian((2,)))
        counts.append(calls)
    assert counts[1] <= 10 * counts[0]


# The guard.


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Free memory, and plans made already for small covariances."""

    def set_free(free: int) -> None:
        monkeypatch.setattr(f"{RUNNING}.free_bytes", lambda _: free)
        monkeypatch.setattr("covprop.flow.lineage.LARGE", 1000)

    return set_free


def test_what_does_not_fit_is_refused_with_the_table(
    small_machine: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = convolutional(), gaussian((1, 16, 16), (1,))
    peak = cp.plan(model, x).peak_bytes
    small_machine(peak - 1)

    def fail(*_: Any) -> None:
        raise AssertionError("a covariance was made")

    with monkeypatch.context() as patch:
        patch.setattr(cp.covariance.Dense, "push", fail)
        with pytest.raises(cp.TooLarge) as raised:
            propagate(model, x)
    assert isinstance(raised.value, MemoryError)
    assert isinstance(raised.value, cp.CovpropError)
    message = str(raised.value)
    plan = cp.plan(model, x)
    assert not plan.fits
    assert str(plan.table_at(TYPICAL)) in message
    largest = max(plan.steps, key=lambda step: step.peak_bytes)
    assert f"at {largest.operation} ({largest.module}, {largest.features:,} features)" in message
    assert "sample" in message
    assert "cp.Sketched()" in message
    small_machine(peak)
    assert cp.plan(model, x).fits
    propagate(model, x)


def test_a_function_and_other_doors_are_guarded_as_well(
    small_machine: Callable[[int], None],
) -> None:
    small_machine(10)
    x = gaussian((30,))
    layer = frozen(nn.Linear(30, 30))
    for function in (layer, lambda z: z + z.flip(-1), lambda z: torch.cat([z, z])):
        with pytest.raises(cp.TooLarge, match=r"the function|features"):
            propagate(function, x)
    with pytest.raises(cp.TooLarge):
        joint(layer, x)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "repeat": lambda x: x.repeat(1, 3000),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3000, -1),
    "tile": lambda x: x.tile(3000),
    "repeat_interleave": lambda x: x.repeat_interleave(3000, -1),
    "index": lambda x: x[:, torch.zeros(300_000, dtype=torch.long)],
    "interpolate": lambda x: F.interpolate(x.unsqueeze(1), scale_factor=3000),
    "cat": lambda x: torch.cat(3000 * [x], -1),
    "stack": lambda x: torch.stack(3000 * [x], 1),
    "outer product": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).repeat(1, 30, 1),
    "broadcast sum": lambda x: x.unsqueeze(-1) + torch.zeros(3000),
    "pad": lambda x: F.pad(x, (0, 300_000)),
    "decoder": frozen(nn.Linear(100, 200_000)),
    "decoder with an activation": frozen(nn.Sequential(nn.Linear(100, 200_000), nn.ReLU())),
}


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_would_need_hundreds_of_gigabytes_is_refused_before_anything_is_made(
    name: str, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{RUNNING}.free_bytes", lambda _: 2**30)
    x = gaussian((100,), (1,))
    if structure == "diagonal":
        x = cp.Gaussian.diagonal(x.mean, variance=x.variance)
    with torch.no_grad(), Peak([x.mean]) as measured, pytest.raises(cp.TooLarge) as raised:
        propagate(OPERATIONS[name], x)
    assert measured.most < 2**27  # the means, and numbers of their elements
    assert str(cp.plan(OPERATIONS[name], x).table_at(TYPICAL)) in str(raised.value)


SAME_SIZE: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "factor": lambda x: 2 * x,
    "flip": lambda x: x.flip(-1),
    "square": lambda x: x * x,
    "sum": lambda x: x + x.flip(-1),
    "dropout": lambda x: F.dropout(x, 0.5),
    "norm": lambda x: F.layer_norm(x, (30,)),
    "dtype": lambda x: x.double(),
    "quotient": lambda x: x / 3,
}


@pytest.mark.parametrize("name", SAME_SIZE)
def test_no_operation_is_left_unguarded(name: str, small_machine: Callable[[int], None]) -> None:
    small_machine(10)
    with pytest.raises(cp.TooLarge, match="the function, 30 features"):
        propagate(SAME_SIZE[name], gaussian((30,), (1,)))


def test_a_recurrent_layer_is_guarded(small_machine: Callable[[int], None]) -> None:
    small_machine(10)
    with pytest.raises(cp.TooLarge, match="at recurrent_layer"):
        propagate(frozen(nn.GRU(2, 5, batch_first=True)), gaussian((6, 2), (1,)))


def test_many_small_covariances_are_guarded_as_one_large_one(
    small_machine: Callable[[int], None],
) -> None:
    """Autograd keeps all of them."""
    small_machine(1500)
    x, layer = gaussian((10,)), nn.Linear(10, 10)

    def deep(z: Any) -> Any:
        for _ in range(20):
            z = torch.relu(layer(z))
        return z

    with pytest.raises(cp.TooLarge):
        propagate(deep, x)


def test_a_shift_is_free(small_machine: Callable[[int], None]) -> None:
    small_machine(10)
    x = gaussian((30,))
    assert torch.equal(propagate(lambda z: z + 1, x).covariance_matrix, x.covariance_matrix)


def test_variances_alone_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(PLANNED, fail)
    model = fully_connected(30, 20_000, 3)
    propagate(model, gaussian((30,)), cp.AssumedDensity())


def test_the_plan_is_made_once(
    small_machine: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_machine(10**9)
    calls = []
    plain = planning.planned

    def counted(*args: Any, **kwargs: Any) -> cp.Plan:
        calls.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(PLANNED, counted)
    propagate(fully_connected(20, 30, 30, 30, 2), gaussian((20,)), cp.Series(order=2))
    assert len(calls) == 1


def test_small_networks_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(PLANNED, fail)
    monkeypatch.setattr(f"{RUNNING}.free_bytes", fail)
    propagate(convolutional(), gaussian((1, 16, 16), (2,)))
    propagate(frozen(nn.LSTM(4, 5, batch_first=True)), gaussian((3, 4), (2,)))


def test_the_guard_changes_no_result(small_machine: Callable[[int], None]) -> None:
    model, x = frozen(nn.Sequential(Residual(), Residual())), gaussian((6, 4, 4), (1,))
    expected = propagate(model, x).covariance_matrix
    small_machine(10**9)
    assert_close(propagate(model, x).covariance_matrix, expected, rtol=0.0)


# The bar.


@pytest.mark.parametrize(
    ("make", "event"),
    [
        (lambda: fully_connected(10, 20, 5), (10,)),
        (convolutional, (1, 16, 16)),
        (lambda: nn.Sequential(Residual(2), Residual(2)), (2, 3, 3)),
        (Attention, (3, 8)),
        (lambda: nn.LSTM(4, 5, batch_first=True), (3, 4)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.GLU(), nn.PReLU(), nn.MaxPool1d(2)), (3, 8)),
        (Busy, (4,)),
    ],
    ids=["fully connected", "convolutional", "residual", "attention", "lstm", "others", "in place"],
)
def test_the_bar_ends_full_and_changes_nothing(
    make: Callable[[], nn.Module], event: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = frozen(make()), gaussian(event, (2,))
    expected = propagate(model, x)
    assert capsys.readouterr() == ("", "")
    result = propagate(model, x, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "100%" in captured.err.split("\r")[-1]
    pairs = [(result, expected)] if isinstance(result, cp.Gaussian) else [(result[0], expected[0])]
    for one, other in pairs:
        assert torch.equal(one.mean, other.mean)
        assert torch.equal(one.covariance_matrix, other.covariance_matrix)


def test_the_bar_closes_when_an_operation_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(cp.UnsupportedOperation):
        propagate(lambda z: torch.digamma(torch.relu(z)), gaussian((3,)), progress=True)
    assert "100%" not in capsys.readouterr().err


def test_the_bar_advances_by_one_operation_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the next has the same name, and where one has several results."""
    seen: list[str] = []

    class Bar:
        def __init__(self, **_: Any) -> None:
            self.done = 0.0

        def set_postfix_str(self, text: str) -> None:
            seen.append(text)

        def update(self, work: float) -> None:
            self.done += work
            seen.append(f"{1e6 * work:.1f}")

        def close(self) -> None:
            seen.append(f"{1e6 * self.done:.1f}")

    monkeypatch.setattr("covprop.methods.progress.tqdm", Bar)
    model, x = frozen(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))), gaussian((4,))
    works = [f"{1e6 * step.counts.seconds(TYPICAL):.1f}" for step in cp.plan(model, x).steps]
    propagate(model, x, progress=True)
    shown = [text for i, work in enumerate(works) for text in (f"{i} linear", work)]
    assert seen == [*shown, f"{sum(map(float, works)):.1f}"]
    seen.clear()
    propagate(lambda z: z.chunk(2)[0] + 1, x, progress=True)
    assert len([text for text in seen if text.endswith("chunk")]) == 1


def test_the_operators_of_an_exported_program_have_their_names() -> None:
    model, x = frozen(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))), gaussian((3,))
    program = torch.export.export(model, (x.mean,)).module()
    assert [step.operation for step in cp.plan(program, x).steps] == ["linear", "relu"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tanh(x * x.square().mean(-1, keepdim=True).rsqrt()),
        lambda x: torch.relu(x / x.abs().sum(-1, keepdim=True)),
        lambda x: F.layer_norm(x / x.norm(), (100,)),
    ],
)
@torch.no_grad()
def test_a_plan_does_not_depend_on_values(function: Callable[[Any], Any]) -> None:
    """At a mean of zero these divide zero by zero, where a propagation divides by an average."""
    x = cp.Gaussian.isotropic(torch.zeros(100), stddev=1.0)
    expected = propagate(function, x)
    assert_close(propagate(function, x, progress=True).mean, expected.mean)
    assert cp.plan(function, x).steps[-1].features == 100


@torch.no_grad()
def test_a_rule_of_the_user_that_needs_numbers_is_counted_and_guarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("covprop.flow.lineage.LARGE", 10)
    x = cp.Gaussian(torch.zeros(3), torch.eye(3) + 0.1)
    with registry_kept():

        @cp.rule(torch.digamma)
        def whitened(function: Any, x: Any) -> Any:
            del function
            root = torch.linalg.cholesky(x.covariance.matrix())
            return x.through(x.loc, LinearMap(lambda v: torch.linalg.solve(root, v), x.event_shape))

        (step,) = cp.plan(torch.digamma, x).steps
        y = propagate(lambda t: torch.digamma(2 * t), x)
    assert (step.operation, step.covariance_bytes) == ("digamma", 36)
    assert_close(y.covariance_matrix, torch.eye(3), rtol=1e-5, atol=1e-5)
