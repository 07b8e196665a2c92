"""Recurrent networks: torch at no noise, its Jacobian at little, sampling at some."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import covprop as cp
from tests.gaussians import numbers
from tests.layers import propagate
from tests.oracles import assert_close

Function = Callable[[Any], Any]
D = torch.float64
SAMPLES = 20_000
"""The standard error of a standard deviation is 0.5 %."""
BATCH, LENGTH, INSIDE, HIDDEN = 2, 2, 3, 2


def gaussian(
    noise: float, shape: tuple[int, ...] = (LENGTH, INSIDE), batch: int = BATCH
) -> cp.Gaussian:
    """A batch of dependent elements, each with a covariance of its own."""
    size = math.prod(shape)
    factor = noise * (torch.eye(size, dtype=D) + numbers(batch, size, size, seed=1) / 2) / 2
    return cp.Gaussian(numbers(batch, *shape, seed=2), factor @ factor.mT)


def make(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = kind(*args, **options).to(D).eval().requires_grad_(requires_grad=False)
    for name, parameter in module.named_parameters():
        parameter += 0.3 * torch.randn_like(parameter)
        if options.get("nonlinearity") == "relu" and "bias" in name:
            parameter += 1.0  # a closed ReLU would tell nothing
    return module


def network(kind: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return make(kind, INSIDE, HIDDEN, **options)


def sequences(module: nn.Module) -> Function:
    """The outputs, of (batch, length, features) whichever the module wants."""
    if module.batch_first:
        return lambda x: module(x)[0]
    return lambda x: module(x.transpose(0, 1))[0].transpose(0, 1)


def everything(module: nn.Module) -> Function:
    """The outputs and the last states, (layers, batch, features) in torch, side by side."""

    def forward(x: Any) -> Any:
        output, states = module(x if module.batch_first else x.transpose(0, 1))
        states = states if isinstance(states, tuple) else (states,)
        output = output if module.batch_first else output.transpose(0, 1)
        return torch.cat([t.flatten(1) for t in (output, *(h.transpose(0, 1) for h in states))], 1)

    return forward


NETWORKS = {
    "LSTM": network(nn.LSTM, batch_first=True),
    "LSTM of two layers": network(nn.LSTM, num_layers=2),
    "LSTM, both ways": network(nn.LSTM, bidirectional=True, bias=False),
    "GRU": network(nn.GRU, batch_first=True),
    "GRU of two layers": network(nn.GRU, bias=False, num_layers=2),
    "GRU, both ways, two layers": network(
        nn.GRU, bidirectional=True, num_layers=2, batch_first=True
    ),
    "RNN": network(nn.RNN, batch_first=True),
    "RNN, relu": network(nn.RNN, nonlinearity="relu"),
    "RNN, relu, both ways, two layers": network(
        nn.RNN, nonlinearity="relu", num_layers=2, bidirectional=True, batch_first=True
    ),
    "RNN, both ways": network(nn.RNN, bidirectional=True, bias=False),
}
LSTM_CELL, GRU_CELL = make(nn.LSTMCell, INSIDE, HIDDEN), make(nn.GRUCell, INSIDE, HIDDEN)
RNN_CELL = make(nn.RNNCell, INSIDE, HIDDEN)
RELU_CELL = make(nn.RNNCell, INSIDE, HIDDEN, nonlinearity="relu")


def unrolled(cell: nn.Module) -> Function:
    """A cell called by hand, step after step, from a state that depends on the input."""

    def forward(x: Any) -> Any:
        state = x[:, 0, :HIDDEN]
        for step in range(LENGTH):
            state = cell(x[:, step], state)
        return state

    return forward


def with_initial(x: Any) -> Any:
    """An initial state that is a constant."""
    start = numbers(1, 1, HIDDEN, seed=3).expand(1, x.shape[0], HIDDEN)
    return NETWORKS["LSTM"](x, (start, 2 * start))[0]


def with_random_initial(x: Any) -> Any:
    """An initial state that varies with the input: (layers, batch, features)."""
    return NETWORKS["GRU"](x, x[:, :1, :HIDDEN].transpose(0, 1))[0]


def along_rows_and_columns(x: Any) -> Any:
    """Rows and columns of an image as sequences, in one dimension with the batch (Sequencer)."""
    image = torch.stack([x, x.flip(1), x * x[:, :1]], 1)
    batch, height, width, features = image.shape
    rows = NETWORKS["LSTM"](image.reshape(-1, width, features))[0]
    columns = image.permute(2, 0, 1, 3).reshape(-1, height, features).transpose(0, 1)
    columns = NETWORKS["RNN, both ways"](columns)[0].unflatten(1, (width, batch))
    both = rows.reshape(batch, height, width, -1), columns.permute(2, 0, 1, 3)
    return torch.cat(both, -1)


FUNCTIONS: dict[str, Function] = {
    **{name: everything(module) for name, module in NETWORKS.items()},
    "LSTMCell": lambda x: torch.cat(LSTM_CELL(x[:, 0]), -1),
    "LSTMCell with a state": lambda x: torch.cat(
        LSTM_CELL(x[:, 0], (x[:, 1, :HIDDEN], x[:, 1, 1:])), -1
    ),
    "GRUCell": unrolled(GRU_CELL),
    "RNNCell": unrolled(RNN_CELL),
    "RNNCell, relu": unrolled(RELU_CELL),
    "constant initial state": with_initial,
    "random initial state": with_random_initial,
    "rows and columns": along_rows_and_columns,
}


@torch.no_grad()
@pytest.mark.parametrize("name", ["LSTM, both ways", "GRU", "RNN, relu", "constant initial state"])
def test_without_noise_the_mean_is_the_networks_output(name: str) -> None:
    function, x = FUNCTIONS[name], gaussian(0.0)
    y = propagate(function, x)
    assert_close(y.mean, function(x.mean), atol=1e-13)
    assert not y.covariance_matrix.any()


@torch.no_grad()
@pytest.mark.parametrize("name", FUNCTIONS)
def test_little_noise_goes_through_the_jacobian(name: str) -> None:
    function, x = FUNCTIONS[name], gaussian(1e-4)
    y = propagate(function, x)
    assert_close(y.mean, function(x.mean), atol=1e-7)  # of second order: 1e-8 times curvatures
    with torch.enable_grad():
        jacobian = torch.autograd.functional.jacobian(function, x.mean)
    for i in range(BATCH):
        slope = jacobian[i].reshape(-1, BATCH, LENGTH * INSIDE)[:, i]
        expected = slope @ x.covariance_matrix[i] @ slope.mT
        scale = float(expected.abs().max())
        assert_close(y.covariance_matrix[i], expected, atol=1e-6 * scale)


SAMPLED = [
    "LSTM of two layers",
    "LSTM, both ways",
    "GRU, both ways, two layers",
    "RNN",
    "RNN, relu",
    "LSTMCell with a state",
    "RNNCell",
    "random initial state",
    "rows and columns",
]


@torch.no_grad()
@pytest.mark.parametrize("name", SAMPLED)
def test_small_noise_agrees_with_sampling(name: str) -> None:
    function, x = FUNCTIONS[name], gaussian(0.02)
    y = propagate(function, x)
    sample = x.sample(SAMPLES // 2, torch.Generator().manual_seed(6))
    there, back = (
        function(draws.flatten(0, 1)).unflatten(0, (-1, BATCH))
        for draws in (sample, 2 * x.mean - sample)
    )
    stddev = torch.cat([there, back]).std(0)
    certain = stddev < 1e-10  # a ReLU that stays closed
    error = (y.stddev / stddev - 1)[~certain].abs().max()
    assert float(error) < 5 / (2 * SAMPLES) ** 0.5 + 2e-3
    # Draws in opposite directions leave of the mean what is of second order alone.
    bent = (there + back) / 2 - function(x.mean)
    apart = (y.mean - function(x.mean) - bent.mean(0)).abs()
    allowed = 5 * bent.std(0) / len(bent) ** 0.5 + 0.02 * bent.mean(0).abs().max() + 1e-12
    assert bool((apart <= allowed).all())


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "LSTM of two layers",
        "GRU",
        "RNN, relu",
        "RNN, both ways",
        "GRUCell",
        "random initial state",
        "rows and columns",
    ],
)
def test_a_batch_is_each_of_its_elements(name: str) -> None:
    function, x = FUNCTIONS[name], gaussian(0.1)
    y = propagate(function, x)
    for i in range(BATCH):
        one = propagate(function, x[i : i + 1])
        assert_close(y.mean[i], one.mean[0], atol=1e-11)
        assert_close(y.covariance_matrix[i], one.covariance_matrix[0], atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", ["LSTM", "GRU of two layers", "RNN, both ways"])
def test_a_sequence_without_a_batch_is_one_of_a_batch(name: str) -> None:
    """Whether or not the module puts the batch first: a sequence alone has none."""
    module, x = NETWORKS[name], gaussian(0.1)
    y = propagate(sequences(module), x)
    for i in range(BATCH):
        one, state = propagate(module, x[i])
        assert_close(one.mean, y.mean[i], atol=1e-11)
        assert_close(one.covariance_matrix, y.covariance_matrix[i], atol=1e-10)
        expected = module(x[i].mean)[1]
        state = state[0] if isinstance(state, tuple) else state
        expected = expected[0] if isinstance(expected, tuple) else expected
        assert state.mean.shape == expected.shape


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
@pytest.mark.parametrize("sizes", [(1, 3), (2, 1), (2, 2)])
def test_batch_first_and_second_are_the_same_numbers(
    kind: Callable[..., nn.Module], sizes: tuple[int, int]
) -> None:
    """Also where the batch is one, or as long as the sequence or the state."""
    batch, length = sizes
    first, second = network(kind, batch_first=True), network(kind)
    x = gaussian(0.1, (length, INSIDE), batch)
    y, z = propagate(sequences(first), x), propagate(sequences(second), x)
    assert_close(y.mean, z.mean, atol=1e-13)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=1e-13)


@torch.no_grad()
def test_a_batch_left_second_comes_back_first() -> None:
    """The states of torch are (layers, batch, features); a Gaussian has its batch in front."""
    x = gaussian(0.3)
    module = NETWORKS["LSTM of two layers"]
    output, (h, c) = propagate(lambda x: module(x.transpose(0, 1)), x)
    assert output.mean.shape == (BATCH, LENGTH, HIDDEN)
    assert h.mean.shape == c.mean.shape == (BATCH, 2, HIDDEN)
    both = propagate(everything(module), x)
    parts = [t.mean.flatten(1) for t in (output, h, c)]
    assert_close(torch.cat(parts, 1), both.mean, atol=1e-13)
    assert_close(h.mean[:, -1], output.mean[:, -1], rtol=0.0)


# A step is a propagation of its own, and all else meets it in one product.


def joint_batch(function: Function) -> tuple[Function, cp.Gaussian]:
    """Sequences of one batch that depend on each other: the batch is part of the event."""
    size = BATCH * LENGTH * INSIDE
    factor = 0.3 * (torch.eye(size, dtype=D) + numbers(size, size, seed=1) / 2) / 2
    return function, cp.Gaussian(numbers(BATCH, LENGTH, INSIDE, seed=2), factor @ factor.mT)


def beside(x: Any) -> Any:
    """Outputs beside the input that they came of, and the last states."""
    return torch.cat([everything(NETWORKS["LSTM"])(x), x.flatten(1)], 1)


REPEATED: dict[str, tuple[Function, cp.Gaussian]] = {
    **{name: (FUNCTIONS[name], gaussian(0.3)) for name in (*NETWORKS, "random initial state")},
    "beside the input": (beside, gaussian(0.3)),
    "joint batch": joint_batch(sequences(NETWORKS["LSTM of two layers"])),
    "joint batch, random initial state": joint_batch(with_random_initial),
    "many steps": (
        sequences(NETWORKS["GRU, both ways, two layers"]), gaussian(0.3, (7, INSIDE))
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    "method", [cp.GaussianLayers(), cp.Series(order=3)], ids=["exact", "series"]
)
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_steps_are_the_operations_one_after_another(
    name: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covariances along the edges of all operations, none of which knows of steps."""
    function, x = REPEATED[name]
    y = propagate(function, x, method)
    monkeypatch.setattr("covprop.carriers.full.Full.recurrent", lambda *_: None)
    expected = propagate(function, x, method)
    # Hundreds of operations of a few roundings each; series end at 1e-11 of the deviations.
    scale = float(expected.covariance_matrix.abs().max())
    assert_close(y.mean, expected.mean, atol=1e-12)
    assert_close(y.covariance_matrix, expected.covariance_matrix, atol=1e-11 * scale)


