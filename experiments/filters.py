"""`filters`: Kalman filters and smoothers of two nonlinear systems, by the method of propagation.

`lorenz`: Lorenz's equations of 1963, 0.1 time units between readings in eight steps of Euler, of
which a sensor reads the first element and saturates, 20 tanh(x / 20). `wiener`: a point in the
plane whose velocity is a Wiener process, by its distances from three beacons. Each is simulated
and filtered with the same model, so that all errors are those of the filter. The same sequences
for every method; a result is an average over the sequences of one seed.
"""

import time
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any, NamedTuple, final

import torch
from matplotlib.figure import Figure
from torch import Tensor

import covprop as cp
from covprop.errors import approximations_ignored
from experiments import drawing
from experiments.options import Options
from experiments.randomness import seed_of
from experiments.table import Table

NAME = "filters"
METHODS = {
    "EKF": cp.Linearized(),
    "UKF": cp.Unscented(),
    "GaussianLayers": cp.GaussianLayers(),
    "Cumulants": cp.Cumulants(),
}
EXTENDED = "EKF"
MEASURES = {
    "filter": "RMSE of the filter",
    "smoother": "RMSE of the smoother",
    "readings": "log-likelihood of a reading",
    "states": "log density of the true state",
}
LOGARITHMS = ("readings", "states")
"""Of which more is better."""
SEEDS, SEQUENCES, STEPS = 10, 20, 30
SMOKE_SEEDS, SMOKE_SEQUENCES, SMOKE_STEPS = 1, 2, 3
LORENZ_STEPS, LORENZ_TIME, SATURATION = 8, 0.1, 20.0
BEACONS = ((0.0, 0.0), (6.0, 0.0), (0.0, 6.0))


@final
class System(NamedTuple):
    """A model, and the state before the first reading."""

    model: cp.filters.StateSpace
    start: cp.Gaussian


def lorenz(state: Tensor) -> Tensor:
    """The state at the next reading."""
    for _ in range(LORENZ_STEPS):
        x, y, z = state[..., 0], state[..., 1], state[..., 2]
        rate = torch.stack((10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z), -1)
        state = state + LORENZ_TIME / LORENZ_STEPS * rate
    return state


def saturating(state: Tensor) -> Tensor:
    """A reading of the first element."""
    return SATURATION * torch.tanh(state[..., :1] / SATURATION)


def straight(state: Tensor) -> Tensor:
    """Positions go on by the velocities of one unit of time."""
    move = torch.eye(4, dtype=torch.float64)
    move[0, 2] = move[1, 3] = 1
    return state @ move.mT


def distances(state: Tensor) -> Tensor:
    """From the beacons."""
    places = torch.tensor(BEACONS, dtype=torch.float64)
    return torch.stack(
        [torch.linalg.vector_norm(state[..., :2] - place, dim=-1) for place in places], -1
    )


def lorenz_system(kick: float, error: float) -> System:
    """Noise of a step and of a reading."""
    start = cp.Gaussian.isotropic(torch.tensor([1.0, 1.0, 25.0]).double(), stddev=2.0)
    model = cp.filters.StateSpace(lorenz, saturating, process_stddev=kick, measurement_stddev=error)
    return System(model, start)


def wiener_system(density: float, error: float) -> System:
    """The spectral density of the acceleration, and the noise of a distance."""
    start = cp.Gaussian.diagonal(
        torch.tensor([3.0, 4.0, 0.0, -0.2]).double(),
        stddev=torch.tensor([2.0, 2.0, 0.3, 0.3]).double(),
    )
    shares = torch.tensor([[1 / 3, 1 / 2], [1 / 2, 1]]).double()
    model = cp.filters.StateSpace(
        straight, distances,
        process_covariance=density * torch.kron(shares, torch.eye(2).double()),
        measurement_stddev=error,
    )  # fmt: skip
    return System(model, start)


SYSTEMS: dict[str, Callable[[], System]] = {
    "lorenz/small": lambda: lorenz_system(0.5, 1.0),
    "lorenz/large": lambda: lorenz_system(1.0, 2.0),
    "wiener/small": lambda: wiener_system(0.01, 0.1),
    "wiener/large": lambda: wiener_system(0.05, 0.5),
}
"""With small and large noise."""


def settings(options: Options) -> dict[str, Any]:
    """Sequences of a seed, and their length."""
    count, steps = (SMOKE_SEQUENCES, SMOKE_STEPS) if options.smoke else (SEQUENCES, STEPS)
    return {"seed": options.seed, "smoke": options.smoke, "sequences": count, "steps": steps}


def units(options: Options) -> list[str]:
    """Systems, noises and seeds."""
    seeds = options.instances or (SMOKE_SEEDS if options.smoke else SEEDS)
    return [f"{name}/{seed}" for name in SYSTEMS for seed in range(seeds)]


