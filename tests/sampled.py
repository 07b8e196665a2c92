"""Moments of a network's outputs by samples, with those of its tangent as a control variate."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

CHUNK, FIRST = 500, 4_000
"""Samples at a time, and how many there are at least."""


@dataclass(frozen=True)
class Sampled:
    """Mean and standard deviation of every output, and the standard errors of both."""

    mean: Tensor
    stddev: Tensor
    mean_error: Tensor
    stddev_error: Tensor


@torch.no_grad()
def sampled(model: nn.Module, mean: Tensor, noise: float, precision: float, most: int) -> Sampled:
    """Of inputs mean (*event) with independent noise, in float32, whose rounding is far below.

    As many samples as the standard errors of all deviations need to be below `precision` of them.
    What is known is taken out: the tangent l = J d has variance noise^2 |J|^2, and the squares of f
    and l vary together, so that with b = Cov(f^2, l^2) / Var l^2 that of f is
    E[f^2 - b l^2] + b noise^2 |J|^2.
    """
    with torch.enable_grad():
        slope = torch.autograd.functional.jacobian(model, mean[None]).reshape(-1, mean.numel())
    known = noise**2 * slope.double().square().sum(-1)
    generator = torch.Generator().manual_seed(7)
    parts: list[tuple[Tensor, Tensor]] = []
    wanted = FIRST
    while wanted <= most:
        while len(parts) * CHUNK < wanted:
            shift = noise * torch.randn((CHUNK, *mean.shape), dtype=mean.dtype, generator=generator)
            tangent = shift.reshape(CHUNK, -1) @ slope.mT
            parts.append((model(mean + shift).reshape(CHUNK, -1).double(), tangent.double()))
        f, tangents = (torch.cat(sides) for sides in zip(*parts, strict=True))
        square, other = (f - f.mean(0)).square(), tangents.square() - known
        factor = ((square - square.mean(0)) * other).mean(0) / other.square().mean(0)
        left, rest = square - factor * other, f - tangents
        stddev = (left.mean(0) * wanted / (wanted - 1)).sqrt()
        error = left.std(0) / wanted**0.5 / (2 * stddev)
        if bool((error <= precision * stddev).all()):
            return Sampled(rest.mean(0), stddev, rest.std(0) / wanted**0.5, error)
        wanted *= 2
    raise AssertionError(f"{wanted // 2} samples do not suffice")
