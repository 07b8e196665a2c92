"""A wide covariance in blocks of rows: the numbers of the full matrix, without its memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import covprop as cp
from covprop.covariance import Covariance, Dense, LinearMap, Streamed
from covprop.flow.lineage import Lineage
from covprop.methods.call import in_flight
from covprop.rules import layers
from tests.covariance.test_structures import pair
from tests.gaussians import gaussian, numbers
from tests.layers import propagate
from tests.oracles import assert_close

WIDE = "covprop.covariance.dense.WIDE"
BATCHES = [(), (3,), (2, 2)]
every_batch = pytest.mark.parametrize("batch", BATCHES)
METHODS = [cp.Exact(), cp.Series(order=4), cp.Series(tolerance=1e-3)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the covariances that were not written out."""
    sizes: list[int] = []
    plain = Streamed.through.__func__

    def through(cls: Any, half: Tensor, linear: LinearMap, dense: Any) -> Streamed:
        sizes.append(half.shape[-1])
        return plain(cls, half, linear, dense)

    monkeypatch.setattr(Streamed, "through", classmethod(through))
    return sizes


def model(*layers: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Weights, and running statistics, that are all different."""
    whole = nn.Sequential(*layers).to(dtype).eval().requires_grad_(requires_grad=False)
    for i, tensor in enumerate([*whole.parameters(), *whole.buffers()]):
        if tensor.is_floating_point():
            values = numbers(*tensor.shape, seed=10 + i) / max(1, tensor[0].numel()) ** 0.5
            tensor.copy_(values.abs() + 0.5 if tensor.dim() == 1 else values)
    return whole


def both(
    network: Callable[..., Any], x: cp.Gaussian, monkeypatch: pytest.MonkeyPatch,
    method: Any = METHODS[0],
) -> tuple[cp.Gaussian, cp.Gaussian]:  # fmt: skip
    """Streamed where that is possible, and never."""
    with monkeypatch.context() as patch:
        patch.setattr(WIDE, 100)
        streamed = propagate(network, x, method)
        patch.setattr(WIDE, 2**60)
        dense = propagate(network, x, method)
    return streamed, dense


def agree(one: cp.Gaussian, other: cp.Gaussian, tolerance: float = 1e-13) -> None:
    """To rounding, or to the series that Exact chooses by the largest correlation it knows."""
    matrix = other.covariance_matrix
    assert_close(one.mean, other.mean, atol=tolerance * float(1 + other.mean.abs().max()))
    assert_close(one.covariance_matrix, matrix, atol=tolerance * float(matrix.abs().max()))
    assert torch.equal(one.covariance_matrix, one.covariance_matrix.mT)


@every_batch
@pytest.mark.parametrize("method", METHODS, ids=["exact", "order", "tolerance"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU, nn.PReLU, nn.Hardtanh])
def test_fully_connected_chains_agree(
    activation: Any, method: Any, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch,
    made: list[int],
) -> None:  # fmt: skip
    network = model(
        nn.Linear(5, 40), activation(), nn.Linear(40, 4), nn.Linear(4, 30), nn.BatchNorm1d(30)
        if len(batch) == 1 else nn.Identity(), activation(), nn.Linear(30, 3),
    )  # fmt: skip
    agree(*both(network, gaussian(5, batch=batch), monkeypatch, method), 1e-11)
    assert made == [40, 30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_a_layer_wide_enough_for_the_series_agrees(
    activation: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    network = model(nn.Linear(60, 200), activation(), nn.Linear(200, 5), dtype=dtype)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-11}[dtype]
    agree(*both(network, gaussian(60, dtype=dtype), monkeypatch), tolerance)
    assert made == [200]


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding": 1},
    "same": {"padding": "same"},
    "same, dilated": {"padding": "same", "dilation": 2},
    "same, even": {"padding": "same", "kernel_size": (2, 4)},
    "valid": {"padding": "valid"},
    "strides and groups": {"padding": 1, "stride": 2, "groups": 2},
    "unequal": {"padding": (1, 2), "stride": (2, 1), "dilation": (1, 2), "kernel_size": (2, 3)},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "no bias": {"bias": False},
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutional_chains_agree(
    options: dict[str, Any], batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch,
    made: list[int],
) -> None:  # fmt: skip
    network = model(
        nn.Conv2d(2, 12, **{"kernel_size": 3, **options}),
        nn.BatchNorm2d(12) if batch else nn.Identity(),
        nn.ReLU(), nn.Conv2d(12, 1, 2), nn.Flatten(-3), nn.Softplus(),
    )  # fmt: skip
    agree(*both(network, gaussian(2, 6, 6, batch=batch), monkeypatch))
    assert len(made) == 1


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@every_batch
def test_the_short_way_to_the_variances_of_a_convolution(
    options: dict[str, Any], batch: tuple[int, ...]
) -> None:
    kernel = options.get("kernel_size", 3)
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    kinds = {k: v for k, v in options.items() if k not in ("kernel_size", "padding_mode", "bias")}
    weight = numbers(4, 2 // kinds.get("groups", 1), *kernel, seed=3)
    x = cp.Gaussian(numbers(2, 5, 6), torch.eye(60, dtype=torch.float64))
    layer = layers.convolution(in_flight(x, _lineage()), None, weight, None, **kinds)
    assert layer is not None

    def function(t: Tensor) -> Tensor:
        return F.conv2d(t, weight, **kinds)

    slope = torch.autograd.functional.jacobian(function, x.mean).reshape(-1, 60)
    half = numbers(*batch, 60, len(slope), seed=5)
    short = layer.diagonal(half)
    assert short is not None
    assert_close(short, (slope @ half).diagonal(dim1=-2, dim2=-1), atol=1e-13)


def test_the_short_way_to_the_variances_of_a_linear_layer() -> None:
    weight = numbers(9, 4, seed=3)
    layer = layers.Linear(weight)
    for batch in BATCHES:
        half = numbers(*batch, 4, 9, seed=5)
        short = layer.diagonal(half)
        assert short is not None
        assert_close(short, (weight @ half).diagonal(dim1=-2, dim2=-1), atol=1e-14)
    assert layer.diagonal(numbers(8, 18)) is None  # of two vectors at once


def _lineage() -> Lineage:
    return Lineage(cp.Exact())


# Each door of the structure, before and after an activation.

N = 30


def streamed(batch: tuple[int, ...], active: bool) -> Covariance:
    weight, factor = numbers(N, 4, seed=7), numbers(*batch, 4, 4, seed=8)
    linear = LinearMap(lambda t: t @ weight.mT, torch.Size((4,)), leading=True)
    half = linear(factor @ factor.mT)
    result: Covariance = Streamed.through(half, linear, Dense)
    return result.pairwise(pair, *_activity(batch)) if active else result


def written(batch: tuple[int, ...], active: bool) -> Dense:
    weight, factor = numbers(N, 4, seed=7), numbers(*batch, 4, 4, seed=8)
    result = Dense(weight @ factor @ factor.mT @ weight.mT)
    return result.pairwise(pair, *_activity(batch)) if active else result


def _activity(batch: tuple[int, ...]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    elements = numbers(*batch, N, seed=5) / 3, numbers(*batch, N, seed=6) / 3
    return elements, numbers(*batch, N, seed=7).square()


@pytest.fixture(params=[(2**22, 2**18), (1, 1), (70, 11)], ids=str)
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of rows at a time."""
    monkeypatch.setattr("covprop.covariance.streamed.ROWS", request.param[0])
    monkeypatch.setattr("covprop.covariance.streamed.PAIRS", request.param[1])
    monkeypatch.setattr("covprop.covariance.base.CHUNK", request.param[0])
    monkeypatch.setattr("covprop.covariance.congruence.ROWS", request.param[0])


DOORS: dict[str, Callable[[Covariance], Tensor]] = {
    "matrix": lambda c: c.matrix(),
    "diagonal": lambda c: c.diagonal(),
    "push": lambda c: c.push(LinearMap(_narrow, torch.Size((5, 6)))).matrix(),
    "push to more": lambda c: c.push(LinearMap(_widen, torch.Size((N,)), leading=True)).matrix(),
    "take": lambda c: c.take(torch.tensor([4, 2, 2, 9])).matrix(),
    "take all": lambda c: c.take(torch.arange(N)).matrix(),
    "scale": lambda c: c.scale(_factor(c)).matrix(),
    "scale, push": lambda c: c.scale(_factor(c)).push(LinearMap(_flat, torch.Size((N,)))).matrix(),
    "scale twice": lambda c: c.scale(_factor(c)).scale(_factor(c).cos()).matrix(),
    "scale, diagonal": lambda c: c.scale(_factor(c)).diagonal(),
    "pairwise": lambda c: c.pairwise(pair, *_activity(tuple(c.batch_shape))).matrix(),
    "pairwise, push": lambda c: c.pairwise(pair, *_activity(tuple(c.batch_shape)))
    .push(LinearMap(_flat, torch.Size((N,)))).matrix(),
    "map": lambda c: c.map(lambda t: t * 2).matrix(),
    "largest": lambda c: torch.tensor(c.largest(pair, _activity(tuple(c.batch_shape))[0])),
}  # fmt: skip


def _narrow(t: Tensor) -> Tensor:
    return F.avg_pool1d(t, 2).sum(-2)


def _flat(t: Tensor) -> Tensor:
    return t[..., ::4].cumsum(-1)


def _widen(t: Tensor) -> Tensor:
    return torch.cat([t, t.cumsum(-1)], dim=-1)


def _factor(covariance: Covariance) -> Tensor:
    return numbers(*covariance.batch_shape, N, seed=9)


@pytest.mark.parametrize("active", [False, True], ids=["linear", "activated"])
@pytest.mark.parametrize("batch", BATCHES[:2])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.usefixtures("rows")
def test_every_door_is_that_of_the_matrix_written_out(
    door: str, batch: tuple[int, ...], active: bool
) -> None:
    got, expected = (DOORS[door](make(batch, active)) for make in (streamed, written))
    assert_close(got, expected, atol=1e-12 * float(1 + expected.abs().max()))
    if door == "matrix":
        assert torch.equal(got, got.mT)


@pytest.mark.parametrize("batch", BATCHES[:2])
def test_noise_has_the_covariance(batch: tuple[int, ...]) -> None:
    count = 20_000
    draws = streamed(batch, active=False).noise(count, torch.Generator().manual_seed(9))
    matrix = written(batch, active=False).matrix()
    variance = matrix.diagonal(dim1=-2, dim2=-1)
    got = torch.einsum("s...i,s...j->...ij", draws, draws) / count
    spread = variance[..., :, None] * variance[..., None, :] + matrix.square()
    assert bool(((got - matrix).abs() <= 5.5 * (spread / count).sqrt()).all())


def test_what_stays_streamed_and_what_is_written_out() -> None:
    linear, active = streamed((), active=False), streamed((), active=True)
    one = torch.ones(N, dtype=torch.float64)
    assert linear.take(torch.arange(N)) is linear
    assert isinstance(linear.scale(one), Streamed)
    assert isinstance(linear.pairwise(pair, *_activity(())), Streamed)
    assert isinstance(active.scale(one), Dense)
    assert isinstance(active.pairwise(pair, *_activity(())), Dense)
    assert isinstance(active.push(LinearMap(_flat, torch.Size((N,)))), Dense)
    assert active.matrix() is active.matrix()
    assert (linear.size, linear.batch_shape, linear.dtype) == (N, (), torch.float64)


# Around it.

FIRST, BACK, ACROSS = (
    nn.Linear(5, 40).double(),
    nn.Linear(40, 5).double(),
    nn.Linear(40, 40).double(),
)
for _layer in (FIRST, BACK, ACROSS):
    _layer.requires_grad_(requires_grad=False)

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "residual": lambda z: BACK(torch.relu(FIRST(z))) + z,
    "two residual blocks": lambda z: PROGRAMS["residual"](PROGRAMS["residual"](z)),
    "wide residual": lambda z: BACK(torch.relu(ACROSS(torch.relu(FIRST(z))) + FIRST(z))),
    "skip around the activation": lambda z: (lambda h: BACK(torch.relu(h) + h))(FIRST(z)),
    "two branches": lambda z: (lambda h: BACK(torch.relu(h)) + BACK(torch.tanh(h)))(FIRST(z)),
    "concatenated": lambda z: torch.cat([z, BACK(torch.relu(FIRST(z)))], dim=-1),
    "wide concatenated": lambda z: torch.cat([z, torch.relu(FIRST(z))], dim=-1),
    "product": lambda z: BACK(torch.relu(FIRST(z)) * torch.sigmoid(FIRST(z))),
    "gate": lambda z: F.glu(FIRST(z)),
    "scaled and shifted": lambda z: BACK(torch.relu(3 * FIRST(z) / 2 - 1) * 2 + 1),
    "two activations": lambda z: BACK(F.hardtanh(torch.relu(FIRST(z)))),
    "two activations, by quadrature": lambda z: BACK(torch.tanh(torch.relu(FIRST(z)))),
    "in place": lambda z: BACK(F.relu(FIRST(z), inplace=True)),
    "a part of it": lambda z: torch.relu(FIRST(z))[..., 3:9],
    "reshaped": lambda z: torch.relu(FIRST(z)).unflatten(-1, (4, 10)).sum(-1),
    "maximum": lambda z: torch.maximum(FIRST(z)[..., :20], FIRST(z)[..., 20:]),
    "softmax": lambda z: torch.softmax(FIRST(z), -1),
    "layer norm": lambda z: BACK(F.layer_norm(FIRST(z), (40,))),
    "dropout": lambda z: BACK(F.dropout(torch.relu(FIRST(z)), 0.4, training=True)),
    "variance": lambda z: FIRST(z).var(-1),
    "exponential": lambda z: BACK(torch.exp(FIRST(z) / 3)),
    "wide output": lambda z: torch.relu(FIRST(z)),
    "wide linear output": lambda z: FIRST(z),
    "wider after wide": lambda z: F.linear(torch.relu(FIRST(z)), ACROSS.weight.repeat(2, 1)),
}


