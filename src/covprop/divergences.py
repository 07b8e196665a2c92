"""How far apart two Gaussians are.

Both are computed in float64 from eigenvalues, so that a singular covariance is no obstacle.
"""

import math

import torch
from torch import Tensor

from covprop.gaussian import Gaussian

SLACK = 8.0
"""In units of machine epsilon times n: the share of the largest eigenvalue that is rounding."""


@torch.no_grad()
def wasserstein_distance(first: Gaussian, second: Gaussian) -> Tensor:
    """The 2-Wasserstein distance of each pair of a batch, in the units of the elements.

    W^2 = |m - n|^2 + tr(C + D - 2 (C^1/2 D C^1/2)^1/2)
        = |m - n|^2 + min over orthogonal U of |C^1/2 - D^1/2 U|_F^2

    in the second form nothing cancels where C and D are nearly equal.
    """
    _check(first, second)
    left, right = _root(_matrix(first)), _root(_matrix(second))
    u, _, v = torch.linalg.svd(right @ left)  # the polar factor of it is the best U
    apart = (left - right @ (u @ v)).square().sum((-2, -1))
    return ((_mean(first) - _mean(second)).square().sum(-1) + apart).sqrt()


@torch.no_grad()
def kl_divergence(first: Gaussian, second: Gaussian) -> Tensor:
    """KL(first || second) of each pair of a batch, in nats.

    (1/2) (sum_i (l_i - 1 - log l_i) + |D^-1/2 (m - n)|^2), l the eigenvalues of D^-1/2 C D^-1/2.

    Singular covariances: the divergence on their common support where both vary in the same
    directions, to rounding, and the means differ in no other; else infinite, as it truly is.
    """
    _check(first, second)
    dtype = torch.promote_types(first.dtype, second.dtype)
    rounding = SLACK * torch.finfo(dtype).eps * first.event_shape.numel()
    (m, c), (n, d) = _flat(first), _flat(second)
    found = [_kl(*pair, rounding) for pair in zip(m, n, c, d, strict=True)]
    return torch.tensor(found, dtype=torch.float64, device=first.device).reshape(first.batch_shape)


def _kl(m: Tensor, n: Tensor, c: Tensor, d: Tensor, rounding: float) -> float:
    """One divergence: on the support of both together, which each of them has to fill."""
    values, vectors = torch.linalg.eigh(c + d)
    least = rounding * float(values.clamp(min=0).max())
    vary = values > least
    shift = vectors.mT @ (m - n)
    blurred = rounding * float(torch.maximum(m.abs(), n.abs()).max()) + least**0.5
    if bool((shift[~vary].abs() > blurred).any()):
        return math.inf
    if not bool(vary.any()):
        return 0.0
    basis = vectors[:, vary]
    c, d = basis.mT @ c @ basis, basis.mT @ d @ basis
    widths, axes = torch.linalg.eigh(d)
    if float(torch.linalg.eigvalsh(c).min()) <= least or float(widths.min()) <= least:
        return math.inf
    whiten = axes * widths.rsqrt()
    ratios = torch.linalg.eigvalsh(whiten.mT @ c @ whiten)
    distance = (whiten.mT @ shift[vary]).square().sum()
    return float((ratios - 1 - ratios.log()).sum() + distance) / 2


def _check(first: Gaussian, second: Gaussian) -> None:
    if first.mean.shape != second.mean.shape or first.batch_shape != second.batch_shape:
        raise ValueError(
            f"two Gaussians of one shape are compared, and these have means of shapes "
            f"{tuple(first.mean.shape)} and {tuple(second.mean.shape)}"
        )


def _mean(x: Gaussian) -> Tensor:
    return x.mean.double().reshape(*x.batch_shape, x.event_shape.numel())


def _matrix(x: Gaussian) -> Tensor:
    return x.covariance_matrix.double()


def _flat(x: Gaussian) -> tuple[Tensor, Tensor]:
    """Means and covariances with one batch dimension."""
    size = x.event_shape.numel()
    return _mean(x).reshape(-1, size), _matrix(x).reshape(-1, size, size)


def _root(matrix: Tensor) -> Tensor:
    """The symmetric square root; eigenvalues below zero are rounding."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt()[..., None, :] @ vectors.mT
