"""Filters and smoothers against textbook linear algebra, joint densities and simulated truth."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from tests.gaussians import covariance_matrix, gaussian, numbers, weight
from tests.oracles import assert_close, assert_gradients

D = torch.float64
LINEAR = 1e-9
"""Of what linear algebra in float64 computes twice in different orders, over ten steps."""
METHODS = ("linearized", "unscented", "gaussian-layers", "cumulants", "auto")
"""All of which are exact for linear functions."""
N, M, STEPS = 3, 2, 10


class System:
    """A linear system, of which the filter is that of Kalman."""

    def __init__(self, dtype: torch.dtype = D) -> None:
        self.transition, self.shift = 0.6 * weight(N, N, seed=1), weight(N, seed=2)
        self.observe, self.offset = weight(M, N, seed=3), weight(M, seed=4)
        self.process, self.error = (
            covariance_matrix(size=N, seed=5),
            covariance_matrix(size=M, seed=6),
        )
        self.start = gaussian(N, seed=7)
        self.readings = 2 * numbers(STEPS, M, seed=8)
        self.dtype = dtype

    def model(self, **changed: Any) -> cp.filters.StateSpace:
        move, look = nn.Linear(N, N, dtype=self.dtype), nn.Linear(N, M, dtype=self.dtype)
        for parameter, value in (
            (move.weight, self.transition), (move.bias, self.shift),
            (look.weight, self.observe), (look.bias, self.offset),
        ):  # fmt: skip
            parameter.requires_grad_(requires_grad=False).copy_(value)
        noises = {"process_covariance": self.process, "measurement_covariance": self.error}
        return cp.filters.StateSpace(move, look, **(noises | changed))


def kalman(system: System, readings: np.ndarray) -> dict[str, np.ndarray]:
    """The filter and smoother of a textbook (Särkkä 2013, theorems 4.2 and 8.2), in numpy."""
    F, b, H, c = (part.numpy() for part in (
        system.transition, system.shift, system.observe, system.offset))  # fmt: skip
    Q, R = system.process.numpy(), system.error.numpy()
    m, P = system.start.mean.numpy(), system.start.covariance_matrix.numpy()
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("mp", "Pp", "m", "P")}
    for y in readings:
        m, P = F @ m + b, F @ P @ F.T + Q
        found["mp"].append(m)
        found["Pp"].append(P)
        seen = ~np.isnan(y)
        h = H[seen]
        K = P @ h.T @ np.linalg.inv(h @ P @ h.T + R[np.ix_(seen, seen)])
        m, P = m + K @ (y[seen] - h @ m - c[seen]), P - K @ h @ P
        found["m"].append(m)
        found["P"].append(P)
    smooth_m, smooth_P = [m], [P]
    for t in range(len(readings) - 2, -1, -1):
        G = found["P"][t] @ F.T @ np.linalg.inv(found["Pp"][t + 1])
        m = found["m"][t] + G @ (smooth_m[0] - found["mp"][t + 1])
        P = found["P"][t] + G @ (smooth_P[0] - found["Pp"][t + 1]) @ G.T
        smooth_m.insert(0, m)
        smooth_P.insert(0, P)
    return {name: np.stack(each) for name, each in found.items()} | {
        "ms": np.stack(smooth_m), "Ps": np.stack(smooth_P)
    }  # fmt: skip


def joint_log_density(system: System, readings: Tensor) -> float:
    """Of all readings present, from one large matrix: x = A (x_0, b + q_1, ..., b + q_T)."""
    steps = len(readings)
    power = [torch.linalg.matrix_power(system.transition, k) for k in range(steps + 1)]
    blocks = [
        [power[t] if s == 0 else power[t - s] if s <= t else torch.zeros(N, N, dtype=D)
         for s in range(steps + 1)] for t in range(1, steps + 1)
    ]  # fmt: skip
    states = torch.cat([torch.cat(row, 1) for row in blocks])
    mean = states @ torch.cat([system.start.mean, system.shift.repeat(steps)])
    sources = torch.block_diag(system.start.covariance_matrix, *[system.process] * steps)
    look = torch.block_diag(*[system.observe] * steps)
    covariance = look @ states @ sources @ states.mT @ look.mT
    covariance = covariance + torch.block_diag(*[system.error] * steps)
    expected, seen = look @ mean + system.offset.repeat(steps), ~readings.reshape(-1).isnan()
    density = torch.distributions.MultivariateNormal(expected[seen], covariance[seen][:, seen])
    return float(density.log_prob(readings.reshape(-1)[seen]))


def some_missing(readings: Tensor) -> Tensor:
    """One element of a reading, a whole one, and the last."""
    readings = readings.clone()
    readings[2, 0] = readings[4, :] = readings[-1, 1] = math.nan
    return readings


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_linear_system_has_the_filter_smoother_and_likelihood_of_a_textbook(
    method: str, missing: bool
) -> None:
    system = System()
    readings = some_missing(system.readings) if missing else system.readings
    result = system.model().filter(system.start, readings, method)
    expected = {
        name: torch.from_numpy(value) for name, value in kalman(system, readings.numpy()).items()
    }
    smoothed = result.smooth()
    for found, mean, covariance in (
        (result.predicted, "mp", "Pp"), (result.filtered, "m", "P"), (smoothed, "ms", "Ps")
    ):  # fmt: skip
        assert_close(found.mean, expected[mean], atol=LINEAR)
        assert_close(found.covariance_matrix, expected[covariance], atol=LINEAR)
    assert math.isclose(
        float(result.log_likelihood), joint_log_density(system, readings), rel_tol=LINEAR
    )


def test_a_filter_is_predictions_and_updates_and_an_update_is_a_condition() -> None:
    system, model = System(), System().model()
    state, method = system.start, cp.GaussianLayers()
    result = model.filter(state, system.readings, method)
    for t, reading in enumerate(system.readings):
        state = model.predict(state, method)
        given = cp.joint(model.measurement, state, method).condition(
            [N, N + 1], reading, covariance=system.error
        )
        state, expected, log_likelihood = model.update(state, reading, method)
        assert_close(state.mean, given.mean, atol=LINEAR)
        assert_close(state.covariance_matrix, given.covariance_matrix, atol=LINEAR)
        assert_close(log_likelihood, expected.log_prob(reading), atol=LINEAR)
        assert_close(result.filtered[t].mean, state.mean, rtol=0.0)
        assert_close(result.log_likelihoods[t], log_likelihood, rtol=0.0)
        assert_close(result.readings[t].covariance_matrix, expected.covariance_matrix, rtol=0.0)


def test_a_reading_of_which_all_is_missing_changes_nothing() -> None:
    system, model = System(), System().model()
    after = model.update(system.start, torch.full((M,), math.nan, dtype=D), cp.GaussianLayers())
    assert_close(after.state.mean, system.start.mean, rtol=0.0)
    assert_close(after.state.covariance_matrix, system.start.covariance_matrix, atol=1e-15)
    assert float(after.log_likelihood) == 0


def pendulum(state: Tensor) -> Tensor:
    angle, speed = state[..., 0], state[..., 1]
    faster = speed - 0.981 * torch.sin(angle)
    return torch.stack((angle + 0.1 * faster, faster), -1)


def camera(state: Tensor) -> Tensor:
    return torch.sin(state[..., :1])


def pendulum_model(**changed: Any) -> cp.filters.StateSpace:
    noises = {"process_stddev": torch.tensor([0.02, 0.1]), "measurement_stddev": 0.05}
    return cp.filters.StateSpace(pendulum, camera, **(noises | changed))


@pytest.mark.parametrize("batch", [(3,), (2, 2)])
@pytest.mark.parametrize("method", [cp.Linearized(), cp.Unscented(), cp.GaussianLayers()])
def test_a_batch_is_a_loop(method: Any, batch: tuple[int, ...]) -> None:
    start, model = gaussian(2, batch=batch, scale=0.1), pendulum_model()
    readings = 0.5 * numbers(5, *batch, 1, seed=3)
    readings[1, 0] = math.nan  # of some of the batch alone
    result = model.filter(start, readings, method)
    smoothed = result.smooth()
    assert result.filtered.batch_shape == (5, *batch)
    assert result.log_likelihood.shape == batch
    for place in np.ndindex(*batch):
        alone = model.filter(start[place], readings[(slice(None), *place)], method)
        index = (slice(None), *place)
        for many, one in ((result.filtered, alone.filtered), (smoothed, alone.smooth())):
            assert_close(many[index].mean, one.mean, atol=1e-12)
            assert_close(many[index].covariance_matrix, one.covariance_matrix, atol=1e-12)
        assert_close(result.log_likelihoods[index], alone.log_likelihoods, atol=1e-10)


def test_a_single_start_and_noises_of_their_own_stand_for_a_batch() -> None:
    start, readings = gaussian(2, scale=0.1), 0.5 * numbers(4, 3, 1, seed=3)
    noises = covariance_matrix(3, size=2, seed=4)
    model = pendulum_model(process_stddev=None, process_covariance=noises)
    result = model.filter(start, readings, "unscented")
    for i in range(3):
        own = pendulum_model(process_stddev=None, process_covariance=noises[i])
        alone = own.filter(start, readings[:, i], "unscented")
        assert_close(result.filtered[:, i].mean, alone.filtered.mean, atol=1e-12)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "auto"])
def test_the_likelihood_has_the_gradient_of_differences(method: str) -> None:
    """But for the default, whose values may come from points, and gradients from layers."""
    readings = some_missing(0.5 * numbers(6, 2, seed=3))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def log_likelihood(
        mean: Tensor, root: Tensor, first: Tensor, stddev: Tensor, error: Tensor
    ) -> Tensor:
        def move(x: Tensor) -> Tensor:
            return x + 0.1 * torch.tanh(x @ first)

        def look(x: Tensor) -> Tensor:
            return network(x)

        model = cp.filters.StateSpace(
            move, look, process_stddev=stddev, measurement_covariance=error @ error.mT
        )
        start = cp.Gaussian(mean, root @ root.mT)
        result = model.filter(start, readings, method)
        return result.log_likelihood + result.smooth().mean.sum()

    network.requires_grad_(requires_grad=False)
    inputs = [weight(2, seed=1), weight(2, 2, seed=2), weight(2, 2, seed=3),
              torch.tensor([0.2, 0.3], dtype=D), torch.eye(2, dtype=D) * 0.3]  # fmt: skip
    assert_gradients(log_likelihood, inputs, atol=1e-5)


def test_networks_and_noises_are_parameters_and_training_raises_the_likelihood() -> None:
    system = System()
    stddev = nn.Parameter(torch.full((M,), 3.0, dtype=D))
    model = cp.filters.StateSpace(
        nn.Linear(N, N).double(), nn.Linear(N, M).double(),
        process_stddev=0.5, measurement_stddev=stddev,
    )  # fmt: skip
    assert len(list(model.parameters())) == 5
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    values = []
    for _ in range(10):
        optimiser.zero_grad()
        loss = -model.filter(system.start, system.readings, "linearized").log_likelihood
        loss.backward()
        optimiser.step()
        values.append(float(loss.detach()))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert values[-1] < values[0] - 1


def test_float32_stays_float32_and_is_that_of_float64() -> None:
    single, double = System(torch.float32), System()
    found = single.model().filter(
        single.start.to(torch.float32), single.readings.float(), "unscented"
    )
    expected = double.model().filter(double.start, double.readings, "unscented")
    for one, other in ((found.filtered, expected.filtered), (found.smooth(), expected.smooth())):
        assert one.dtype == torch.float32
        assert_close(one.mean.double(), other.mean, atol=1e-4)
        assert_close(one.covariance_matrix.double(), other.covariance_matrix, atol=1e-4)
    assert found.log_likelihood.dtype == torch.float32
    assert_close(found.log_likelihood.double(), expected.log_likelihood, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("method", ["linearized", "unscented", "gaussian-layers"])
def test_sharp_readings_of_a_vague_state_leave_covariances_semi_definite(
    method: str, dtype: torch.dtype
) -> None:
    """P - K C^T, a difference of numbers 1e10 times as large as itself, would not be."""
    start = cp.Gaussian.isotropic(torch.zeros(N, dtype=dtype), stddev=1e3)
    system = System(dtype)
    model = system.model(
        process_covariance=None, process_stddev=0.0, measurement_covariance=None,
        measurement_stddev=1e-2,
    )  # fmt: skip
    result = model.filter(start, system.readings.to(dtype), method)
    for found in (result.filtered, result.smooth()):
        eigenvalues = torch.linalg.eigvalsh(found.covariance_matrix.double())
        rounding = N * torch.finfo(dtype).eps * eigenvalues[..., -1]
        assert bool((eigenvalues[..., 0] >= -rounding).all())
        assert bool((found.variance > 0).all())


def test_a_known_state_without_noise_stays_known() -> None:
    """Singular covariances: nothing is divided by zero, and the smoother moves nothing."""
    start = cp.Gaussian.isotropic(torch.tensor([1.0, 0.0], dtype=D), stddev=0.0)
    model = pendulum_model(process_stddev=None)
    state, readings = start.mean, 0.5 * numbers(4, 1, seed=2)
    result = model.filter(start, readings, cp.Unscented())
    smoothed = result.smooth()
    for t in range(4):
        state = pendulum(state)
        for found in (result.filtered[t], smoothed[t]):
            assert_close(found.mean, state, atol=1e-14)
            assert_close(found.covariance_matrix, torch.zeros(2, 2, dtype=D), atol=1e-28)


def test_units_of_the_state_do_not_matter() -> None:
    """Elements of 1e-8 and 1e8: the smoother's pseudo-inverse drops neither."""
    scale = torch.tensor([1e-8, 1.0, 1e8], dtype=D)
    system = System()
    plain = system.model().filter(system.start, system.readings, "gaussian-layers")
    outer = scale[:, None] * scale
    model = cp.filters.StateSpace(
        lambda x: (x / scale) @ system.transition.mT * scale + system.shift * scale,
        lambda x: (x / scale) @ system.observe.mT + system.offset,
        process_covariance=system.process * outer,
        measurement_covariance=system.error,
    )
    start = cp.Gaussian(system.start.mean * scale, system.start.covariance_matrix * outer)
    found = model.filter(start, system.readings, "gaussian-layers").smooth()
    assert_close(found.mean / scale, plain.smooth().mean, atol=LINEAR)
    assert_close(found.covariance_matrix / outer, plain.smooth().covariance_matrix, atol=LINEAR)


