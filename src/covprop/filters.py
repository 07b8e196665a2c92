"""Kalman filters and smoothers of state-space models whose parts are networks, by any method.

A state-space model (Särkkä, Bayesian Filtering and Smoothing, 2013) has independent noises q and r:

    x_t = transition(x_{t-1}) + q_t
    y_t = measurement(x_t) + r_t

All that a filter needs of either function is the joint Gaussian of its input and its output,
`cp.joint`: `cp.Linearized()` makes it the extended Kalman filter, `cp.Unscented()` the unscented
one, `cp.GaussianLayers()` one of moment matching. Covariances are positive semi-definite by
construction (Joseph's form), and computed in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from covprop.covariance.base import symmetric
from covprop.covariance.semidefinite import nearest_semidefinite
from covprop.errors import ApproximationWarning, InvalidGaussian, warn_user
from covprop.gaussian import Gaussian
from covprop.kernels.normal import inverse_deviation
from covprop.methods import Method, as_method
from covprop.propagate import AUTO, Model, check_gaussian, joint

__all__ = ["FilterResult", "StateSpace", "Update"]

HALF_LOG_2_PI = math.log(2 * math.pi) / 2
INDEFINITE = 1e-4
"""Eigenvalues of correlations below zero by this part of the largest are no roundings."""


@final
class Update(NamedTuple):
    """A state after an update.

    Attributes:
        state: The Gaussian of the state, given the reading.
        reading: The predicted Gaussian of the reading, including its noise.
        log_likelihood: The log-likelihood of the measured elements, (*batch,); 0 if all are
            missing.

    Example:
        model = cp.filters.StateSpace(torch.sin, torch.cos, measurement_stddev=0.1)
        state = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
        model.update(state, torch.tensor([0.8, torch.nan])).log_likelihood
    """

    state: Gaussian
    reading: Gaussian
    log_likelihood: Tensor


@final
@dataclass(frozen=True)
class FilterResult:
    """States and likelihoods of a sequence; time is the first dimension of each batch.

    Attributes:
        predicted: The state x_t, given the readings before t, (time, *batch).
        filtered: The state x_t, given the readings up to t.
        readings: The predicted reading y_t, including its noise, given the readings before t.
        log_likelihoods: log p(y_t | readings before t), (time, *batch).
        transitions: The states x_{t-1} and x_t together, 2 n elements, given the readings before t.

    Example:
        model = cp.filters.StateSpace(torch.sin, torch.cos, measurement_stddev=0.1)
        state = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
        result = model.filter(state, torch.ones(5, 2))
        result.filtered.mean, result.filtered[-1], result.log_likelihood
    """

    predicted: Gaussian
    filtered: Gaussian
    readings: Gaussian
    log_likelihoods: Tensor
    transitions: Gaussian

    @property
    def log_likelihood(self) -> Tensor:
        """log p(all readings), (*batch,), to be maximised in training."""
        return self.log_likelihoods.sum(0)

    def smooth(self) -> Gaussian:
        """The states x_t, given all readings: Rauch, Tung & Striebel (1965), (time, *batch).

        It takes the linearisations of the filter, so that no function is evaluated again.

        Example:
            model = cp.filters.StateSpace(torch.sin, torch.cos, measurement_stddev=0.1)
            state = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
            model.filter(state, torch.ones(5, 2)).smooth().stddev
        """
        size, rounding = self.filtered.event_shape.numel(), torch.finfo(self.filtered.dtype).eps
        mean, covariance = _moments(self.transitions)
        after, later = mean[..., size:], covariance[..., size:, size:]
        gains = covariance[..., :size, size:] @ _pseudo_inverse(later, rounding)
        residuals = _conditional(covariance, gains)
        mean, covariance = _moments(self.filtered[-1])
        means, covariances = [mean], [covariance]
        for t in range(len(self.filtered) - 1, 0, -1):
            mean = self.filtered.mean[t - 1].double() + _times(gains[t], mean - after[t])
            covariance = symmetric(residuals[t] + gains[t] @ covariance @ gains[t].mT)
            means.append(mean)
            covariances.append(covariance)
        return _gaussian(torch.stack(means[::-1]), torch.stack(covariances[::-1]), self.filtered)


@final
class StateSpace(nn.Module):
    """A state-space model: two networks or functions, with additive Gaussian noise.

    It is a module, whose parameters are those of both functions and of the noises. Train it with
    the gradient of `filter(...).log_likelihood`, and with an explicit method: the default may take
    values from points and gradients from layers.

    Args:
        transition: Maps a state `(*batch, n)` to the next, without noise.
        measurement: Maps a state to its reading `(*batch, m)`, without noise.
        process_stddev: Standard deviation of the noise of a step: one number, or `(n,)`.
        process_covariance: Its covariance `(n, n)` or `(*batch, n, n)`, in place of stddev. Without
            both there is no process noise.
        measurement_stddev: Standard deviation of the noise of a reading: one number, or `(m,)`.
        measurement_covariance: Its covariance `(m, m)` or `(*batch, m, m)`, in place of stddev.

    Example:
        model = cp.filters.StateSpace(
            torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), process_stddev=0.1, measurement_stddev=0.5
        )
        state = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
        (-model.filter(state, torch.randn(5, 1), method="linearized").log_likelihood).backward()
    """

    def __init__(
        self,
        transition: Model,
        measurement: Model,
        *,
        process_stddev: float | Tensor | None = None,
        process_covariance: Tensor | None = None,
        measurement_stddev: float | Tensor | None = None,
        measurement_covariance: Tensor | None = None,
    ) -> None:
        """Keep what is given; sizes are checked where they meet a state."""
        super().__init__()
        if process_stddev is not None and process_covariance is not None:
            raise ValueError("give process_stddev or process_covariance, not both")
        if (measurement_stddev is None) == (measurement_covariance is None):
            raise ValueError("give measurement_stddev or measurement_covariance, one of them")
        self.transition, self.measurement = transition, measurement
        self.process_stddev, self.measurement_stddev = process_stddev, measurement_stddev
        self.process_covariance = process_covariance
        self.measurement_covariance = measurement_covariance

    def predict(self, state: Gaussian, method: Method | str = AUTO) -> Gaussian:
        """The state one step later, including process noise.

        Args:
            state: A Gaussian of `(n,)`, or a batch of them.
            method: As for `cp.propagate`.

        Example:
            model = cp.filters.StateSpace(torch.sin, torch.cos, measurement_stddev=0.1)
            model.predict(cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0))
        """
        _check_state(state)
        return _second(self._predict(state, _checked_method(method)))

    def update(self, state: Gaussian, reading: Tensor, method: Method | str = AUTO) -> Update:
        """The state, given a reading.

        Args:
            state: A Gaussian of `(n,)`, or a batch of them.
            reading: The measured values `(*batch, m)`, with NaN for missing elements.
            method: As for `cp.propagate`.

        Raises:
            InvalidGaussian: If a shape is wrong, or a reading cannot vary.

        Example:
            model = cp.filters.StateSpace(torch.sin, torch.cos, measurement_stddev=0.1)
            state = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
            model.update(state, torch.tensor([0.8, 0.5])).state
        """
        _check_state(state)
        return self._update(state, reading, _checked_method(method))

    def filter(
        self, state: Gaussian, readings: Tensor, method: Method | str = AUTO
    ) -> FilterResult:
        """Filter a sequence of readings: predict and update for each.

        Args:
            state: The state one step *before* the first reading, for a whole batch or for each
                sequence.
            readings: A tensor `(time, *batch, m)`, with NaN for missing elements.
            method: As for `cp.propagate`: "linearized" is the extended Kalman filter.

        Example:
            model = cp.filters.StateSpace(torch.sin, torch.cos, measurement_stddev=0.1)
            state = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
            model.filter(state, torch.ones(5, 2), cp.Unscented()).filtered.mean
        """
        method = _checked_method(method)
        state = _expanded(state, readings)
        transitions, updates = [], []
        for reading in readings:
            transitions.append(self._predict(state, method))
            updates.append(self._update(_second(transitions[-1]), reading, method))
            state = updates[-1].state
        filtered, expected, log_likelihoods = zip(*updates, strict=True)
        both = _stacked(transitions)
        return FilterResult(
            _second(both),
            _stacked(filtered),
            _stacked(expected),
            torch.stack(log_likelihoods),
            both,
        )

    def _predict(self, state: Gaussian, method: Method) -> Gaussian:
        """The state and the next one together, 2 n elements."""
        size = state.event_shape.numel()
        both = joint(self.transition, state, method)
        if both.event_shape.numel() != 2 * size:
            made = both.event_shape.numel() - size
            raise InvalidGaussian(f"the state has {size} elements, and the transition makes {made}")
        noise = _noise("process", self.process_stddev, self.process_covariance, state, size)
        return _gaussian(*_moments(both, noise), both)

    def _update(self, state: Gaussian, reading: Tensor, method: Method) -> Update:
        size = state.event_shape.numel()
        both = joint(self.measurement, state, method)
        count = both.event_shape.numel() - size
        noise = _noise(
            "measurement", self.measurement_stddev, self.measurement_covariance, state, count
        )
        mean, covariance = _moments(both, noise)
        before, expected = mean.split([size, count], dim=-1)
        surprise, present = _surprise(reading, expected)
        # A missing element is one that depends on nothing and was seen where it was expected.
        pairs = present[..., :, None] & present[..., None, :]
        unit = torch.eye(count, dtype=mean.dtype, device=mean.device)
        seen = torch.where(pairs, covariance[..., size:, size:], unit)
        across = torch.where(present[..., None, :], covariance[..., :size, size:], 0)
        root, failed = torch.linalg.cholesky_ex(seen)
        if bool(failed.any()):
            raise InvalidGaussian(
                "the readings have no density: neither the state nor measurement noise makes some "
                "combination of them vary; give a larger measurement_stddev"
            )
        gain = torch.cholesky_solve(across.mT, root).mT
        white = torch.linalg.solve_triangular(root, surprise[..., None], upper=False)[..., 0]
        normaliser = root.diagonal(dim1=-2, dim2=-1).log() + HALF_LOG_2_PI * present.to(mean.dtype)
        log_likelihood = -(white.square() / 2 + normaliser).sum(-1)
        return Update(
            _gaussian(before + _times(gain, surprise), _conditional(covariance, gain), both),
            _gaussian(expected, covariance[..., size:, size:], both),
            log_likelihood.to(state.dtype),
        )


def _moments(x: Gaussian, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and covariance in float64, without negative eigenvalues that come of rounding.

    noise: a covariance (*batch, m, m) to be added to the last m elements.
    """
    covariance, lowest = nearest_semidefinite(x.covariance_matrix.double())
    if lowest < -INDEFINITE:
        text = f"eigenvalues of a covariance down to {lowest:.1e} of the largest are set to zero"
        warn_user(f"{text}; use cp.GaussianLayers() or cp.Unscented()", ApproximationWarning)
    if noise is not None:
        before = covariance.shape[-1] - noise.shape[-1]
        covariance = covariance + pad(noise, (before, 0, before, 0))
    return x.mean.double(), covariance


