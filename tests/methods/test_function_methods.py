"""What all methods share that evaluate the network on plain tensors: inputs, nests, batches."""

from collections import namedtuple
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.covariance import Diagonal
from covprop.diagnostics.compare import footprint
from covprop.text_table import in_bytes
from tests.layers import joint, propagate
from tests.oracles import assert_close
from tests.test_propagate import assert_same, gaussian

D = torch.float64
ROUNDING = 1e-12


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def sampled(**options: Any) -> cp.MonteCarlo:
    return cp.MonteCarlo(4_000, torch.Generator().manual_seed(3), **options)


DETERMINISTIC = {"linearized": cp.Linearized(), "unscented": cp.Unscented()}
SAMPLED = {
    "plain": lambda: sampled(),
    "antithetic": lambda: sampled(antithetic=True),
    "sobol": lambda: sampled(sobol=True),
}
deterministic = pytest.mark.parametrize("method", DETERMINISTIC.values(), ids=DETERMINISTIC)
every = pytest.mark.parametrize(
    "make",
    [*(lambda method=method: method for method in DETERMINISTIC.values()), *SAMPLED.values()],
    ids=[*DETERMINISTIC, *SAMPLED],
)


def assert_agrees(found: Any, exact: Any) -> None:
    """To rounding, or within five standard errors where there are some."""
    assert found.mean.shape == exact.mean.shape
    assert found.batch_shape == exact.batch_shape
    if found.samples is None:
        assert_same(found, exact, ROUNDING)
        return
    for got, want, error in (
        (found.mean, exact.mean, found.mean_stderr),
        (found.covariance_matrix, exact.covariance_matrix, found.covariance_stderr),
    ):
        assert got.shape == want.shape == error.shape
        assert bool(((got - want).abs() <= 5 * error + ROUNDING).all())


def linear(*batch: int) -> tuple[nn.Module, cp.Gaussian]:
    torch.manual_seed(1)
    layers = nn.Linear(4, 7), nn.Linear(7, 5), nn.Linear(5, 3)
    return nn.Sequential(*layers).to(D).requires_grad_(requires_grad=False), gaussian(*batch)


@every
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_a_linear_network_is_exact(make: Any, batch: tuple[int, ...]) -> None:
    model, x = linear(*batch)
    assert_agrees(propagate(model, x, make()), propagate(model, x))


@every
def test_a_singular_covariance_and_a_certain_input_are_no_obstacle(make: Any) -> None:
    model, _ = linear()
    for x in (
        gaussian(2, rank=1),
        cp.Gaussian.isotropic(torch.ones(2, 4, dtype=D), stddev=0.0, batch_dims=1),
    ):
        assert_agrees(propagate(model, x, make()), propagate(model, x))


@every
def test_several_inputs_are_independent_and_plain_arguments_pass(make: Any) -> None:
    x, y = (
        gaussian(2),
        cp.Gaussian.diagonal(gaussian(2).mean, variance=gaussian(2).variance, batch_dims=1),
    )
    weight = torch.linspace(-1, 1, 8, dtype=D).reshape(2, 4)

    def model(pair: Any, factor: float, *, other: Any, weight: Tensor) -> Any:
        return {"sum": factor * pair[0] + weight * other, "first": pair[0][:, :2]}

    arguments: Any = ((x, 3), 2.0)
    found = propagate(model, *arguments, method=make(), other=y, weight=weight)
    exact = propagate(model, *arguments, other=y, weight=weight)
    assert list(found) == ["sum", "first"]
    for name in found:
        assert_agrees(found[name], exact[name])


Pair = namedtuple("Pair", "first second")


@every
def test_outputs_come_back_in_the_nest_they_came_in(make: Any) -> None:
    constant = torch.ones(2)

    def model(x: Any) -> Any:
        y = x[..., :2] - x[..., 2:]
        return {"pair": Pair(x, y), "list": [y, (x, constant)], "plain": (1, "name", None, 2.5)}

    x, method = gaussian(3), make()
    found, exact = propagate(model, x, method), propagate(model, x)
    assert isinstance(found["pair"], Pair)
    assert isinstance(found["list"], list)
    assert found["list"][1][1] is constant
    assert found["plain"] == (1, "name", None, 2.5)
    assert_agrees(found["pair"].first, exact["pair"].first)
    assert_agrees(found["pair"].second, exact["pair"].second)
    assert found["list"][0].method == method


def curved(x: Any) -> Any:
    return torch.tanh(x @ torch.linspace(-1, 1, 12, dtype=x.dtype).reshape(4, 3))


@deterministic
def test_a_batch_is_its_elements(method: Any) -> None:
    x = gaussian(3)
    together = propagate(curved, x, method)
    for i, element in enumerate(x):
        assert_same(together[i], propagate(curved, element, method), 1e-14)


