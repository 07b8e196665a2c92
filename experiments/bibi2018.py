"""PL-DNN as the paper used it: around the middle ReLU, with the variance of 2018.

Bibi, Alfadly & Ghanem (CVPR 2018) give the second moment of affine, ReLU, affine for what has mean
zero before the ReLU; Alfadly et al. (2020) for any mean, which is `cp.PiecewiseLinear`.
"""

import torch
from torch import nn

import covprop as cp
from covprop.covariance import Diagonal


def rectifiers(model: nn.Sequential) -> list[int]:
    """The places of the ReLUs in a chain of layers."""
    return [place for place, layer in enumerate(model) if isinstance(layer, nn.ReLU)]


def any_mean(model: nn.Sequential, x: cp.Gaussian) -> cp.Gaussian:
    """PL-DNN with exact moments of its one ReLU, the middle one."""
    y: cp.Gaussian = cp.propagate(model, x, cp.PiecewiseLinear(len(rectifiers(model)) // 2))
    return y


def zero_mean(model: nn.Sequential, x: cp.Gaussian) -> cp.Gaussian:
    """Its mean f(mu) + B (E relu(y) - relu(E y)), but B Cov(relu(y - E y)) B^T for the covariance.

    y ~ N(f_1(mu), A S A^T) is what comes to the middle ReLU, B the Jacobian of what follows it.
    """
    places = rectifiers(model)
    middle = places[len(places) // 2]
    relu, rest = model[middle], model[middle + 1 :]
    y = cp.propagate(model[:middle], x, cp.Linearized())
    point = relu(y.mean)
    gain = torch.autograd.functional.jacobian(rest, point).flatten(-point.dim())  # (outputs, n)
    independent = cp.Gaussian(y.mean, Diagonal(y.variance.flatten()), validate_args=False)
    shift = cp.propagate(relu, independent).mean - point
    centred = cp.Gaussian(torch.zeros_like(y.mean), y.covariance, validate_args=False)
    covariance = gain @ cp.propagate(relu, centred).covariance_matrix @ gain.mT
    return cp.Gaussian(rest(point) + gain @ shift.flatten(), covariance, validate_args=False)