def _conditional(covariance: Tensor, gain: Tensor) -> Tensor:
    """Cov(x - K y) of the joint covariance S of (x, y), where K is the gain: Joseph's form.

    [I, -K] S [I, -K]^T is positive semi-definite for any K, and an error of K enters squared.
    """
    unit = torch.eye(gain.shape[-2], dtype=gain.dtype, device=gain.device)
    difference = torch.cat([unit.expand(*gain.shape[:-1], -1), -gain], dim=-1)
    return symmetric(difference @ covariance @ difference.mT)


def _pseudo_inverse(covariance: Tensor, rounding: float) -> Tensor:
    """Of a covariance that may be singular: what cannot vary tells nothing. Units do not count."""
    inverse = inverse_deviation(covariance.detach().diagonal(dim1=-2, dim2=-1))
    rows, columns = inverse[..., :, None], inverse[..., None, :]
    tolerance = rounding * covariance.shape[-1]
    scaled = torch.linalg.pinv(covariance * rows * columns, rtol=tolerance, hermitian=True)
    return scaled * rows * columns


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _gaussian(mean: Tensor, covariance: Tensor, source: Gaussian) -> Gaussian:
    """In the dtype of what it was computed from, with its method and notes."""
    return Gaussian(
        mean.to(source.dtype), covariance.to(source.dtype), validate_args=False,
        method=source.method, notes=source.notes,
    )  # fmt: skip


