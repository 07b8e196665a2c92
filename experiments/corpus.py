"""The corpus of the `auto` experiment: networks, Gaussian inputs, noise, and the true moments.

    python -m experiments.corpus                 the list
    python -m experiments.corpus --truth         train, sample, keep, and compare two methods

Four families: small networks *trained* on functions of few inputs (controllers, cost tables,
values), classifiers and regressors of *tabular* data and digits, *random* networks of all
activations, and the *architectures* of docs/accuracy.md. Noise is a part of the input's spread.
All follows from names; weights and truths are kept in `~/.cache/covprop/corpus` or where
COVPROP_CORPUS says.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.methods.base import Method
from experiments import corpus_truth, random_networks
from experiments.corpus_networks import (
    SHIFTED,
    Convolutional,
    Fit,
    Tabular,
    cube,
    folder,
    table,
    trained,
)
from experiments.corpus_truth import Truth
from experiments.randomness import seed_of, seeded
from experiments.table import Table
from tests.architectures import ARCHITECTURES

TRAINED, TABULAR, RANDOM, ARCHITECTURE = FAMILIES = (
    "trained", "tabular", "random", "architecture",
)  # fmt: skip
NOISES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Of the spread of inputs."""
MOST = {TRAINED: 3 * 2**21, TABULAR: 3 * 2**20, RANDOM: 3 * 2**20, ARCHITECTURE: 2**18}
"""Points of a truth at most."""
NETWORKS = 60
"""Random ones."""
INSIDE = 0.9
"""Part of the cube from which the means of inputs of fitted functions come."""
METHODS: dict[str, Method] = {"exact": cp.Exact(), "cumulants": cp.Cumulants()}
LARGE = (0.02, 0.1)
"""Errors that are counted."""
UNCERTAIN = 2e-3
"""An error of the truth that is counted."""
BRIEF = 0.2
"""Seconds of a run that is timed again."""
OUT = Path("/tmp/corpus.jsonl")

Built: TypeAlias = tuple[nn.Module, cp.Gaussian]

LONG = 15000
"""Steps of networks that are fitted more closely."""
FITS = (
    Fit("collision", 50, 6), Fit("collision-near", 50, 6), Fit("collision-far", 50, 6),
    Fit("collision", 25, 4), Fit("collision", 40, 5, "GELU"), Fit("collision-near", 30, 4, "SiLU"),
    Fit("vertical", 40, 5), Fit("vertical", 25, 4, "Tanh"),
    Fit("cruise", 20, 5), Fit("cruise", 20, 3), Fit("cruise", 50, 3, "Tanh"),
    Fit("cruise-smooth", 20, 5), Fit("cruise-smooth", 20, 4, "SiLU"),
    Fit("pendulum", 25, 4), Fit("pendulum", 40, 3, "Tanh"),
    Fit("cart-pole", 30, 3), Fit("cart-pole", 24, 5), Fit("cart-swing", 50, 4),
    Fit("time-optimal", 30, 3), Fit("time-optimal", 20, 6), Fit("regulator", 20, 3),
    Fit("regulator", 24, 4, "GELU"), Fit("point-mass", 50, 4), Fit("point-mass", 32, 3, "SiLU"),
    Fit("unicycle", 50, 3), Fit("oscillator", 50, 3), Fit("oscillator", 20, 3, "Tanh"),
    Fit("pursuit-3", 40, 4), Fit("pursuit-6", 50, 5), Fit("obstacles", 40, 5),
    Fit("friedman", 30, 3), Fit("borehole", 30, 3, "Tanh"), Fit("arm", 50, 3),
    Fit("ishigami", 40, 5), Fit("branin", 25, 4), Fit("folded", 30, 5),
    Fit("planes", 50, 4), Fit("bumps", 40, 3),
    Fit("collision", 50, 6, steps=LONG), Fit("collision-far", 50, 6, steps=LONG),
    Fit("cruise", 20, 5, steps=LONG),
)  # fmt: skip
PLATEAUS = (
    "collision", "collision-near", "collision-far", "vertical", "cruise", "pendulum", "cart-pole",
    "time-optimal", "regulator", "pursuit-3", "pursuit-6", "obstacles",
)  # fmt: skip
"""Targets with regions where some output is constant."""
FLAT, CANDIDATES = "flat", 64
"""Cases at the flattest of so many points, and their noises."""
FLAT_NOISES = NOISES[1:4]
KINDS = ("equal", "equal", "unequal", "correlated")
"""Of noise of fitted functions, each as likely."""
DIGITS = Convolutional()
TABLES = (
    Tabular("diabetes"), Tabular("diabetes", (32, 32), "Tanh"), Tabular("boston"),
    Tabular("concrete"), Tabular("energy", (50, 50), "Tanh"), Tabular("kin8nm"),
    Tabular("naval", (50, 50)), Tabular("power", (50, 50), "GELU"), Tabular("protein"),
    Tabular("wine"), Tabular("yacht"), Tabular("breast_cancer"), Tabular("iris", (20, 20), "Tanh"),
    Tabular("digits"), Tabular("digits", (100, 100, 100), "SiLU"), Tabular(SHIFTED),
)  # fmt: skip
SLOW = {"LSTM": (0.1, 1.0)}
"""Architectures whose third cumulants take a minute, and their noises."""


