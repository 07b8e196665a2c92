"""Linear layers with correlated weights, and the posteriors of laplace-torch and SWAG that are so.

Correlated weights are a linear function of independent ones. So their layers are ordinary layers
around a Bayesian one, and moments are as exact as those.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covprop.bayes.conversion import REPLACED, with_posterior
from covprop.bayes.layers import BayesLinear
from covprop.bayes.priors import Posterior, Prior
from covprop.covariance.semidefinite import square_root
from covprop.errors import UnsupportedOperation
from covprop.flow.tensor import is_plain

Block: TypeAlias = tuple[tuple[Tensor, ...], Tensor]
"""Eigenvectors of a weight's rows and columns, or of a bias, and variances along them."""


@final
class _CorrelatedPrior(Prior):
    """That of independent weights which stand for correlated ones: none that is known."""

    def divergence(self, posterior: Posterior) -> Tensor:
        del posterior
        raise UnsupportedOperation(
            "the divergence of correlated weights from a prior is not computed here: they are for "
            "predictions; the package that has found them knows it"
        )


def _independent(mean: Tensor, variance: Tensor, bias: bool = False) -> BayesLinear:
    """Weights (out, in) of these moments; with bias: a layer whose biases (out,) have them."""
    rows = mean[:, None] if bias else mean
    layer = BayesLinear(
        rows.shape[1], rows.shape[0], bias, prior=_CorrelatedPrior(), device=mean.device,
        dtype=mean.dtype,
    )  # fmt: skip
    with torch.no_grad():
        if bias:
            layer.weight_mean.zero_()
            layer.weight_log_stddev.fill_(-torch.inf)
            assert layer.bias_mean is not None
            assert layer.bias_log_stddev is not None
            layer.bias_mean.copy_(mean)
            layer.bias_log_stddev.copy_(variance.log() / 2)
        else:
            layer.weight_mean.copy_(mean)
            layer.weight_log_stddev.copy_(variance.log() / 2)
    return layer.requires_grad_(False).eval()


@final
class KroneckerLinear(nn.Module):
    """W = U Z V^T with independent Z, and a bias U' z: eigenvectors of Kronecker factors."""

    left: Tensor
    right: Tensor
    bias_left: Tensor

    def __init__(self, layer: nn.Linear, weight: Block, bias: Block | None) -> None:
        super().__init__()
        (left, right), variance = weight
        self.register_buffer("left", left)
        self.register_buffer("right", right.T.contiguous())
        self.inner = _independent(left.T @ layer.weight.detach() @ right, variance)
        self.offset: BayesLinear | None = None
        if bias is not None:
            (own,), variance = bias
            self.register_buffer("bias_left", own)
            self.offset = _independent(own.T @ layer.bias.detach(), variance, bias=True)

    def forward(self, x: Any) -> Any:
        """U (Z (V^T x)) + U' z."""
        y = F.linear(self.inner(F.linear(x, self.right)), self.left)
        if self.offset is None:
            return y
        return y + F.linear(self.offset(x[..., :1] * 0), self.bias_left)


@final
class FactorLinear(nn.Module):
    """Independent weights and biases, and beside them sum_k z_k F_k with independent z."""

    weights: Tensor
    biases: Tensor | None

    def __init__(self, layer: nn.Module, weights: Tensor, biases: Tensor | None) -> None:
        """layer: has the independent part; weights (out, in, k), biases (out, k): F."""
        super().__init__()
        self.layer, (out, _, rank) = layer, weights.shape
        self.shape = (out, rank)
        self.register_buffer("weights", weights.transpose(1, 2).flatten(0, 1).contiguous())
        self.register_buffer("biases", None if biases is None else biases.flatten())
        self.common = _independent(weights.new_zeros(1, rank), weights.new_ones(1, rank))

    def forward(self, x: Any) -> Any:
        """W x + b + sum_k z_k (F_k x): the same z at all places of an element of the batch."""
        if is_plain(x) and x.dim() == 1:  # which is no batch
            return self.forward(x[None])[0]
        parts = F.linear(x, self.weights, self.biases).unflatten(-1, self.shape)
        return self.layer(x) + self.common(parts).squeeze(-1)