def _second(both: Gaussian) -> Gaussian:
    """The later of two states."""
    return both.marginal(slice(both.event_shape.numel() // 2, None))


def _stacked(gaussians: Sequence[Gaussian]) -> Gaussian:
    """One batch of all, time first, with what any of them has noted."""
    mean = torch.stack([x.mean for x in gaussians])
    covariance = torch.stack([x.covariance_matrix for x in gaussians])
    notes = dict.fromkeys(note for x in gaussians for note in x.notes)
    method = gaussians[0].method
    return Gaussian(mean, covariance, validate_args=False, method=method, notes=tuple(notes))


def _noise(
    name: str, stddev: float | Tensor | None, covariance: Tensor | None, state: Gaussian, size: int
) -> Tensor:
    """The covariance of a noise in float64, (size, size) or one for each of the batch."""
    given = stddev if covariance is None else covariance
    given = 0.0 if given is None else given
    values = torch.as_tensor(given, dtype=torch.float64, device=state.device)
    batch = (*state.batch_shape, size, size)
    shapes = ((), (size,)) if covariance is None else ((size, size), batch)
    if tuple(values.shape) not in shapes:
        name += "_stddev" if covariance is None else "_covariance"
        either = f"{shapes[0]} or {shapes[1]}"
        raise InvalidGaussian(f"{name} has the shape {either}, not {tuple(values.shape)}")
    if covariance is None:
        if bool((values < 0).any()):
            raise InvalidGaussian(f"{name}_stddev is negative")
        values = torch.diag_embed(values.square().expand(size))
    try:
        return Gaussian(values.new_zeros(values.shape[:-1]), values).covariance_matrix
    except InvalidGaussian as error:
        raise InvalidGaussian(f"{name} noise: {error}") from error


def _check_state(state: object) -> None:
    check_gaussian(state)
    assert isinstance(state, Gaussian)
    if len(state.event_shape) != 1:
        raise InvalidGaussian(
            f"a state is a vector, and this Gaussian has the event {tuple(state.event_shape)} and "
            f"the batch {tuple(state.batch_shape)}; give leading dimensions as batch_dims="
        )


def _expanded(state: Gaussian, readings: object) -> Gaussian:
    """The first state with the batch of the readings, where it is a single one."""
    _check_state(state)
    if not isinstance(readings, Tensor) or readings.dim() < 2 or not len(readings):  # noqa: PLR2004
        given = tuple(readings.shape) if isinstance(readings, Tensor) else type(readings).__name__
        raise InvalidGaussian(f"readings are a tensor (time, *batch, m), not {given}")
    batch = readings.shape[1:-1]
    if state.batch_shape == batch:
        return state
    if state.batch_shape:
        raise InvalidGaussian(
            f"the state has the batch {tuple(state.batch_shape)} and the readings "
            f"{tuple(readings.shape)}, time first, have {tuple(batch)}"
        )
    mean, matrix = state.mean, state.covariance_matrix
    mean, matrix = (part.expand(*batch, *part.shape) for part in (mean, matrix))
    return Gaussian(mean, matrix, validate_args=False)


def __dir__() -> list[str]:
    return list(__all__)


def _surprise(reading: object, mean: Tensor) -> tuple[Tensor, Tensor]:
    """How far a reading is from its mean, 0 where it is missing, and where it is present."""
    seen = torch.as_tensor(reading, dtype=mean.dtype, device=mean.device)
    if seen.shape != mean.shape:
        shapes = f"{tuple(mean.shape)}, not {tuple(seen.shape)}"
        raise InvalidGaussian(f"a reading has the shape of the measurement, {shapes}")
    if bool(seen.isinf().any()):
        raise InvalidGaussian("a reading is infinite; NaN stands for what is missing")
    present = ~seen.isnan()
    return torch.where(present, seen, mean) - mean, present


def _checked_method(method: Method | str) -> Method:
    """One that knows how the output of a function depends on its input."""
    found = as_method(method)
    found.check_covariances("a filter needs the covariance of state and reading")
    return found