@final
@dataclass(frozen=True)
class Case:
    """A network and a Gaussian input, made when asked for, in float64.

    noise: of the input, as a part of its spread.
    """

    name: str
    family: str
    noise: float
    make: Callable[[], Built]

    def build(self) -> Built:
        """The network in evaluation mode, and its input."""
        return self.make()

    def truth(self, most: int | None = None) -> Truth:
        """Moments of the output, flattened; sampled once on a machine.

        most: fewer points, of which nothing is kept.
        """
        model, x = self.build()
        mean = x.mean.reshape(x.event_shape)
        covariance = x.covariance_matrix.reshape(mean.numel(), mean.numel())
        seed = seed_of("corpus", self.name, "truth")
        if most is not None:
            return corpus_truth.sampled(model, mean, covariance, seed, most)
        most = MOST[self.family]
        return corpus_truth.kept(
            folder() / "truth" / f"{self.name.replace('/', '_').replace(' ', '-')}.pt",
            corpus_truth.fingerprint(model, mean, covariance, seed, most),
            partial(corpus_truth.sampled, model, mean, covariance, seed, most),
        )


def fitted(fit: Fit, noise: float, name: str, flat: bool = False) -> Built:
    """A point of the cube; noise is independent and equal, or unequal, or correlated."""
    model = trained(fit).model
    with seeded("corpus", name):
        points = INSIDE * cube(CANDIDATES, model[0].in_features).double()
        kind, size = KINDS[int(torch.randint(len(KINDS), ()))], points.shape[1]
        unequal = torch.exp(torch.randn(size, dtype=torch.float64) / 2)
        factor = torch.randn(size, size, dtype=torch.float64)
    mean = points[int(steepness(model, points).argmin()) if flat else 0]
    if kind == "equal":
        return model, cp.Gaussian.isotropic(mean, stddev=noise)
    if kind == "unequal":
        variance = unequal.square() / unequal.square().mean()
        return model, cp.Gaussian.diagonal(mean, variance=noise**2 * variance)
    covariance = factor @ factor.T / size + torch.eye(size, dtype=torch.float64) / 10
    return model, cp.Gaussian(mean, noise**2 * covariance / covariance.diagonal().mean())


def steepness(model: nn.Module, points: Tensor) -> Tensor:
    """The norm of the derivative of all outputs, (points,)."""
    jacobian = torch.func.vmap(torch.func.jacrev(model))(points)
    return jacobian.flatten(1).norm(dim=1)


def tabulated(network: Tabular, noise: float, name: str) -> Built:
    """A row; noise is correlated as the features are, of pixels independent."""
    rows, _ = table(network.table)
    model = trained(network).model
    with seeded("corpus", name):
        mean = rows[int(torch.randint(len(rows), ()))]
    if network.table == SHIFTED:
        return model, cp.Gaussian.low_rank(mean, noise * movements(mean))
    if network.table == "digits":
        return model, cp.Gaussian.isotropic(mean, stddev=noise * float(rows.std()))
    return model, cp.Gaussian(mean, noise**2 * rows.T.cov(correction=0))


