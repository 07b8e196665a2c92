"""`covprop doctor`: what is installed, where it computes, and whether it computes right."""

import importlib.metadata
import math
import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from covprop.cli.output import CommandResult, ExitCode
from covprop.flow.lineage import free_bytes
from covprop.gaussian import Gaussian
from covprop.kernels import compiled
from covprop.propagate import GAUSSIAN_LAYERS, propagate
from covprop.text_table import Table, in_bytes

PACKAGES = ("covprop", "torch", "numpy", "tqdm", "typer", "rich", "safetensors", "onnx",
            "onnx2pytorch", "scikit-learn", "matplotlib")  # fmt: skip
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # in standard deviations of the output


class Row(NamedTuple):
    """An activation of a pair of Gaussians, and the moments of its output."""

    name: str
    function: Callable[[Tensor], Tensor]
    means: tuple[float, float]
    stddevs: tuple[float, float]
    correlation: float
    mean: tuple[float, float]
    variance: tuple[float, float]
    covariance: float


ROWS = (
    Row("relu", torch.relu, (-1.2568359375, -4.0), (3.003173828125, 7.71337890625), 0.9,
        (0.67308975015987327, 1.4819303594737996), (1.7475314413873784, 9.8456247483862462),
        3.5008369145460403),
    Row("gelu", F.gelu, (1.404052734375, 0.57421875), (1.65283203125, 0.45159912109375), 0.9999,
        (1.5091742198789722, 0.46640014072280983), (2.0307319604863059, 0.15338531817925485),
        0.553620590222199),
    Row("sigmoid", torch.sigmoid, (-1.3330078125, 2.514404296875), (1.236572265625,
        0.57391357421875), -0.9, (0.26190397093155987, 0.9153725992547358),
        (0.039652764902593174, 0.0020710069965539655), -0.0079872323962527879),
    Row("tanh", torch.tanh, (0.0, -0.060302734375), (0.0689544677734375, 0.123626708984375), 1.0,
        (0.0, -0.059339306078220175), (0.0047101027023413603, 0.014734198989099171),
        0.0083299521735251836),
    Row("exp", torch.exp, (0.13916015625, 1.6533203125), (0.299468994140625, 0.58062744140625),
        -0.3388, (1.2020170196745588, 6.1834998216493702), (0.13556407667420581,
        15.329394593305283), -0.42521476338134129),
)  # fmt: skip
"""Rows of the table of oracles, shared/oracles/activation_covariance.csv: float128 quadrature, of
which a second route (mpmath, or a two-dimensional trapezoidal rule) agreed to 1e-15."""


def error_of(row: Row, dtype: torch.dtype) -> float:
    """The largest error of mean, variance and covariance; infinite for NaN."""
    mean, stddev, true_mean, variance = (
        torch.tensor(values, dtype=torch.float64)
        for values in (row.means, row.stddevs, row.mean, row.variance)
    )
    pattern = torch.tensor([[1.0, row.correlation], [row.correlation, 1.0]], dtype=torch.float64)
    matrix = pattern * stddev[:, None] * stddev
    x = Gaussian(mean.to(dtype), matrix.to(dtype), validate_args=False)
    y = propagate(row.function, x, GAUSSIAN_LAYERS)
    deviation = variance.sqrt()
    errors = torch.cat([
        (y.mean.double() - true_mean) / deviation,
        y.variance.double() / variance - 1,
        (y.covariance_matrix[0, 1].double() - row.covariance)[None] / deviation.prod(),
    ])  # fmt: skip
    return float(errors.abs().nan_to_num(nan=math.inf).max())


def result(as_json: bool) -> CommandResult:
    """Versions, machine and self-tests; the answer is no if a test fails."""
    checks: list[dict[str, Any]] = []
    for row in ROWS:
        for dtype, tolerance in TOLERANCE.items():
            error = error_of(row, dtype)
            checks.append({
                "name": row.name, "dtype": str(dtype).removeprefix("torch."), "error": error,
                "tolerance": tolerance, "passed": error <= tolerance,
            })  # fmt: skip
    passed = all(check["passed"] for check in checks)
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": compiled.description(),
        "free_bytes": free_bytes(torch.device("cpu")),
    }
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    record = {"versions": versions, "machine": machine, "checks": checks, "passed": passed}
    cells = {name: version or "not installed" for name, version in versions.items()}
    cells |= {name: str(value) for name, value in machine.items()}
    cells["free_bytes"] = in_bytes(machine["free_bytes"])
    rows = [
        (check["name"], check["dtype"], f"{check['error']:.1e}", f"{check['tolerance']:.0e}",
         "right" if check["passed"] else "WRONG")
        for check in checks
    ]  # fmt: skip
    parts = (
        Table(("what", "found"), tuple(cells.items()), remarks=1),
        "",
        Table(("self-test", "dtype", "error", "at most", ""), tuple(rows), words=2, remarks=1),
        "all is well" if passed else "a self-test failed: do not trust results from here",
    )
    return CommandResult(record, parts, as_json, ExitCode.OK if passed else ExitCode.NO)