@deterministic
def test_independent_inputs_are_the_same_written_out_and_never_made_dense(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = cp.Gaussian.diagonal(gaussian(2).mean, variance=gaussian(2).variance, batch_dims=1)
    dense = propagate(curved, cp.Gaussian(x.mean, x.covariance_matrix), method)

    def refuse(self: Diagonal) -> Tensor:
        raise AssertionError(f"{self} is written out")

    monkeypatch.setattr(Diagonal, "matrix", refuse)
    assert_same(propagate(curved, x, method), dense, 1e-14)
    propagate(curved, x, sampled())
    propagate(curved, x, sampled(sobol=True))


@every
def test_single_precision_stays_and_is_near_double(make: Any) -> None:
    x = gaussian(2)
    with torch.no_grad():
        found = propagate(curved, x.to(torch.float32), make())
        wide = propagate(curved, x, make())
    assert found.dtype == torch.float32
    if found.samples is None:
        assert_same(found.to(D), wide, 2e-6)
    else:
        assert found.mean_stderr.dtype == found.covariance_stderr.dtype == torch.float32
        assert_agrees(found.to(D), wide)  # other numbers are drawn


def cnn(start: int) -> nn.Module:
    torch.manual_seed(2)
    layers = (
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.AvgPool2d(2),
        nn.Flatten(start), nn.Linear(12, 2),
    )  # fmt: skip
    if start != 1:
        layers = layers[:1] + layers[2:]  # batch norm wants a batch
    return nn.Sequential(*layers).to(D).eval().requires_grad_(requires_grad=False)


@every
@pytest.mark.parametrize("batch", [(), (1,), (2,)])
def test_images_go_through_convolutions(make: Any, batch: tuple[int, ...]) -> None:
    shape = (*batch, 1, 4, 4)
    mean = torch.linspace(-1, 1, shape[0] * 16 if batch else 16, dtype=D).reshape(shape)
    x = cp.Gaussian.isotropic(mean, stddev=1e-3, batch_dims=len(batch))
    model = cnn(1 if batch else -3)
    found, exact = propagate(model, x, make()), propagate(model, x)
    assert found.mean.shape == (*batch, 2)
    assert_close(found.mean, exact.mean, atol=1e-4)
    assert_close(found.covariance_matrix, exact.covariance_matrix, atol=2e-7)  # of about 1e-6
    assert torch.equal(x.mean, mean)


def forked(x: Any) -> Any:
    """Control flow that follows the numbers, which vmap cannot do."""
    y = x.sum(-1, keepdim=True) * 0 + x
    if float(y.detach().sum()) > -1e9:
        out = torch.zeros_like(y)
        out[..., :] = 2 * y
        return out
    return y


@every
def test_what_cannot_be_vectorised_goes_one_by_one(make: Any) -> None:
    x, method = gaussian(2), make()
    if method == sampled():
        method = cp.MonteCarlo(300, torch.Generator().manual_seed(0))
    found = propagate(forked, x, method)
    assert_agrees(found, propagate(lambda x: 2 * x, x))


@every
def test_recurrent_layers_work(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(2, 3, batch_first=True).to(D).requires_grad_(requires_grad=False)
    x = cp.Gaussian.isotropic(torch.zeros(2, 3, 2, dtype=D), stddev=1e-3, batch_dims=1)
    method = make()
    method = cp.MonteCarlo(500) if isinstance(method, cp.MonteCarlo) else method
    found, exact = (propagate(model, x, m)[0] for m in (method, cp.Exact()))
    assert_close(found.mean, exact.mean, atol=1e-4)
    assert_close(found.variance, exact.variance, rtol=0.4, atol=1e-12)


@every
def test_the_batch_may_be_moved_and_comes_back_first(make: Any) -> None:
    x = gaussian(3, size=3)
    found = propagate(lambda x: (2 * x).transpose(0, 1), x, make())
    assert_agrees(found, propagate(lambda x: 2 * x, x))


@every
def test_a_model_that_mixes_the_batch_is_refused(make: Any) -> None:
    for model in (lambda x: x.sum(0), lambda x: x - x.mean(0), lambda x: x.flip(0)):
        with pytest.raises(cp.BatchDimensionError, match="are mixed"):
            propagate(model, gaussian(3), make())


@every
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: x.argmax(-1), "torch.int64 numbers, which have no Gaussian"),
        (
            lambda x: x[: 1 + int(x[0] > float(gaussian().mean[0]) + 1e-6)],
            "the shape of the model's result depends on its input",
        ),
        (lambda x: float(x.sum()), "the model returns the number"),
        (lambda x: {x.sum()}, "the model returns a set"),
    ],
)
def test_what_has_no_moments_is_refused(make: Any, model: Any, message: str) -> None:
    with pytest.raises(cp.UnsupportedOperation, match=message):
        propagate(model, gaussian(), make())