LORENZ_STEP = 0.05


def lorenz(state: Tensor) -> Tensor:
    """Two Euler half steps of Lorenz's equations of 1963: products and sums, which have rules."""
    for _ in range(2):
        x, y, z = state[..., 0], state[..., 1], state[..., 2]
        rate = torch.stack((10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z), -1)
        state = state + LORENZ_STEP / 2 * rate
    return state


def first_saturated(state: Tensor) -> Tensor:
    """A sensor that saturates."""
    return 10 * torch.tanh(state[..., :1] / 10)


@pytest.fixture(scope="module")
def runs() -> tuple[Tensor, Callable[[Any], cp.filters.FilterResult]]:
    """The true states of some systems, and filters of their readings."""
    count, steps, generator = 60, 25, torch.Generator().manual_seed(0)
    kick, error = 0.3, 1.0
    start = cp.Gaussian.isotropic(torch.tensor([1.0, 1.0, 25.0], dtype=D), stddev=2.0)
    state, states = start.sample(count, generator), []
    for _ in range(steps):
        noise = torch.randn(count, 3, generator=generator, dtype=D)
        state = lorenz(state) + kick * noise
        states.append(state)
    true = torch.stack(states)
    noise = torch.randn(steps, count, 1, generator=generator, dtype=D)
    readings = first_saturated(true) + error * noise
    model = cp.filters.StateSpace(
        lorenz, first_saturated, process_stddev=kick, measurement_stddev=error
    )
    return true, lambda method: model.filter(start, readings, method)


