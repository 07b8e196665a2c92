"""PL-DNN as it was in 2018, when its variance was known for a ReLU of mean zero alone.

Bibi, Alfadly & Ghanem (CVPR 2018) give the second moment of affine, ReLU, affine for what has mean
zero before the ReLU; Alfadly et al. (2020) for any mean, which is `cp.PiecewiseLinear`. The paper's
figures are those of the former.
"""

import torch
from torch import nn

import covprop as cp


def zero_mean(model: nn.Sequential, x: cp.Gaussian) -> cp.Gaussian:
    """The mean of PL-DNN, and B Cov(relu(y)) B^T for y ~ N(0, A S A^T), around the last ReLU."""
    last = max(place for place, layer in enumerate(model) if isinstance(layer, nn.ReLU))
    before = cp.propagate(model[:last], x, cp.Linearized())
    centred = cp.Gaussian(torch.zeros_like(before.mean), before.covariance, validate_args=False)
    rectified = cp.propagate(model[last], centred, cp.Exact()).covariance
    at = cp.Gaussian(model[last](before.mean), rectified, validate_args=False)
    covariance = cp.propagate(model[last + 1 :], at, cp.Linearized()).covariance
    mean = cp.propagate(model, x, cp.PiecewiseLinear()).mean
    return cp.Gaussian(mean, covariance, validate_args=False)
