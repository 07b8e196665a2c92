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

from covprop.cli.answers import Answer
from covprop.cli.refusals import ExitCode
from covprop.gaussian import Gaussian
from covprop.propagate import propagate
from covprop.report.table import Table, in_bytes
from covprop.room import free_bytes

PACKAGES = ("torch", "numpy", "tqdm", "typer", "rich", "safetensors", "onnx", "onnx2pytorch",
            "scikit-learn", "matplotlib")  # fmt: skip


class Row(NamedTuple):
    """An activation of a pair of Gaussians, and the moments of what comes out."""

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
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Errors in units of the standard deviations that come out."""


class Check(NamedTuple):
    """One activation in one dtype: its largest error, and whether that is fine."""

    name: str
    dtype: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.error <= self.tolerance


def checked(row: Row, dtype: torch.dtype) -> Check:
    """The largest error of mean, variance and covariance."""
    mean, stddev = (
        torch.tensor(values, dtype=torch.float64) for values in (row.means, row.stddevs)
    )
    pattern = torch.tensor([[1.0, row.correlation], [row.correlation, 1.0]], dtype=torch.float64)
    matrix = pattern * stddev[:, None] * stddev
    y = propagate(row.function, Gaussian(mean.to(dtype), matrix.to(dtype), validate_args=False))
    variance = torch.tensor(row.variance, dtype=torch.float64)
    deviation = variance.sqrt()
    errors = torch.cat([
        (y.mean.double() - torch.tensor(row.mean, dtype=torch.float64)) / deviation,
        y.variance.double() / variance - 1,
        (y.covariance_matrix[0, 1].double() - row.covariance)[None] / deviation.prod(),
    ])  # fmt: skip
    error = float(errors.abs().nan_to_num(nan=math.inf).max())
    return Check(row.name, str(dtype).removeprefix("torch."), error, TOLERANCE[dtype])


def versions() -> dict[str, str | None]:
    """Of Python, covprop and what it can use; None is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("covprop", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Where it computes."""
    cuda = torch.cuda.is_available()
    return {
        "system": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "free_bytes": free_bytes(torch.device("cpu")),
    }


def answer(as_json: bool) -> Answer:
    """Everything, and no if a check fails."""
    checks = [checked(row, dtype) for row in ROWS for dtype in TOLERANCE]
    passed = all(check.passed for check in checks)
    installed, where = versions(), machine()
    told = {
        "versions": installed,
        "machine": where,
        "checks": [{**check._asdict(), "passed": check.passed} for check in checks],
        "passed": passed,
    }
    said = [(name, version or "not installed") for name, version in installed.items()]
    said += [
        (key, in_bytes(value) if "bytes" in key else str(value)) for key, value in where.items()
    ]
    rows = [
        (check.name, check.dtype, f"{check.error:.1e}", f"{check.tolerance:.0e}",
         "right" if check.passed else "WRONG")
        for check in checks
    ]  # fmt: skip
    head = ("self-test", "dtype", "error", "at most", "")
    verdict = "all is well" if passed else "a self-test failed: do not trust results from here"
    parts = (
        Table(("what", "found"), tuple(said), remarks=1), "",
        Table(head, tuple(rows), words=2, remarks=1), verdict,
    )  # fmt: skip
    return Answer(told, parts, as_json, ExitCode.FINE if passed else ExitCode.NO)