@pytest.mark.parametrize(
    ("name", "batch"),
    [(name, batch) for name in PROGRAMS for batch in BATCHES[: 1 if "quadrature" in name else 2]],
)
def test_programs_around_a_streamed_layer_agree(
    name: str, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    agree(*both(PROGRAMS[name], gaussian(5, batch=batch), monkeypatch))
    assert 40 in made


def test_several_outputs_and_a_moved_batch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def several(z: Any) -> Any:
        wide = torch.relu(FIRST(z.transpose(0, 1)))
        return {"wide": wide, "narrow": BACK(wide).transpose(0, 1)}

    one, other = both(several, gaussian(2, 5, batch=(3,)), monkeypatch)
    for key in one:
        agree(one[key], other[key])


def test_a_wide_output_is_an_ordinary_gaussian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WIDE, 100)
    y = propagate(PROGRAMS["wide output"], gaussian(5))
    assert isinstance(y.covariance, Dense)
    assert y.covariance_matrix.shape == (40, 40)
    assert y.sample(3).shape == (3, 40)


def test_independent_noise_streams_as_well(
    monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    x = cp.Gaussian.isotropic(numbers(2, 5), stddev=0.3, batch_dims=1)
    agree(*both(PROGRAMS["residual"], x, monkeypatch))
    assert made


# Gradients.


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()])
@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param("mean"), "covariance", "0.weight",
        pytest.param("0.bias"), "2.weight", "2.bias",
    ],
)  # fmt: skip
def test_gradients_are_those_without_streaming(
    wanted: str, activation: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = model(nn.Linear(5, 40), activation, nn.Linear(40, 3))
    plain = gaussian(5)
    leaf = {"mean": plain.mean, "covariance": plain.covariance_matrix}.get(wanted)
    leaf = dict(network.named_parameters())[wanted] if leaf is None else leaf
    leaf.requires_grad_()

    def gradient() -> Tensor:
        x = cp.Gaussian(plain.mean, plain.covariance_matrix)
        y = propagate(network, x)
        weight = numbers(3, 3, seed=1)
        loss = (weight * y.covariance_matrix).sum() + y.mean.square().sum()
        return torch.autograd.grad(loss, leaf)[0]

    expected = gradient()
    monkeypatch.setattr(WIDE, 100)
    assert_close(gradient(), expected, atol=1e-11 * float(expected.abs().max()))


def test_nothing_is_streamed_that_autograd_follows(
    monkeypatch: pytest.MonkeyPatch, made: list[int]
) -> None:
    monkeypatch.setattr(WIDE, 100)
    network = model(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)).requires_grad_()
    propagate(network, gaussian(5))
    assert not made
    with torch.no_grad():
        propagate(network, gaussian(5))
    assert made == [40]