@pytest.mark.parametrize("method", [cp.GaussianLayers(), cp.Unscented()])
def test_moment_matching_follows_lorenz_at_least_as_well_as_the_extended_filter(
    method: Any, runs: tuple[Tensor, Callable[[Any], cp.filters.FilterResult]]
) -> None:
    """Differences system by system, within the standard error of their mean."""
    true, run = runs
    ours, extended = run(method), run(cp.Linearized())

    def errors(found: cp.Gaussian) -> Tensor:
        return (found.mean - true).square().mean((0, -1)).sqrt()

    gains = {
        "filter": errors(extended.filtered) - errors(ours.filtered),
        "smoother": errors(extended.smooth()) - errors(ours.smooth()),
        "likelihood": ours.log_likelihood - extended.log_likelihood,
    }
    for name, gain in gains.items():
        assert gain.mean() >= -gain.std() / math.sqrt(len(gain)), name


def test_smoothing_brings_states_nearer_to_the_truth(
    runs: tuple[Tensor, Callable[[Any], cp.filters.FilterResult]],
) -> None:
    true, run = runs
    result = run(cp.GaussianLayers())
    smoothed = result.smooth()
    assert (smoothed.mean - true).square().mean() < 0.8 * (
        result.filtered.mean - true
    ).square().mean()
    assert_close(smoothed[-1].mean, result.filtered[-1].mean, atol=1e-12)


