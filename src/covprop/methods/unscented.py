"""A few points that have the moments of the input."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.covariance.base import symmetric
from covprop.errors import UnsupportedOperation
from covprop.methods.base import Advance, Estimate, FunctionMethod
from covprop.methods.network import Network
from covprop.methods.roots import Root


@final
@dataclass(frozen=True)
class Unscented(FunctionMethod):
    """The unscented transform (Julier & Uhlmann; Wan & van der Merwe, scaled): 2 n + 1 points.

    The mean, and the mean +- sqrt(alpha^2 (n + kappa)) times each column of a square root of the
    covariance, n the number of elements of all inputs. The mean is exact for quadratic functions.

    alpha: how far out the points are; kappa: a second number for that (3 - n is Julier's choice);
    beta: added to the weight of the central point in the covariance (2 is Wan & van der Merwe's).
    By default the points are as far out as a sample is likely to be, and all weights are at
    least zero, so that the covariance is positive semi-definite: the cubature rule. A small alpha
    makes large weights of opposite signs, which float32 does not bear, and may make variances
    negative.
    """

    alpha: float = 1.0
    beta: float = 0.0
    kappa: float = 0.0

    def __post_init__(self) -> None:
        """Refuse points that are nowhere."""
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha is a positive number, not {self.alpha}")
        if not (math.isfinite(self.beta) and math.isfinite(self.kappa)):
            raise ValueError(f"beta and kappa are numbers, not {self.beta} and {self.kappa}")

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """The sum, what it is scaled and shifted by, and the symmetric part."""
        return 5 * dtype.itemsize

    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """Weighted moments of the outputs about the output at the mean, some points at a time."""
        roots = [Root.of(x) for x in network.inputs]
        size = sum(root.width for root in roots)
        if size + self.kappa <= 0:
            raise UnsupportedOperation(
                f"n + kappa must be positive, and the input has n = {size}; kappa is {self.kappa}"
            )
        reach = self.alpha**2 * (size + self.kappa)  # squared, and n + lambda
        centre = network(*network.means)
        sums = [_Sums(value) for value in centre]
        advance(1, 2 * size + 1)
        for i, root in enumerate(roots):
            count = root.width
            for start in range(0, count, network.step):
                stop = min(count, start + network.step)
                offset = math.sqrt(reach) * root.columns(start, stop)
                for sign in (1, -1):
                    points = [mean.expand(stop - start, *mean.shape) for mean in network.means]
                    points[i] = points[i] + sign * offset
                    for total, values in zip(sums, network.at(points), strict=True):
                        total.add(values)
                advance(2 * (stop - start), 2 * size + 1)
        # The central point has d = 0. Its weight 1 - n / reach + 1 - alpha^2 + beta, and the -2 of
        # centring the others at s, leave this much of s s^T.
        return [(*total.moments(reach, self.beta - self.alpha**2), None) for total in sums]


class _Sums:
    """Sums of d = y - y_0 and of d d^T."""

    def __init__(self, centre: Tensor) -> None:
        self.centre = centre
        self.first = torch.zeros_like(centre)
        self.second = centre.new_zeros(*centre.shape, centre.shape[-1])

    def add(self, values: Tensor) -> None:
        deviation = (values - self.centre).movedim(0, -2)  # (*batch, count, m)
        self.first = self.first + deviation.sum(-2)
        self.second = self.second + deviation.mT @ deviation

    def moments(self, reach: float, extra: float) -> tuple[Tensor, Tensor]:
        """Mean y_0 + s, s = sum d / (2 reach); covariance sum d d^T / (2 reach) + extra s s^T."""
        shift = self.first / (2 * reach)
        outer = shift[..., :, None] * shift[..., None, :]
        return self.centre + shift, symmetric(self.second / (2 * reach) + extra * outer)