@torch.no_grad()
@pytest.mark.parametrize("name", ["LSTM, both ways", "GRU", "RNN, relu"])
def test_single_precision_is_double_precision_rounded(name: str) -> None:
    module, x = NETWORKS[name], gaussian(0.3)
    expected = propagate(sequences(module), x)
    single = copy.deepcopy(module).float()
    y = propagate(sequences(single), cp.Gaussian(x.mean.float(), x.covariance_matrix.float()))
    assert y.mean.dtype == y.covariance_matrix.dtype == torch.float32
    # A few dozen operations of two steps, and a series that ends at 2e-6.
    assert_close(y.mean.double(), expected.mean, atol=1e-5)
    scale = float(expected.covariance_matrix.abs().max())
    assert_close(y.covariance_matrix.double(), expected.covariance_matrix, atol=2e-5 * scale)


@torch.no_grad()
@pytest.mark.parametrize("name", ["LSTM, both ways", "GRU, both ways, two layers"])
def test_covariances_of_many_steps_are_semidefinite(name: str) -> None:
    """Each step gives exact moments of what is taken as jointly Gaussian."""
    y = propagate(sequences(NETWORKS[name]), gaussian(1.0, (9, INSIDE)))
    values = torch.linalg.eigvalsh(y.covariance_matrix)
    assert float(values.min()) > -1e-11 * float(values.max())