def movements(image: Tensor) -> Tensor:
    """What a pixel's shift in two directions and a change of contrast add, (pixels, 3)."""
    square = image.reshape(8, 8)
    return torch.stack([*(part.flatten() for part in torch.gradient(square)), image / 2], 1)


def convolved(noise: float, name: str) -> Built:
    """An image; noise is independent."""
    rows, _ = table("digits")
    with seeded("corpus", name):
        image = rows[int(torch.randint(len(rows), ()))].reshape(1, 1, 8, 8)
    x = cp.Gaussian.isotropic(image, stddev=noise * float(rows.std()), batch_dims=1)
    return trained(DIGITS).model, x


def drawn(noise: float, name: str) -> Built:
    """A random network and a standard normal point."""
    with seeded("corpus", name):
        description = random_networks.draw()
        model = random_networks.build(description)
        mean = torch.randn(description.widths[0], dtype=torch.float64)
    return model, cp.Gaussian.isotropic(mean, stddev=noise)


def architecture(kind: str, noise: float, name: str) -> Built:
    """As torch initialises it, and a standard normal point."""
    chosen = ARCHITECTURES[kind]
    with seeded("corpus", name):  # building sets torch's seed
        model = chosen.build()
    with seeded("corpus", name):
        mean = torch.randn(1, *chosen.shape, dtype=torch.float64)
    return model, cp.Gaussian.isotropic(mean, stddev=noise, batch_dims=1)


@cache
def cases() -> tuple[Case, ...]:
    """All of them, always the same, family by family."""
    found: list[Case] = []

    def add(family: str, what: str, noise: float, make: Callable[..., Built]) -> None:
        name = f"{family}/{what}/{noise}"
        found.append(Case(name, family, noise, partial(make, name=name)))

    for fit, noise in product(FITS, NOISES):
        add(TRAINED, fit.name, noise, partial(fitted, fit, noise))
    for fit, noise in product(FITS, FLAT_NOISES):
        if fit.target in PLATEAUS:
            make = partial(fitted, fit, noise, flat=True)
            add(TRAINED, f"{fit.name}/{FLAT}", noise, make)
    for network, noise in product(TABLES, NOISES):
        add(TABULAR, network.name, noise, partial(tabulated, network, noise))
    for noise in NOISES:
        add(TABULAR, DIGITS.name, noise, partial(convolved, noise))
    for number in range(NETWORKS):
        noise = NOISES[number % len(NOISES)]
        add(RANDOM, str(number), noise, partial(drawn, noise))
    for kind, noise in product(ARCHITECTURES, NOISES):
        if noise in SLOW.get(kind, NOISES):
            make = partial(architecture, kind, noise)
            add(ARCHITECTURE, kind, noise, make)
    return tuple(found)


def errors(y: cp.Gaussian, truth: Truth) -> dict[str, float]:
    """Of standard deviations, relative, and of means, in standard deviations; of what varies.

    The worst over outputs, and the root of the mean square (`rms`).
    """
    counted, true = truth.counted, truth.stddev
    stddev = (y.variance.flatten().clamp(min=0).sqrt() / true - 1).abs()[counted]
    mean = ((y.mean.flatten() - truth.mean).abs() / true)[counted]
    return {
        "std_error": _worst(stddev), "std_rms": _rms(stddev),
        "mean_error": _worst(mean), "mean_rms": _rms(mean),
    }  # fmt: skip


def measured(case: Case, methods: dict[str, Method] = METHODS) -> dict[str, Any]:
    """One case by every method, beside the truth; what a method refuses is a sentence."""
    started = time.perf_counter()
    truth = case.truth()
    seconds = time.perf_counter() - started
    model, x = case.build()
    row: dict[str, Any] = {
        "name": case.name, "family": case.family, "noise": case.noise,
        "inputs": x.mean.numel(), "outputs": len(truth.mean), "layers": depth(model),
        "left_out": int((~truth.counted).sum()), "samples": truth.samples,
        "truth_error": _worst(truth.stddev_error), "truth_mean_error": _worst(truth.mean_error),
        "truth_seconds": round(seconds, 2),
    }  # fmt: skip
    for name, method in methods.items():
        row[name] = _compared(model, x, method, truth)
    return row