def with_factor(model: nn.Module, factor_state: Mapping[str, Tensor]) -> nn.Module:
    """Add noise along a few directions to the weights of a linear layer, as in SWAG.

    The covariance of the weights becomes diag(v) + F F^T, with the present variances v of the
    layer. The model is changed in place, and returned.

    Args:
        model: A network with Bayesian layers, as `with_posterior` returns it.
        factor_state: F by the names of the weight and the bias, (*shape, k) each. They must belong
            to one layer: common directions of several layers would make these depend on each other,
            which covprop does not follow.

    Raises:
        UnsupportedOperation: If the names belong to several layers, or to a layer that is not
            linear.

    Example:
        network = bayes.to_bayesian(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)))
        network = bayes.with_factor(network, {"2.weight": 0.1 * torch.randn(1, 8, 5)})
    """
    paths = {name.rpartition(".")[0] for name in factor_state}
    if len(paths) != 1:
        raise UnsupportedOperation(
            f"the directions are of the weights of {len(paths)} layers ({', '.join(sorted(paths))})"
            ", and would make these depend on each other, which is not followed; give those of one "
            "layer, such as the last one, or sample the weights"
        )
    (path,) = paths
    layer = model.get_submodule(path)
    if not isinstance(layer, BayesLinear) or layer.members is not None:
        raise UnsupportedOperation(
            f"directions are of the weights of a linear layer, and {path or 'the model'} is a "
            f"{type(layer).__name__}; take the variances alone"
        )
    known = {name.rpartition(".")[2]: value for name, value in factor_state.items()}
    rank = {value.shape[-1] for value in known.values()}
    shapes = {"weight": (layer.out_features, layer.in_features), "bias": (layer.out_features,)}
    if layer.bias_mean is None:
        del shapes["bias"]
    if "weight" not in known or len(rank) > 1 or set(known) - set(shapes):
        raise ValueError(f"factor_state has one entry each for {', '.join(shapes)}, of one rank")
    for name, value in known.items():
        if tuple(value.shape[:-1]) != shapes[name] or not bool(value.isfinite().all()):
            raise ValueError(
                f"the directions of {path}.{name} are finite numbers of shape (*{shapes[name]}, k),"
                f" and here is {tuple(value.shape)}"
            )
    biases = known.get("bias")
    if biases is None and layer.bias_mean is not None:
        biases = known["weight"].new_zeros(layer.out_features, *rank)
    return _replaced(model, path, FactorLinear(layer, known["weight"], biases))