@every
def test_a_model_that_returns_no_gaussian_returns_what_it_returns(make: Any) -> None:
    assert propagate(lambda x: (x.shape[-1], "a"), gaussian(), make()) == (4, "a")
    assert torch.equal(propagate(torch.zeros_like, gaussian(), make()), torch.zeros(4, dtype=D))


def test_dropout_is_sampled_or_refused() -> None:
    x = gaussian()

    def model(x: Any) -> Any:
        return F.dropout(x, 0.5, training=True)

    for method in (cp.Linearized(), cp.Unscented(), cp.PiecewiseLinear()):
        with pytest.raises(cp.UnsupportedOperation, match="draws random numbers, as dropout"):
            propagate(model, x, method)
    torch.manual_seed(0)
    found = propagate(model, x, cp.MonteCarlo(20_000))
    assert_agrees(found, propagate(model, x))
    assert float(found.variance.sum()) > 1.5 * float(x.variance.sum())


@pytest.mark.parametrize("batch", [(), (3,)])
def test_draws_from_a_generator_of_the_model_are_averaged_or_refused(
    batch: tuple[int, ...],
) -> None:
    own = torch.Generator().manual_seed(2)
    x = cp.Gaussian.isotropic(torch.ones(*batch, 4, dtype=D), stddev=0.1, batch_dims=len(batch))

    def model(x: Any) -> Any:
        return x + torch.randn(x.shape, generator=own, dtype=D)

    for method in (cp.GaussianLayers(), cp.Cumulants(), cp.Sketched(16), cp.Linearized()):
        state = own.get_state()
        with pytest.raises(cp.UnsupportedOperation, match="draws random numbers"):
            propagate(model, x, method)
        assert torch.equal(own.get_state(), state)
    for sampling in (cp.QuasiMonteCarlo(20_000), cp.Auto()):
        state = own.get_state()
        found = propagate(model, x, sampling)
        assert torch.equal(own.get_state(), state)
        assert torch.equal(found.mean, propagate(model, x, sampling).mean)
        error = found.error
        assert error is not None
        assert error.largest < 0.05
        assert bool(((found.mean - 1).abs() < 2 * error.mean * found.stddev).all())
        assert bool((found.stddev / 1.01**0.5 - 1).abs().le(2 * error.stddev).all())
    found = propagate(model, x, cp.MonteCarlo(20_000))
    assert bool((found.variance - 1.01).abs().lt(0.06).all())  # 6 of 0.01
    assert not torch.equal(found.mean, propagate(model, x, cp.MonteCarlo(20_000, _seeded())).mean)


@pytest.mark.parametrize(
    "method", [cp.GaussianLayers(), cp.Linearized(), cp.QuasiMonteCarlo(1024), cp.Auto()]
)
def test_draws_that_begin_anew_in_every_call_are_constants(method: Any) -> None:
    def model(x: Any) -> Any:
        return 2 * x + torch.randn(4, generator=_seeded(), dtype=D)

    x = gaussian()
    found = propagate(model, x, method)
    shift = torch.randn(4, generator=_seeded(), dtype=D)
    torch.testing.assert_close(found.mean, 2 * x.mean + shift)
    torch.testing.assert_close(found.covariance_matrix, 4 * x.covariance_matrix)


def test_constants_and_draws_of_one_model_are_told_apart() -> None:
    own = torch.Generator().manual_seed(2)

    def model(x: Any) -> Any:
        constant = torch.randn(4, generator=_seeded(), dtype=D)
        return x + 10 * constant + torch.randn(4, generator=own, dtype=D)

    x = gaussian()
    found = propagate(model, x, cp.QuasiMonteCarlo(4096))
    shift = 10 * torch.randn(4, generator=_seeded(), dtype=D)
    error = found.error
    assert error is not None
    assert bool(((found.mean - x.mean - shift).abs() < 2 * error.mean * found.stddev).all())
    expected = (x.variance + 1).sqrt()
    assert bool((found.stddev / expected - 1).abs().le(2 * error.stddev).all())
    with pytest.raises(cp.UnsupportedOperation, match=r"draws random numbers \(torch.randn\)"):
        propagate(model, x)


def test_looking_at_a_model_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    propagate(curved, gaussian(), sampled())
    propagate(curved, gaussian(), cp.Linearized())
    assert torch.equal(torch.get_rng_state(), state)


@every
def test_a_plan_is_refused_in_one_sentence(make: Any) -> None:
    with pytest.raises(cp.UnsupportedOperation, match="evaluates the model on plain tensors"):
        cp.plan(curved, gaussian(), method=make())


