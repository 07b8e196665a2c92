"""The rival approximation of ReLU's covariance: Wu et al. 2019, deterministic VI.

For unit variances they write Cov = rho Phi(a) Phi(b) + exp(-Q), with Q quadratic in the means a, b.
Matching K1 = int_0^rho (rho - r) phi2(a, b; r) dr and its second derivatives at a = b = 0 gives Q.
"""

import math

import torch
from torch import Tensor


def relu_covariance(a: Tensor, b: Tensor, rho: Tensor) -> Tensor:
    """Cov(relu(a + x), relu(b + y)) as approximated for standard normal x, y of correlation rho.

    exp(-Q) = rho g / (2 pi) exp(-rho (a^2 + b^2) / (2 g (1 + q)) + (asin rho - rho) a b / (rho g)),
    q = sqrt(1 - rho^2), g = asin rho - rho / (1 + q). Exact where both means are zero.
    """
    root = (1 - rho.square()).sqrt()
    angle = torch.asin(rho)
    g = angle - rho / (1 + root)
    exponent = -rho * (a.square() + b.square()) / (2 * g * (1 + root))
    exponent = exponent + (angle - rho) * a * b / (rho * g)
    return rho * _cdf(a) * _cdf(b) + rho * g / (2 * math.pi) * torch.exp(exponent)


def _cdf(z: Tensor) -> Tensor:
    return torch.erfc(-z / math.sqrt(2)) / 2
