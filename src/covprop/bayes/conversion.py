"""Bayesian networks from ordinary ones, and posteriors that were found elsewhere."""

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from covprop.bayes.layers import BayesConv1d, BayesConv2d, BayesLayer, BayesLinear
from covprop.bayes.priors import FixedPrior, Prior, TrainedPrior
from covprop.errors import UnsupportedOperation

State: TypeAlias = Mapping[str, Tensor]

REPLACED = (nn.Linear, nn.Conv1d, nn.Conv2d)
"""Layers that have a Bayesian form; layers derived from them may do anything, and are kept."""


def to_bayesian(
    model: nn.Module, prior: Prior | None = None, *, keep_weights: bool = True,
    members: int | None = None, shared: bool = False,
) -> nn.Module:  # fmt: skip
    """Copy a network with random weights in its linear and convolutional layers.

    nn.Linear, nn.Conv1d and nn.Conv2d are replaced, all other layers are kept. The new layers can
    be trained, even if the old ones were frozen. To keep a part of a network, convert only the
    rest: `model.head = to_bayesian(model.head)`.

    Args:
        model: The network.
        prior: `HePrior()` by default. `TrainedPrior(ratio)` is MOPED: prior and posterior start at
            the trained weights, with standard deviations of this ratio to them.
        keep_weights: Whether the means start at the weights of the model, or at random as in a new
            layer.
        members: As in `BayesLinear`.
        shared: As in `BayesLinear`.

    Example:
        model = bayes.to_bayesian(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)))
    """
    if isinstance(prior, TrainedPrior) and not keep_weights:
        raise ValueError("TrainedPrior is centred at trained weights: leave keep_weights=True")
    result = copy.deepcopy(model)
    layers = [layer for layer in result.modules() if type(layer) in REPLACED]
    if not layers:
        raise ValueError("the model has no nn.Linear, nn.Conv1d or nn.Conv2d to make random")
    _check_untied(result, layers)
    made: dict[int, nn.Module] = {}
    for layer in layers:
        bayesian = _bayesian(layer, prior, members, shared)
        if keep_weights:
            _initialise(bayesian, layer)
        made[id(layer)] = bayesian.train(layer.training)
    for parent in list(result.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in made:
                setattr(parent, name, made[id(child)])
    return made.get(id(result), result)


def with_posterior(
    model: nn.Module, mean_state: State, variance_state: State, *, prior: Prior | None = None,
    fixed: Collection[str] = (), shared: bool = False,
) -> nn.Module:  # fmt: skip
    """Copy a network with weights of these means and variances, found elsewhere.

    Parameters and running statistics of other layers are not random here: their variances must be
    zero, or their names must be in `fixed`.

    Args:
        model: The network.
        mean_state: A state dict of the model.
        variance_state: Variances by the same names, for all linear and convolutional layers.
        prior: The prior for `kl`, N(0, 1) by default.
        fixed: Names of entries that are kept at their means.
        shared: Whether layers may be used twice, as in `to_bayesian`.

    Example:
        mean, variance = bayes.moments_of([nn.Linear(3, 2).state_dict() for _ in range(5)])
        model = bayes.with_posterior(nn.Linear(3, 2), mean, variance)
    """
    plain = copy.deepcopy(model)
    expected = plain.state_dict()
    _check_names("mean_state", mean_state, expected, expected)
    for name, mean in mean_state.items():
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(f"the means of {name} are not finite numbers")
    plain.load_state_dict(dict(mean_state))
    result = to_bayesian(plain, FixedPrior() if prior is None else prior, shared=shared)
    random = {
        f"{path}.{name}" if path else name: log_stddev
        for path, layer in result.named_modules(remove_duplicate=False)
        if isinstance(layer, BayesLayer)
        for name, _, log_stddev in layer.named_moments()
    }
    unknown = sorted(set(fixed) - set(expected))
    if unknown:
        raise ValueError(f"fixed names nothing that the model has: {', '.join(unknown)}")
    needed = {name: parameter for name, parameter in random.items() if name not in fixed}
    _check_names("variance_state", variance_state, needed, expected)
    _check_variances(variance_state, {*random, *fixed})
    with torch.no_grad():
        for name, log_stddev in random.items():
            values = torch.zeros_like(log_stddev) if name in fixed else variance_state[name]
            log_stddev.copy_(values.log() / 2)
    return result


def moments_of(states: Sequence[State]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Average state dicts of one model, as SWAG collects them.

    Args:
        states: At least two state dicts.

    Returns:
        Means and unbiased variances by name. Entries that are not floating point (counts) are
        those of the last state dict, without a variance.

    Example:
        mean, variance = bayes.moments_of([nn.Linear(3, 2).state_dict() for _ in range(5)])
    """
    states = list(states)
    if len(states) < 2:  # noqa: PLR2004
        raise ValueError(f"variances need at least two state dicts, and here are {len(states)}")
    for other in states[1:]:
        _check_names("a state dict", other, states[0], states[0])
    mean, variance = {}, {}
    for name, last in states[-1].items():
        if not last.is_floating_point():
            mean[name] = last.clone()
            continue
        values = torch.stack([state[name].detach() for state in states])
        mean[name], variance[name] = values.mean(0), values.var(0)
    return mean, variance


def _check_variances(variance_state: State, allowed: Collection[str]) -> None:
    for name, variance in variance_state.items():
        if not bool((variance >= 0).all()) or not bool(torch.isfinite(variance).all()):
            raise ValueError(f"the variances of {name} are not finite numbers from zero")
    left = [name for name, variance in variance_state.items()
            if name not in allowed and bool((variance > 0).any())]  # fmt: skip
    if left:
        raise UnsupportedOperation(
            f"what is no weight of a linear or convolutional layer cannot be random; pass "
            f"fixed={left} to keep it at its mean"
        )


def _check_untied(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    owners = Counter(id(one) for each in model.modules() for one in each.parameters(recurse=False))
    if any(owners[id(one)] > 1 for each in layers for one in each.parameters(recurse=False)):
        raise UnsupportedOperation(
            "two layers of the model have the same weights, and Bayesian layers would have weights "
            "of their own; use one layer twice with shared=True, or untie them"
        )


def _check_names(what: str, state: State, needed: State, known: State) -> None:
    missing, unknown = sorted(set(needed) - set(state)), sorted(set(state) - set(known))
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has {', '.join(unknown)}, which the model has not"] if unknown else []
        raise ValueError(f"{what} {' and '.join(parts)}")
    for name, value in state.items():
        if value.shape != known[name].shape:
            raise ValueError(
                f"{what} has {name} of shape {tuple(value.shape)}, and the model of shape "
                f"{tuple(known[name].shape)}"
            )


def _bayesian(
    layer: nn.Module, prior: Prior | None, members: int | None, shared: bool
) -> BayesLayer:
    assert isinstance(layer, REPLACED)
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise UnsupportedOperation(
            "a layer of the model has hooks, which its Bayesian form would not have; remove them "
            "and register them on the result"
        )
    options: dict[str, Any] = {
        "bias": layer.bias is not None, "prior": prior, "members": members, "shared": shared,
        "device": layer.weight.device, "dtype": layer.weight.dtype,
    }  # fmt: skip
    if isinstance(layer, nn.Linear):
        return BayesLinear(layer.in_features, layer.out_features, **options)
    if layer.padding_mode != "zeros":
        raise UnsupportedOperation(
            f"Bayesian convolutions have zeros around, and this one has padding_mode="
            f"{layer.padding_mode!r}; pad with a layer before it"
        )
    make = BayesConv1d if isinstance(layer, nn.Conv1d) else BayesConv2d
    return make(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding,
        layer.dilation, layer.groups, **options,
    )  # fmt: skip


@torch.no_grad()
def _initialise(bayesian: BayesLayer, layer: nn.Module) -> None:
    """Copy the weights to the means; for MOPED centre the prior there and scale the deviations."""
    for name, mean, log_stddev in bayesian.named_moments():
        mean.copy_(getattr(layer, name))
        if isinstance(bayesian.prior, TrainedPrior):
            centre = mean.detach().clone()
            setattr(bayesian, f"{name}_centre", centre)
            log_stddev.copy_(bayesian.prior.stddev(centre, bayesian.members is not None).log())