@every
def test_moments_that_overflow_are_refused(make: Any) -> None:
    with pytest.raises(cp.MomentOverflow, match="not finite"):
        propagate(lambda x: x * float("inf"), gaussian(), make())


@every
def test_covariances_of_outputs_that_do_not_fit_are_refused(make: Any) -> None:
    with pytest.raises(cp.TooLarge, match="4,000,000 outputs would need"):
        propagate(lambda x: x.repeat(1_000_000), gaussian(), make())


@every
def test_a_bar_counts_what_is_done(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    propagate(curved, gaussian(), make(), progress=True)
    assert "100%" in capfd.readouterr().err


@every
def test_joint_gaussians_are_those_of_a_linear_model(make: Any) -> None:
    model, x = linear(2)
    method = make()
    assert_agrees(joint(model, x, method), joint(model, x))


@every
def test_inputs_and_parameters_are_untouched(make: Any) -> None:
    model, x = linear(2)
    before = x.mean.clone(), x.covariance_matrix.clone(), [p.clone() for p in model.parameters()]
    propagate(lambda x: model(x.mul_(2)), x, make())
    assert torch.equal(x.mean, before[0])
    assert torch.equal(x.covariance_matrix, before[1])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[2], strict=True))


@deterministic
def test_gradients_reach_weights_means_and_covariances(method: Any) -> None:
    x = gaussian(2)
    weight = torch.linspace(-1, 1, 8, dtype=D).reshape(4, 2).requires_grad_()
    mean, covariance = x.mean.clone().requires_grad_(), x.covariance_matrix.clone().requires_grad_()

    def moments(weight: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        even = (covariance + covariance.mT) / 2
        y = propagate(
            lambda x: torch.tanh(x @ weight), cp.Gaussian(mean, even, validate_args=False), method
        )
        return y.mean, y.covariance_matrix

    assert torch.autograd.gradcheck(moments, (weight, mean, covariance))


def test_sampling_records_nothing_for_autograd() -> None:
    model = nn.Linear(4, 2).to(D)
    y = propagate(model, gaussian(), sampled())
    assert not y.mean.requires_grad
    assert not y.covariance_matrix.requires_grad


def attention() -> nn.Module:
    layer = nn.MultiheadAttention(6, 2, batch_first=True)

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return self.layer(x, x, x, need_weights=False)[0]

    return SelfAttention()


TRANSFORMERS = {
    "attention": attention,
    "layer": lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2
    ),
}


@every
@pytest.mark.parametrize(
    ("name", "dtype"), [("attention", torch.float32), ("layer", D), ("encoder", torch.float32)]
)
def test_batches_pass_the_fast_path_of_attention(make: Any, name: str, dtype: Any) -> None:
    """Torch evaluates them in another way, which rounds otherwise, where nobody watches."""
    torch.manual_seed(2)
    model = TRANSFORMERS[name]().to(dtype).eval().requires_grad_(requires_grad=False)
    mean = torch.randn(2, 4, 6, dtype=dtype)
    method, stddev = make(), 1e-2
    y = propagate(model, cp.Gaussian.isotropic(mean, stddev=stddev, batch_dims=1), method)
    assert y.batch_shape == (2,)
    assert_close(y.mean, model(mean), atol=1e-2)
    jacobian = torch.autograd.functional.jacobian(model, mean[:1]).reshape(24, 24)
    linear = stddev**2 * jacobian @ jacobian.mT
    slack = 0.3 if isinstance(method, cp.MonteCarlo) else 0.02
    assert float((y.covariance_matrix[0] - linear).norm()) < slack * float(linear.norm())


@every
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_memory_is_what_is_checked(
    make: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covprop.methods.montecarlo.DRAWN", 2**14)  # blocks are small
    size, method = 1000, make()
    if isinstance(method, cp.MonteCarlo):
        method = replace(method, samples=64)
    weight = torch.ones(4, size, dtype=dtype)
    x = cp.Gaussian.isotropic(torch.zeros(4, dtype=dtype), stddev=1.0)
    with torch.no_grad():
        call = footprint(lambda: propagate(lambda x: x @ weight, x, method), x.device)
    counted = method.entry_bytes(dtype)
    assert counted - 4 < call.peak_bytes / size**2 < counted + 8  # and strips of a matrix


@every
def test_memory_is_checked_for_all_that_the_method_holds(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, repeats = make(), 1_000_000
    held = method.entry_bytes(D) * (4 * repeats) ** 2
    monkeypatch.setattr("covprop.methods.call.free_bytes", lambda _: held - 1)
    with pytest.raises(cp.TooLarge, match=f"need {in_bytes(held)}"):
        propagate(lambda x: x.repeat(repeats), gaussian(), method)