class Counted(TorchDispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_the_number_of_operators_is_linear_in_the_number_of_steps() -> None:
    """Of a series, which is as long whatever the numbers."""
    counts, method = [], cp.Series(order=2)
    for length in (4, 8, 16):
        x = gaussian(0.3, (length, INSIDE), 1)
        with Counted() as counted:
            propagate(NETWORKS["RNN, relu, both ways, two layers"], x, method)
        counts.append(counted.count)
    assert counts[2] - counts[1] < 2.02 * (counts[1] - counts[0])  # blocks of larger matrices


@torch.no_grad()
def test_activations_of_the_user_take_the_place_of_the_gates() -> None:
    """The sigmoid of a GRU's and of an LSTM's gates is torch's, and may be replaced."""
    x, tanh = gaussian(0.0), cp.activations.Quadrature(torch.tanh)
    for name in ("LSTM", "GRU"):
        module = NETWORKS[name]
        method = cp.GaussianLayers(activations={torch.sigmoid: tanh})
        y = propagate(sequences(module), x, method)
        w_ih, w_hh, b_ih, b_hh = module._flat_weights
        h = c = torch.zeros(BATCH, HIDDEN, dtype=D)
        for t in range(LENGTH):
            of_x, of_h = x.mean[:, t] @ w_ih.mT + b_ih, h @ w_hh.mT + b_hh
            if name == "LSTM":
                i, f, g, o = torch.tanh(of_x + of_h).chunk(4, -1)
                c = f * c + i * g
                h = o * torch.tanh(c)
            else:
                parts = zip(of_x.chunk(3, -1), of_h.chunk(3, -1), strict=True)
                (r, r_h), (z, z_h), (n, n_h) = parts
                r, z = torch.tanh(r + r_h), torch.tanh(z + z_h)
                n = torch.tanh(n + r * n_h)
                h = n + z * (h - n)
        assert_close(y.mean[:, -1], h, atol=1e-13)


# Dropout between layers.


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_agrees_with_sampling(kind: Callable[..., nn.Module]) -> None:
    module = network(kind, num_layers=2, dropout=0.3)
    module.weight_ih_l1.mul_(0.05)  # small noise to the second layer
    function, x = sequences(module), gaussian(0.01, batch=1)
    without = propagate(function, x)
    with cp.dropout_active(module):
        assert module.training
        y = propagate(function, x)
        torch.manual_seed(7)  # dropout takes no generator
        outputs = function(x.sample(SAMPLES, torch.Generator().manual_seed(6))[:, 0])
    assert not module.training
    stddev = outputs.std(0)
    fourth = ((outputs - outputs.mean(0)) / stddev).pow(4).mean(0)
    error = ((fourth - 1) / (4 * SAMPLES)).sqrt()
    assert bool(((y.stddev[0] / stddev - 1).abs() < 5 * error + 0.01).all())
    apart = (y.mean[0] - outputs.mean(0)).abs() / stddev
    assert bool((apart < 5 / SAMPLES**0.5 + 0.01).all())
    assert bool((y.stddev > 1.5 * without.stddev).all())


@torch.no_grad()
def test_dropout_leaves_a_single_layer_and_evaluation_alone() -> None:
    x = gaussian(0.3)
    module = network(nn.GRU, num_layers=2, dropout=0.5)
    expected = propagate(sequences(network(nn.GRU, num_layers=2)), x)
    y = propagate(sequences(module), x)
    assert_close(y.covariance_matrix, expected.covariance_matrix, rtol=0.0)
    single = network(nn.GRU)
    expected = propagate(sequences(single), x)
    with cp.dropout_active(single):
        y = propagate(sequences(single), x)
    assert_close(y.covariance_matrix, expected.covariance_matrix, rtol=0.0)


# What is refused, and gradients.


@pytest.mark.parametrize("batch_first", [True, False])
def test_projections_are_refused(batch_first: bool) -> None:
    module = network(nn.LSTM, proj_size=1, batch_first=batch_first)
    with pytest.raises(cp.UnsupportedOperation, match="proj_size has no rule"):
        propagate(sequences(module), gaussian(0.1))


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_are_refused(name: str) -> None:
    def forward(x: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 1]), batch_first=True)
        return NETWORKS[name](packed)[0]

    with pytest.raises(cp.UnsupportedOperation, match="packed sequences have no rule"):
        propagate(forward, gaussian(0.1))
    packed = nn.utils.rnn.pack_padded_sequence(numbers(2, 3, 3), torch.tensor([3, 2]), True)

    def made_by_hand(x: Any) -> Any:
        return NETWORKS[name](packed._replace(data=x))[0]

    with pytest.raises(cp.UnsupportedOperation, match="packed sequences have no rule"):
        propagate(made_by_hand, gaussian(0.1, (5, 3))[0])


def test_a_module_of_the_wrong_width_is_torchs_own_error() -> None:
    with pytest.raises(RuntimeError, match="input"):
        propagate(sequences(NETWORKS["LSTM"]), gaussian(0.1, (LENGTH, INSIDE + 1)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gradients_are_right(kind: Callable[..., nn.Module]) -> None:
    """One direction of the mean, by central differences: gradcheck would take a minute."""
    function = sequences(make(kind, 1, 1))
    x = gaussian(0.3, (2, 1))

    def total(mean: Tensor) -> Tensor:
        y = propagate(function, cp.Gaussian(mean, x.covariance_matrix))
        return (y.mean * 2).sum() + (y.covariance_matrix * numbers(2, 2, seed=4)).sum()

    mean, direction = x.mean.clone().requires_grad_(), numbers(BATCH, 2, 1, seed=5)
    (gradient,) = torch.autograd.grad(total(mean), mean)
    step = 1e-5 * direction
    with torch.no_grad():
        expected = (total(mean + step) - total(mean - step)) / 2e-5
    assert_close((gradient * direction).sum(), expected, rtol=1e-7)