def simulated(system: System, count: int, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """True states (steps, count, n) and their readings (steps, count, m)."""
    generator, (model, state) = torch.Generator().manual_seed(seed), system
    here, states = state.sample(count, generator), []
    size = here.shape[-1]
    covariance = model.process_covariance
    if covariance is None:
        covariance = float(model.process_stddev) ** 2 * torch.eye(size).double()
    root = torch.linalg.cholesky(covariance)
    for _ in range(steps):
        noise = torch.randn(count, size, generator=generator, dtype=torch.float64)
        here = model.transition(here) + noise @ root.mT
        states.append(here)
    true = torch.stack(states)
    clean = model.measurement(true)
    noise = torch.randn(clean.shape, generator=generator, dtype=torch.float64)
    return true, clean + float(model.measurement_stddev) * noise


def measure(key: str, options: Options) -> dict[str, Any]:
    """Of every method, averages over sequences, and milliseconds of a step of all of them."""
    name, _, seed = key.rpartition("/")
    system, given = SYSTEMS[name](), settings(options)
    true, readings = simulated(
        system, given["sequences"], given["steps"], seed_of(NAME, options.seed, name, seed)
    )
    found = {}
    for word, method in METHODS.items():
        begun = time.process_time()
        with approximations_ignored():
            result = system.model.filter(system.start, readings, method)
        seconds = time.process_time() - begun
        found[word] = {
            "filter": error(result.filtered, true),
            "smoother": error(result.smooth(), true),
            "readings": float(result.log_likelihoods.mean()),
            "states": float(result.filtered.log_prob(true).mean()),
            "milliseconds": 1e3 * seconds / len(readings),
        }
    return found


def error(states: cp.Gaussian, true: Tensor) -> float:
    """The root mean square over elements and time of a sequence, averaged over sequences."""
    return float((states.mean - true).square().mean((0, -1)).sqrt().mean())


def grouped(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The results of all seeds by system and noise."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key, result in record["results"].items():
        found.setdefault(key.rpartition("/")[0], []).append(result)
    return found


def average(seeds: list[dict[str, Any]], method: str, measure: str) -> tuple[float, float]:
    """The mean over seeds and its standard error, which two seeds have at least."""
    return summary([seed[method][measure] for seed in seeds])


def advantage(seeds: list[dict[str, Any]], method: str, measure: str) -> tuple[float, float]:
    """By how much a method is better than the extended filter, seed by seed, and the error."""
    sign = 1 if measure in LOGARITHMS else -1
    return summary([sign * (seed[method][measure] - seed[EXTENDED][measure]) for seed in seeds])


def summary(values: list[float]) -> tuple[float, float]:
    """Mean and standard error."""
    spread = stdev(values) if len(values) > 1 else float("nan")
    return fmean(values), spread / len(values) ** 0.5


def tables(record: dict[str, Any]) -> list[Table]:
    """One row for each system and method."""
    rows = []
    for name, seeds in grouped(record).items():
        for method in METHODS:
            cells = [average(seeds, method, measure) for measure in MEASURES]
            words = [f"{mean:.3f} ± {spread:.3f}" for mean, spread in cells]
            milliseconds = min(seed[method]["milliseconds"] for seed in seeds)
            rows.append([name, method, *words, f"{milliseconds:.1f} ms"])
    header = ["system/noise", "method", *MEASURES.values(), "a step"]
    note = "Means over seeds with standard errors; logarithms for each step; the fastest seed."
    return [Table("Filters of simulated systems", header, rows, note)]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """How much better than the extended filter, with two standard errors: a panel each."""
    groups = grouped(record)
    figure, axes = drawing.panels(2, len(MEASURES) // 2, width=4.2, height=2.9)
    colours = dict(
        zip(METHODS, (drawing.BLACK, drawing.ORANGE, drawing.BLUE, drawing.GREEN), strict=True)
    )
    others = [method for method in METHODS if method != EXTENDED]
    for panel, (measure, words) in zip(axes.flat, MEASURES.items(), strict=True):
        drawing.bands(panel, len(groups))
        panel.axvline(0, color="0.3", linewidth=1)
        for row, seeds in enumerate(groups.values()):
            for place, method in enumerate(others):
                mean, spread = advantage(seeds, method, measure)
                at = row + 0.22 * (place - 1)
                panel.errorbar(
                    mean, at, xerr=2 * spread, fmt="o", markersize=4, color=colours[method],
                    label=method if row == 0 else None,
                )  # fmt: skip
        panel.set_title(words, fontsize=drawing.FONT)
        panel.set_yticks(range(len(groups)), list(groups) if panel in axes[:, 0] else [])
        panel.set_ylim(len(groups) - 0.5, -0.5)
        panel.set_xscale("symlog", linthresh=0.1 if measure in LOGARITHMS else 0.01)
        panel.set_xlabel("better than EKF by", fontsize=drawing.FONT)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return {NAME: figure}
