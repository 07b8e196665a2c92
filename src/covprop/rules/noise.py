"""Dropout: nothing in evaluation, multiplicative Bernoulli noise in training.

z = x m / (1 - p), m ~ Bernoulli(1 - p) independent of x and shared within a group (an element, or a
channel):  E z = E x,  Cov(z) = Cov(x) + p / (1 - p) (Cov(x) + mu mu^T) within each group.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from covprop.errors import DropoutWarning, RandomDraws, UnsupportedOperation, warn_user
from covprop.flow.batch_position import FIRST
from covprop.flow.lineage import calling_module
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor
from covprop.modules import in_modes
from covprop.rules.operands import batch_error

NOISY = (
    _DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,  # in evaluation these two have a fast path without dropout
    nn.TransformerEncoder,
)
"""Modules whose mode of training means dropout and nothing else."""


@contextmanager
def dropout_active(model: nn.Module) -> Iterator[nn.Module]:
    """Switch a model's dropout on, and nothing else, for a `with` block.

    This includes dropout inside attention and recurrent layers.

    Args:
        model: The module.

    Example:
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2)).eval()
        with cp.dropout_active(model):
            y = cp.propagate(model, x)
    """
    layers = [layer for layer in model.modules() if isinstance(layer, NOISY)]
    wanted = _wanted.set(_wanted.get() | {id(layer) for layer in layers})
    try:
        with in_modes([(layer, True) for layer in layers]):
            yield model
    finally:
        _wanted.reset(wanted)


_wanted: ContextVar[frozenset[int]] = ContextVar("wanted", default=frozenset())
"""The layers that `dropout_active` has switched on."""


def warn_of_dropout(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Warn that dropout is on because of `model.train()` alone; layers: with names."""
    for name, layer in layers:
        p = dropout_probability(layer)
        if layer.training and id(layer) not in _wanted.get() and p > 0:
            warn_user(
                f"{f'module {name}' if name else 'the model'} ({layer._get_name()}, p = {p:g}) is "
                "in training mode, so that random dropout masks add to the uncertainty of the "
                "output. If they should not, call model.eval(). If they should, wrap the call in "
                "cp.dropout_active(model), with cp.GaussianLayers() or cp.MonteCarlo(), as some "
                "methods refuse dropout",
                DropoutWarning,
            )
            return


def warn_of_scripted_dropout(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Warn that a TorchScript program draws masks, where no rule sees them; layers: with names."""
    for name, layer in layers:
        if isinstance(layer, torch.jit.ScriptModule) and _draws_masks(layer):
            warn_user(
                f"{f'module {name}' if name else 'the model'} is a TorchScript program with active "
                "dropout, so that random masks add to the uncertainty of the output. If they "
                "should not, call model.eval() before torch.jit.trace or torch.jit.script",
                DropoutWarning,
            )
            return


SCRIPTED_DROPOUT = tuple(
    f"aten::{name}dropout{suffix}"
    for name in ("", "feature_", "alpha_", "feature_alpha_")
    for suffix in ("", "_")
)
"""What TorchScript calls dropout."""


def _draws_masks(program: torch.jit.ScriptModule) -> bool:
    """Whether dropout is active: by a constant, or where a module's mode decides, by that."""
    if not hasattr(program, "forward"):
        return False
    training = any(layer.training for layer in program.modules())
    graph: Any = program.inlined_graph  # the nodes live as long as this
    for kind in SCRIPTED_DROPOUT:
        for node in graph.findAllNodes(kind):
            p, active = (value.toIValue() for value in list(node.inputs())[1:3])
            if p != 0 and (training if p is None or active is None else active):
                return True
    return False


def warn_of_functional_dropout() -> None:
    """Warn that F.dropout draws masks, outside of the layers that `warn_of_dropout` knows."""
    if not _wanted.get() and not isinstance(calling_module(), NOISY):
        warn_user(
            "F.dropout is called with training=True, its default, so that its random masks add to "
            "the uncertainty of the output. If they should not, write F.dropout(x, p, "
            "self.training) and call model.eval(). If they should, use a layer, nn.Dropout(p), "
            "with cp.dropout_active",
            DropoutWarning,
        )


def dropout_probability(layer: nn.Module) -> float:
    """The dropout probability of a layer."""
    if isinstance(layer, _DropoutNd):
        return layer.p
    if isinstance(layer, nn.RNNBase):
        return layer.dropout if layer.num_layers > 1 else 0.0
    return layer.dropout if isinstance(layer, nn.MultiheadAttention) else 0.0


@rule(F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout,
      kind=Kind.NOISE, treatment="exact", name="dropout, dropout1d, dropout2d, dropout3d",
      batch=Batch.STEPWISE)  # fmt: skip
def dropout(
    function: Callable[..., Any],
    input: GaussianTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **kwargs: Any,
) -> GaussianTensor:
    """A mask for every element, or for every channel."""
    if not kwargs.get("train", training) or p == 0:
        return input
    dims = _masked_dims(function, input.dim())
    if input.batch_at != FIRST and dims < input.dim():
        raise batch_error(function, input)
    warn_of_functional_dropout()
    input.materialize()
    first = input.with_batch_at(FIRST)
    dims += first.dim() - input.dim()
    result = _masked(first, p, masked_dims=dims).with_batch_at(input.batch_at)
    if inplace:
        input.become(result)
        return input
    return result


def _masked_dims(function: Callable[..., Any], dims: int) -> int:
    """How many leading dimensions have masks of their own."""
    if function in (F.dropout, torch.dropout):
        return dims
    if function is torch.feature_dropout or (function is F.dropout2d and dims == 3):  # noqa: PLR2004
        return 2  # batch and channel; of three dimensions torch reads (N, C, L), and warns
    return max(dims - int(function.__name__[-2]), 1)


@rule(F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
      kind=Kind.NOISE, treatment="exact (evaluation mode)", name="alpha_dropout",
      batch=Batch.STEPWISE)  # fmt: skip
def alpha_dropout(
    function: Callable[..., Any],
    input: GaussianTensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    **kwargs: Any,
) -> GaussianTensor:
    """Nothing in evaluation mode."""
    if kwargs.get("train", training) and p > 0:
        raise RandomDraws(
            "alpha dropout has a rule for evaluation mode alone; call model.eval() first, or "
            "use cp.MonteCarlo()"
        )
    return input


def _masked(x: GaussianTensor, p: float, masked_dims: int) -> GaussianTensor:
    """Masks along the first `masked_dims` dimensions, shared along the others."""
    if not 0 <= p < 1:
        raise UnsupportedOperation(f"dropout with p = {p} leaves nothing; use p < 1")
    groups = None if masked_dims == x.dim() else _groups(x, masked_dims)
    loc = x.loc.clone()
    return GaussianTensor(loc, x.carrier.dropout(loc, x.flat, p / (1 - p), groups))


def _groups(x: GaussianTensor, masked_dims: int) -> Tensor:
    """The number of the mask of each element of one event."""
    inner = max(masked_dims - len(x.batch_shape), 0)
    masks = x.event_shape[:inner].numel()
    return torch.arange(masks, device=x.device).repeat_interleave(x.event_shape[inner:].numel())