# Memory.


class Largest(TorchDispatchMode):
    """The most entries of a tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.itemsize
                self.entries = max(self.entries, size)
        return result


def wide_networks() -> dict[str, tuple[nn.Module, cp.Gaussian, int]]:
    fully = model(nn.Linear(20, 500), nn.ReLU(), nn.Linear(500, 30), dtype=torch.float32)
    image = model(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, stride=2),
        dtype=torch.float32,
    )  # fmt: skip
    batch = model(nn.Linear(10, 250), nn.ReLU(), nn.Linear(250, 10), dtype=torch.float32)
    return {
        "fully connected": (fully, gaussian(20, dtype=torch.float32), 500**2),
        "convolutional": (image, gaussian(1, 8, 8, batch=(1,), dtype=torch.float32), 512**2),
        "batch": (batch, gaussian(10, batch=(4,), dtype=torch.float32), 4 * 250**2),
    }


@pytest.mark.parametrize("name", wide_networks())
@pytest.mark.parametrize("method", METHODS[:2], ids=["exact", "order"])
def test_the_wide_matrix_is_never_made(
    name: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WIDE, 2**16)
    monkeypatch.setattr("covprop.covariance.streamed.ROWS", 2**14)
    monkeypatch.setattr("covprop.covariance.streamed.PAIRS", 2**13)
    network, x, matrix = wide_networks()[name]
    with torch.no_grad(), Largest() as largest:
        propagate(network, x, method)
    assert largest.entries < matrix / 4
    monkeypatch.setattr(WIDE, 2**60)
    with torch.no_grad(), Largest() as largest:
        propagate(network, x, method)
    assert largest.entries >= matrix  # the measure sees it