def from_laplace(posterior: Any) -> nn.Module:
    """A network whose random weights have a posterior of laplace-torch.

    It supports diagonal and Kronecker-factored posteriors of all weights or of the last layer, and
    full posteriors of the last layer. The correlations of the weights in a layer are exactly those
    of the posterior. laplace-torch itself linearises the network, or samples.

    Args:
        posterior: A fitted `laplace.Laplace`.

    Returns:
        A copy of the network, for `bayes.predict` and `cp.propagate`.

    Raises:
        UnsupportedOperation: If the posterior makes layers depend on each other (a full one of all
            weights, or one of low rank), is one of a subnetwork or of functions, or has Kronecker
            factors of a layer that is not linear.

    Example:
        def predictions(posterior, x):  # of laplace.Laplace(..., hessian_structure="kron")
            return bayes.predict(bayes.from_laplace(posterior), x)
    """
    last = hasattr(posterior.model, "last_layer")
    network = posterior.model.model if last else posterior.model
    names = [name for name, value in network.named_parameters() if value.requires_grad]
    if last:
        layer = posterior.model.last_layer
        (own,) = (path for path, module in network.named_modules() if module is layer)
        names = [f"{own}.{name}".lstrip(".") for name, _ in layer.named_parameters()]
        network = deepcopy(network)
        hooks = network.get_submodule(own)._forward_hooks
        for number, hook in list(hooks.items()):  # with which it has seen the features
            if hook.__module__.partition(".")[0] == "laplace":
                del hooks[number]
    if hasattr(posterior, "subnetwork_indices") or not hasattr(posterior, "posterior_precision"):
        raise _refused(posterior, "has no distribution of the weights of whole layers")
    parameters = dict(network.named_parameters())
    sizes = [parameters[name].numel() for name in names]

    def cut(vector: Tensor) -> dict[str, Tensor]:
        parts = zip(names, vector.detach().split(sizes), strict=True)
        return {name: part.reshape(parameters[name].shape) for name, part in parts}

    mean = {**network.state_dict(), **cut(posterior.mean)}
    none = {name: torch.zeros_like(mean[name]) for name in _random_names(network)}
    if hasattr(posterior, "posterior_variance"):
        return with_posterior(network, mean, {**none, **cut(posterior.posterior_variance)})
    if hasattr(posterior, "posterior_covariance"):
        if not last:
            raise _refused(
                posterior, "makes all layers depend on each other, which is not followed"
            )
        root = square_root(posterior.posterior_covariance.detach())
        parts = root.split(sizes)
        factors = {
            name: part.reshape(*parameters[name].shape, -1)
            for name, part in zip(names, parts, strict=True)
        }
        return with_factor(with_posterior(network, mean, none), factors)
    precision = posterior.posterior_precision
    if not hasattr(precision, "eigenvectors"):
        raise _refused(posterior, "makes layers depend on each other, which is not followed")
    result, blocks = with_posterior(network, mean, none), _blocks(precision)
    if [tuple(len(one) for one in vectors) for vectors, _ in blocks] != [
        tuple(parameters[name].shape) for name in names
    ]:
        raise _refused(posterior, "has Kronecker factors of other shapes than its parameters")
    known = dict(zip(names, blocks, strict=True))
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        layer = network.get_submodule(path)
        if type(layer) is not nn.Linear:
            raise _refused(
                posterior, f"has Kronecker factors of {path}, a {type(layer).__name__}: only those "
                "of linear layers are taken"
            )  # fmt: skip
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        plain.load_state_dict({name: mean[f"{path}.{name}" if path else name]
                               for name, _ in layer.named_parameters()}, assign=True)  # fmt: skip
        prefix = f"{path}." if path else ""
        made = KroneckerLinear(plain, known[f"{prefix}weight"], known.get(f"{prefix}bias"))
        result = _replaced(result, path, made)
    return result


def _blocks(precision: Any) -> list[Block]:
    """The eigenvectors of every parameter and the variances along them, in their order."""
    blocks = []
    for vectors, values, delta in zip(
        precision.eigenvectors, precision.eigenvalues, precision.deltas, strict=True
    ):
        if len(values) == 1:
            eigenvalues = values[0] + delta
        elif precision.damping:
            eigenvalues = torch.outer(*(value + delta.sqrt() for value in values))
        else:
            eigenvalues = torch.outer(*values) + delta
        blocks.append((tuple(each.detach() for each in vectors), 1 / eigenvalues.detach()))
    return blocks


def _random_names(network: nn.Module) -> list[str]:
    """The parameters of layers that `with_posterior` makes random."""
    return [
        f"{path}.{name}" if path else name
        for path, layer in network.named_modules()
        if type(layer) in REPLACED
        for name, _ in layer.named_parameters(recurse=False)
    ]


def _refused(posterior: Any, reason: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"a {type(posterior).__name__} {reason}; take hessian_structure='diag' or 'kron', or "
        "subset_of_weights='last_layer', or its own samples"
    )


def _replaced(model: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    if not path:
        return layer
    model.set_submodule(path, layer)
    return model
