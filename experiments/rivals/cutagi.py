"""cuTAGI (PyPI: pytagi 0.1.12; Goulet et al. 2021): means and variances, units as if independent.

Weights are given with variance zero. Its `ReLU`, `Tanh` and `Sigmoid` are tangents at the mean; its
`MixtureReLU` has the moments of a rectified Gaussian. It computes in float32, outside of torch.
Chains of linear layers and these activations are translated here, nothing else.
"""

from typing import Any

import torch
from torch import Tensor, nn

import covprop as cp
from experiments.rivals.rival import Refused, chain, imported

REQUIREMENT = "pytagi==0.1.12"
SMOOTH = {nn.Tanh: "Tanh", nn.Sigmoid: "Sigmoid"}


def propagate(model: nn.Module, x: cp.Gaussian) -> cp.Gaussian:
    """ReLU by its tangent."""
    return _propagated(model, x, "ReLU")


def propagate_mixture(model: nn.Module, x: cp.Gaussian) -> cp.Gaussian:
    """ReLU by the moments of a rectified Gaussian."""
    if not any(isinstance(layer, nn.ReLU) for layer in model.modules()):
        raise Refused("there is no ReLU in this network")
    return _propagated(model, x, "MixtureReLU")


def _propagated(model: nn.Module, x: cp.Gaussian, relu: str) -> cp.Gaussian:
    layers = list(chain(model))
    _check(layers)
    tagi = imported("pytagi.nn", REQUIREMENT)
    names: dict[type[nn.Module], str] = {**SMOOTH, nn.ReLU: relu}
    network = tagi.Sequential(*(
        tagi.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        if isinstance(layer, nn.Linear) else getattr(tagi, names[type(layer)])()
        for layer in layers
    ))  # fmt: skip
    network.set_threads(1)
    network.preinit_layer()
    network.load_state_dict({
        f"Linear.{place}": _known(layer)
        for place, layer in enumerate(layers) if isinstance(layer, nn.Linear)
    })  # fmt: skip
    network.eval()
    inputs = (part.flatten().float().numpy() for part in (x.mean, x.variance))
    mean, variance = (torch.from_numpy(part.copy()).to(x.dtype) for part in network(*inputs))
    shape = (1, -1) if len(x.batch_shape) else (-1,)
    return cp.Gaussian.diagonal(
        mean.reshape(shape), variance=variance.reshape(shape), batch_dims=len(x.batch_shape)
    )


def _check(layers: list[nn.Module]) -> None:
    if not layers or not isinstance(layers[0], nn.Linear):
        raise Refused("it takes the number of inputs from a linear layer at the beginning")
    for layer in layers:
        if not isinstance(layer, nn.Linear | nn.ReLU | nn.Tanh | nn.Sigmoid):
            raise Refused(f"we have no translation of {type(layer).__name__} for it")


def _known(layer: nn.Linear) -> tuple[list[float], ...]:
    """Means and variances of weights and biases."""

    def pair(values: Tensor | None) -> tuple[Any, Any]:
        numbers = [] if values is None else values.flatten().tolist()
        return numbers, [0.0] * len(numbers)

    return *pair(layer.weight), *pair(layer.bias)
