"""Sketches of large networks: errors against dense and against samples, time, memory, growth."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from benchmarks import memory, resnets
from benchmarks.figures import Figure, outcome
from benchmarks.scaling import exponent
from experiments import mnist as data
from experiments import training
from experiments.options import WEIGHTS, Options

SEED = 0
GIGABYTE = 1e9
NOISE, COHERENT = 0.3, 0.1
"""Of a pixel, where pixels have a deviation of one: independent, and along few directions."""
DIRECTIONS = 8
"""Of noise of low rank."""
STRONG = "strong low rank"
LIMITS = {"isotropic": 0.015, "low rank": 0.05}
"""What errors of deviations may be; strong noise in few directions is no longer Gaussian."""
TANGENTS, USUAL, MANY = (16, 64, 256), "64", "256"
PASSES = 5
"""Before a run and after it: their median is the unit of its time."""
SIDES, SMOKE_SIDES, ROUNDS = (64, 128, 192, 256, 384), (32, 48), 3
"""Of images, over which cost is seen to grow."""
STEPS, BATCH, RATE = 90, 64, 1e-3
"""Of the brief training."""


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _errors(y: cp.Gaussian, stddev: Tensor, mean: Tensor) -> dict[str, float]:
    ratio = (y.stddev / stddev - 1).abs()
    return {
        "mean": float(ratio.mean()), "worst": float(ratio.max()),
        "means": float(((y.mean - mean).abs() / stddev).max()),
    }  # fmt: skip


def _timed(model: nn.Module, x: cp.Gaussian, method: Any) -> tuple[cp.Gaussian, float, float]:
    """The result, its seconds, and these in forward passes of the means, just before and after."""
    passes = [_seconds(model, x.mean) for _ in range(PASSES)]
    started = time.perf_counter()
    y = cp.propagate(model, x, method)
    seconds = time.perf_counter() - started
    passes += [_seconds(model, x.mean) for _ in range(PASSES)]
    return y, seconds, seconds / statistics.median(passes)


def _seconds(model: nn.Module, mean: Tensor) -> float:
    started = time.perf_counter()
    model(mean)
    return time.perf_counter() - started


def mnist(smoke: bool) -> dict[str, Any]:
    """The trained MNIST network: sketches against dense covariances, and variances alone."""
    options = Options(smoke=smoke)
    try:
        model = training.trained(options)
    except FileNotFoundError:
        with torch.enable_grad():
            training.run(options)
        model = training.trained(options)
    images = data.load("t10k").images[: 1 if smoke else 2]
    rows: list[dict[str, Any]] = []
    for image in images:
        x = cp.Gaussian.isotropic(image[None], stddev=NOISE, batch_dims=1)
        dense, _, dense_passes = _timed(model, x, cp.Exact())
        alone = cp.propagate(model, x, cp.AssumedDensity())
        row: dict[str, Any] = {
            "variances alone": float((1 - alone.stddev / dense.stddev).mean()),
            "dense passes": dense_passes,
        }
        for tangents in TANGENTS:
            y, _, passes = _timed(model, x, cp.Sketched(tangents, generator=_seeded(SEED)))
            found = _errors(y, dense.stddev, dense.mean)
            row[str(tangents)] = {**found, "passes": passes}
        rows.append(row)
    best = [row[USUAL] for row in rows]
    figures = [
        Figure("std against dense, mean", max(r["mean"] for r in best), at_most=0.01),
        Figure("std against dense, worst logit", max(r["worst"] for r in best), at_most=0.03),
        Figure("means in stds, worst", max(r["means"] for r in best), at_most=0.1),
        Figure("the same, 256 tangents", max(row[MANY]["means"] for row in rows)),
        Figure("forward passes", min(r["passes"] for r in best)),
        Figure("variances alone: too small by", min(r["variances alone"] for r in rows)),
    ]
    return outcome(figures, rows=rows, noise=NOISE, tangents=TANGENTS)


def resnet18(smoke: bool) -> dict[str, Any]:
    """ResNet-18 with average pooling, on MNIST at 64x64, trained for minutes: against samples."""
    return _residual(smoke, "average", nn.AvgPool2d)


def max_pooling(smoke: bool) -> dict[str, Any]:
    """The same with max pooling of rectified units, which are far from Gaussian."""
    return _residual(smoke, "maximum", nn.MaxPool2d)


def _residual(smoke: bool, name: str, pool: Callable[..., nn.Module]) -> dict[str, Any]:
    side, known = 32 if smoke else 64, name == "average"
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = resnets.resnet18(channels=1, stem=8 if smoke else resnets.STEM, pool=pool)
    test = _digits("t10k", side, 200)
    path = WEIGHTS / f"resnet18-{name}{'-smoke' if smoke else ''}.pt"
    if not path.exists():
        _train(model, *_digits("train", side, 64 if smoke else STEPS * BATCH))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=True))
    model.eval().requires_grad_(False)
    accuracy = float((model(test[0]).argmax(1) == test[1]).float().mean())
    image = test[0][:1]
    factor = torch.randn(*image.shape, DIRECTIONS, generator=_seeded(1))
    factor = F.avg_pool2d(factor.movedim(-1, 0)[:, 0], 9, 1, 4).movedim(0, -1)[None]  # smooth
    factor = factor / factor.square().sum(-1).mean().sqrt()
    inputs = {
        "isotropic": cp.Gaussian.isotropic(image, stddev=NOISE, batch_dims=1),
        "low rank": cp.Gaussian.low_rank(image, COHERENT * factor, batch_dims=1),
        STRONG: cp.Gaussian.low_rank(image, NOISE * factor, batch_dims=1),
    }
    rows, figures = {}, [Figure("accuracy of the network", accuracy)]
    for kind, x in inputs.items():
        mean, stddev, noise = _sampled(model, x, 64 if smoke else 2_000)
        row: dict[str, Any] = {"stderr of the truth": noise}
        for tangents in TANGENTS:
            y, _, passes = _timed(model, x, cp.Sketched(tangents, generator=_seeded(SEED)))
            row[str(tangents)] = {
                **_errors(y, stddev, mean), "passes": passes,
                "stderr": float((y.covariance_stderr[0].diagonal() / y.variance[0] / 2).mean()),
            }  # fmt: skip
        if kind == STRONG:
            few = cp.Sketched(TANGENTS[0], generator=_seeded(SEED), replicates=1)
            y, _, passes = _timed(model, x, cp.Split(3, 3, few))
            row["split in 3 x 3 x 3"] = {**_errors(y, stddev, mean), "passes": passes}
            figures.append(
                Figure(f"{kind}: std, split in 3 x 3 x 3", row["split in 3 x 3 x 3"]["mean"])
            )
        rows[kind] = row
        best = row[USUAL]
        limit = LIMITS.get(kind) if known else None
        close = None if limit is None else 0.1
        figures += [
            Figure(f"{kind}: std against samples, mean", best["mean"], at_most=limit),
            Figure(f"{kind}: standard error of the samples", noise),
            Figure(f"{kind}: means in stds, worst", best["means"], at_most=close),
            Figure(f"{kind}: the same, 256 tangents", row[MANY]["means"]),
            Figure(f"{kind}: forward passes", best["passes"]),
        ]
    return outcome(figures, rows=rows, noise=NOISE, units=resnets.units(model, image))


def _digits(split: str, side: int, count: int) -> tuple[Tensor, Tensor]:
    found = data.load(split)
    images = F.interpolate(found.images[:count], size=(side, side), mode="bilinear")
    return images, found.labels[:count]


@torch.enable_grad()
def _train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    for rows in torch.arange(len(labels)).split(BATCH):
        optimiser.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimiser.step()
    resnets.normalise(model, images[: 4 * BATCH])


def _sampled(model: nn.Module, x: cp.Gaussian, pairs: int) -> tuple[Tensor, Tensor, float]:
    """Mean and deviations by antithetic samples, with the tangent at the mean as control variate.

    Cov(f) - Cov(J x) + J S J^T: also the mean relative standard error of the deviations.
    """
    generator, point = _seeded(2), x.mean
    slope = torch.func.jacrev(lambda t: model(t)[0])(point).flatten(1)  # (10, n)
    known = x.covariance.map(lambda t: t[0]).quadratic(slope)
    centre, values, controls = model(point), [], []
    for start in range(0, pairs, BATCH):
        noise = x.covariance.noise(min(BATCH, pairs - start), generator)[:, 0]
        images = noise.reshape(len(noise), *point.shape[1:])
        values.append(torch.stack([model(point + s * images) - centre for s in (1, -1)]))
        controls.append(torch.stack([s * noise @ slope.mT for s in (1, -1)]))
    y, z = (torch.cat(parts, 1).double() for parts in (values, controls))
    mean = y.mean((0, 1))
    each = ((y - mean).square() - z.square()).mean(0)  # (pairs, 10)
    variance = known.diagonal().double() + each.mean(0)
    error = each.std(0) / len(each) ** 0.5 / variance / 2
    return (centre + mean).to(point), variance.sqrt().to(point), float(error.mean())


def resnet50(smoke: bool) -> dict[str, Any]:
    """ResNet-50 at 224x224, random weights: time in forward passes, peak memory."""
    result = memory.spawned(measure_resnet50, smoke)
    figures = [
        Figure("forward passes, 16 tangents in one run", result["one run"]["passes"], at_most=150),
        Figure("forward passes, in two runs", result["two runs"]["passes"]),
        Figure("peak memory, GB", result["bytes"] / GIGABYTE, at_most=5),
        Figure("standard error of the stds", result["stderr"]),
    ]
    return outcome(figures, **result)


@torch.no_grad()
def measure_resnet50(smoke: bool) -> dict[str, Any]:
    """In a fresh process."""
    torch.manual_seed(SEED)
    side, stem = (32, 8) if smoke else (224, resnets.STEM)
    model = resnets.normalise(resnets.resnet50(stem=stem), torch.randn(4, 3, side, side))
    x = cp.Gaussian.isotropic(torch.randn(1, 3, side, side), stddev=0.1, batch_dims=1)
    small = cp.Gaussian.isotropic(torch.randn(1, 3, 32, 32), stddev=0.1, batch_dims=1)
    methods = {
        name: cp.Sketched(16, generator=_seeded(SEED), replicates=count)
        for name, count in (("one run", 1), ("two runs", 2))
    }
    cp.propagate(model, small, methods["one run"])  # threads and libraries are there from here on
    found: dict[str, Any] = {"units": resnets.units(model, x.mean), "bytes": 0}
    for name, method in methods.items():
        results: list[Any] = []
        peak = memory.peak(lambda m=method, r=results: r.append(_timed(model, x, m)))
        ((y, seconds, passes),) = results
        found[name] = {"seconds": seconds, "passes": passes, "bytes": peak}
        found["bytes"] = max(found["bytes"], peak)
    found["stderr"] = float((y.covariance_stderr[0].diagonal() / y.variance[0] / 2).mean())
    return found


def growth(smoke: bool) -> dict[str, Any]:
    """Time and memory against the number of units of one residual network, and their exponents."""
    sides = SMOKE_SIDES if smoke else SIDES
    rows = [memory.spawned(measure_growth, side) for side in sides]
    counts = [row["units"] for row in rows]
    fits = {name: exponent(counts, [row[name] for row in rows]) for name in ("seconds", "bytes")}
    figures = [
        Figure("exponent of time against units", fits["seconds"][0], at_most=1.2),
        Figure("exponent of memory against units", fits["bytes"][0], at_most=1.2),
        Figure("forward passes, largest", rows[-1]["passes"]),
    ]
    return outcome(figures, rows=rows, fits=fits, sides=sides)


@torch.no_grad()
def measure_growth(side: int) -> dict[str, Any]:
    """In a fresh process: one image of this side."""
    torch.manual_seed(SEED)
    model = resnets.normalise(resnets.resnet18(stem=16), torch.randn(4, 3, 64, 64))
    small, x = (
        cp.Gaussian.isotropic(torch.randn(1, 3, n, n), stddev=0.1, batch_dims=1) for n in (32, side)
    )
    method = cp.Sketched(16, generator=_seeded(SEED))
    cp.propagate(model, small, method)  # threads and libraries are there from here on
    before = memory.resident()
    peak = max(1, memory.peak(lambda: cp.propagate(model, x, method)) - before)
    runs = [_timed(model, x, method)[1:] for _ in range(ROUNDS)]
    return {
        "units": resnets.units(model, x.mean), "seconds": min(seconds for seconds, _ in runs),
        "passes": statistics.median(passes for _, passes in runs), "bytes": peak,
    }  # fmt: skip