def test_what_cannot_be_filtered_is_said() -> None:
    system, model = System(), System().model()
    state, readings = system.start, system.readings
    with pytest.raises(cp.UnsupportedOperation, match="variances alone"):
        model.filter(state, readings, cp.AssumedDensity())
    with pytest.raises(cp.UnsupportedOperation, match="variances alone"):
        model.update(state, readings[0], cp.Split(3, base=cp.AssumedDensity()))
    with pytest.raises(ValueError, match="one of them"):
        cp.filters.StateSpace(torch.sin, torch.sin)
    with pytest.raises(ValueError, match="not both"):
        system.model(process_stddev=0.1)
    with pytest.raises(cp.InvalidGaussian, match="no density"):
        system.model(measurement_covariance=None, measurement_stddev=0.0).update(
            cp.Gaussian.isotropic(torch.zeros(N, dtype=D), stddev=0.0), readings[0], "linearized"
        )
    with pytest.raises(cp.InvalidGaussian, match="infinite"):
        model.update(state, torch.tensor([0.0, math.inf]), "linearized")
    with pytest.raises(cp.InvalidGaussian, match=r"shape of the measurement, \(2,\), not \(1,\)"):
        model.update(state, torch.zeros(1), "linearized")
    with pytest.raises(cp.InvalidGaussian, match="time"):
        model.filter(state, readings[0], "linearized")
    with pytest.raises(cp.InvalidGaussian, match="time first"):
        model.filter(gaussian(N, batch=(4,)), readings[:, None], "linearized")
    with pytest.raises(cp.InvalidGaussian, match="batch_dims"):
        model.predict(cp.Gaussian.isotropic(torch.zeros(5, N), stddev=1.0))
    with pytest.raises(cp.InvalidGaussian, match="makes 2"):
        cp.filters.StateSpace(model.measurement, model.measurement, measurement_stddev=1.0).predict(
            state, "linearized"
        )
    for noise, words in (
        ({"process_stddev": -0.1}, "process_stddev is negative"),
        ({"process_stddev": torch.ones(2)}, r"process_stddev has the shape \(\) or \(3,\)"),
        ({"process_covariance": torch.ones(2, 2)}, "process_covariance has the shape"),
        ({"process_covariance": -torch.eye(3)}, "process noise: .*negative"),
        ({"process_stddev": math.nan}, "process noise: .*NaN"),
    ):
        with pytest.raises(cp.InvalidGaussian, match=words):
            system.model(**({"process_covariance": None} | noise)).predict(state, "linearized")


def test_a_method_that_makes_an_indefinite_covariance_is_told() -> None:
    """Negative weights of sigma points: what is repaired is more than rounding."""
    model = cp.filters.StateSpace(torch.exp, torch.exp, measurement_stddev=0.1)
    state = cp.Gaussian.isotropic(torch.zeros(2, dtype=D), stddev=1.0)
    with pytest.warns(cp.ApproximationWarning, match="set to zero"):
        after = model.update(state, torch.ones(2, dtype=D), cp.Unscented(kappa=-1.5)).state
    assert float(torch.linalg.eigvalsh(after.covariance_matrix)[0]) >= 0
