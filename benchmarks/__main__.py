"""`python -m benchmarks [--out FILE]`: ratios of covprop's times to the baselines', as JSON."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import covprop as cp
from benchmarks import naive
from experiments.record import write

OUT = Path(__file__).parent / "out" / "benchmarks.json"
REPEATS = 5
LAYER = 2000
WIDTH = 100
SEED = 0


def seconds(function: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The shortest of several runs after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def random_covariance(size: int) -> Tensor:
    """A full-rank covariance with variances near one."""
    factor = torch.randn(size, size, dtype=torch.float64) / size**0.5
    return factor @ factor.mT


def relu_layer() -> dict[str, float]:
    """One ReLU layer of LAYER units, float64, against the naive series and a copy."""
    mean, covariance = torch.randn(LAYER, dtype=torch.float64), random_covariance(LAYER)
    x = cp.Gaussian(mean, covariance, validate_args=False)
    base = seconds(lambda: naive.relu_series(mean, covariance))
    copy = seconds(lambda: covariance.clone())
    times = {
        name: seconds(lambda method=method: cp.propagate(torch.relu, x, method))
        for name, method in {"series": cp.Series(order=4), "exact": cp.Exact()}.items()
    }
    return {
        **{f"naive / {name}": base / value for name, value in times.items()},
        **{f"{name} / copy": value / copy for name, value in times.items()},
    }


def fc4() -> dict[str, float]:
    """The paper's FC-4, one Gaussian, against the naive series and Monte Carlo."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU()] * 3
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double()
    mean = torch.randn(WIDTH, dtype=torch.float64)
    covariance = random_covariance(WIDTH) * 0.01
    x = cp.Gaussian(mean, covariance, validate_args=False)
    sampled = seconds(lambda: naive.monte_carlo(model, mean, covariance), repeats=2)
    base = seconds(lambda: naive.network(model, mean, covariance))
    series = seconds(lambda: cp.propagate(model, x, cp.Series(order=4)))
    exact = seconds(lambda: cp.propagate(model, x))
    return {
        "naive / series": base / series,
        "naive / exact": base / exact,
        "monte carlo / series": sampled / series,
        "monte carlo / exact": sampled / exact,
    }


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    with torch.no_grad():
        results = {f"relu layer, n = {LAYER}, float64": relu_layer(), "fc-4, float64": fc4()}
    settings = {"seed": SEED, "threads": torch.get_num_threads(), "samples": naive.SAMPLES}
    write(arguments.out, settings, results)
    for name, ratios in results.items():
        print(name)
        for ratio, value in ratios.items():
            print(f"  {ratio:>22}: {value:6.2f}")


if __name__ == "__main__":
    main()