def _compared(model: nn.Module, x: cp.Gaussian, method: Method, truth: Truth) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cp.ApproximationWarning)  # notes are counted
        try:
            y, seconds = _timed(partial(cp.propagate, model, x, method))
        except cp.CovpropError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    return {**errors(y, truth), "seconds": seconds, "notes": len(y.notes)}


def _timed(function: Callable[[], cp.Gaussian]) -> tuple[cp.Gaussian, float]:
    """The result and the seconds; those of a second run where the first was short."""
    for _ in range(2):
        started = time.perf_counter()
        y = function()
        seconds = time.perf_counter() - started
        if seconds > BRIEF:
            break
    return y, round(seconds, 5)


def depth(model: nn.Module) -> int:
    """Layers with weights."""
    return sum(isinstance(module, nn.Linear | nn.Conv2d | nn.LSTM) for module in model.modules())


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Counts, times and errors by family."""
    return [_families(rows), *(_method(rows, name) for name in METHODS)]


def _families(rows: Sequence[dict[str, Any]]) -> Table:
    lines = []
    for family, chosen in _by_family(rows).items():
        truths = np.array([row["truth_error"] for row in chosen])
        lines.append([
            family, str(len(chosen)), _range(chosen, "inputs"), _range(chosen, "outputs"),
            f"{np.median(truths):.2%}", f"{truths.max():.2%}", str((truths > UNCERTAIN).sum()),
            f"{sum(row['truth_seconds'] for row in chosen):.0f}",
            str(sum(row["left_out"] for row in chosen)),
        ])  # fmt: skip
    header = ["", "cases", "inputs", "outputs", "error of the truth, median", "largest",
              f"above {UNCERTAIN:.1%}", "seconds", "outputs left out"]  # fmt: skip
    note = (
        "The error of the truth is the largest standard error of an output's std, as a part of it. "
        f"Left out are outputs whose std is below {corpus_truth.NEGLIGIBLE:.0e} of the largest "
        "output. Seconds are those of this run: what was kept takes none."
    )
    return Table("Corpus", header, lines, note)


def _method(rows: Sequence[dict[str, Any]], method: str) -> Table:
    lines = []
    for family, chosen in _by_family(rows).items():
        given = [row[method] for row in chosen if "refused" not in row[method]]
        worst, rms, mean = (
            np.array([row[key] for row in given]) for key in ("std_error", "std_rms", "mean_error")
        )
        lines.append([
            family, *(f"{np.percentile(worst, share):.2%}" for share in (50, 95, 100)),
            *(str((worst > limit).sum()) for limit in LARGE), f"{np.median(rms):.2%}",
            f"{np.median(mean):.4f}", f"{mean.max():.2f}",
            str(sum(row["notes"] > 0 for row in given)), str(len(chosen) - len(given)),
            f"{1000 * np.median([row['seconds'] for row in given]):.0f}",
        ])  # fmt: skip
    header = ["", "std off by, median", "95th percentile", "largest",
              *(f"above {limit:.0%}" for limit in LARGE), "rms over outputs, median",
              "means off by, median", "largest", "with notes", "refused", "ms"]  # fmt: skip
    return Table(method, header, lines, "Errors of a case are those of its worst output.")


def _by_family(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups = {family: [row for row in rows if row["family"] == family] for family in FAMILIES}
    return {family: chosen for family, chosen in groups.items() if chosen} | {"all": list(rows)}


def _range(rows: Sequence[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows]
    return f"{min(values)}-{max(values)}"


def _worst(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if len(values) else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    """List, or measure, writing a line of JSON for each case as it comes."""
    parser = argparse.ArgumentParser("python -m experiments.corpus", None, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--truth", action="store_true", help="train, sample, keep, compare")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--out", type=Path, default=OUT, help="where JSON lines go")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases() if case.name.startswith(tuple(options.only))]
    if not options.truth:
        for case in chosen:
            print(case.name)
        return
    rows = []
    with options.out.open("w") as file:
        for case in chosen:
            rows.append(measured(case))
            print(json.dumps(rows[-1]), file=file, flush=True)
    for each in tables(rows):
        print(each.markdown())


if __name__ == "__main__":
    main()
