"""Recurrent cells and networks, step by step, as compositions of rules.

The moments of every gate and product are those of its rule; states of different steps depend on
each other through the lineage.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from covprop.dispatch import rule
from covprop.errors import UnsupportedOperation
from covprop.rules.operands import gaussians

STEPWISE = "step by step: activations exact, products as if jointly Gaussian"


def _lstm_step(x: Any, state: Sequence[Any], w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
    """(h, c) -> (o tanh(c'), c'),  c' = f c + i g."""
    h, c = state
    gates = F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_step(x: Any, state: Sequence[Any], w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
    """H -> n + z (h - n),  n = tanh(x_n + r h_n)."""
    (h,) = state
    x_r, x_z, x_n = F.linear(x, w_ih, b_ih).chunk(3, -1)
    h_r, h_z, h_n = F.linear(h, w_hh, b_hh).chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return (n + z * (h - n),)


@rule(torch.lstm_cell, kind="recurrent", treatment=STEPWISE, name="LSTMCell")
def lstm_cell(
    function: Callable[..., Any],
    input: Any,
    hx: Sequence[Any],
    w_ih: Any,
    w_hh: Any,
    b_ih: Any = None,
    b_hh: Any = None,
) -> Any:
    """One step of an LSTM."""
    return _lstm_step(input, hx, w_ih, w_hh, b_ih, b_hh)


@rule(torch.gru_cell, kind="recurrent", treatment=STEPWISE, name="GRUCell")
def gru_cell(
    function: Callable[..., Any],
    input: Any,
    hx: Any,
    w_ih: Any,
    w_hh: Any,
    b_ih: Any = None,
    b_hh: Any = None,
) -> Any:
    """One step of a GRU."""
    return _gru_step(input, (hx,), w_ih, w_hh, b_ih, b_hh)[0]


@rule(torch.lstm, kind="recurrent", treatment=STEPWISE, name="LSTM")
def lstm(function: Callable[..., Any], input: Any, hx: Sequence[Any], *options: Any) -> Any:
    """All layers, directions and steps of an LSTM."""
    output, (h, c) = _run(_lstm_step, input, list(hx), *options)
    return output, h, c


@rule(torch.gru, kind="recurrent", treatment=STEPWISE, name="GRU")
def gru(function: Callable[..., Any], input: Any, hx: Any, *options: Any) -> Any:
    """All layers, directions and steps of a GRU."""
    output, (h,) = _run(_gru_step, input, [hx], *options)
    return output, h


def _run(
    step: Callable[..., Any],
    input: Any,
    initial: list[Any],
    weights: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, list[Any]]:
    if not isinstance(weights, list | tuple) or any(x.batch_shape for x in gaussians(input, {})):
        raise UnsupportedOperation(
            "recurrent networks have a rule for one Gaussian over a whole sequence, whose states "
            "have no leading batch; loop over the batch, or use the cells"
        )
    if dropout and train:
        raise UnsupportedOperation("recurrent dropout has no rule; call model.eval() first")
    time, directions = (1 if batch_first else 0), (2 if bidirectional else 1)
    each = 4 if has_biases else 2
    last: list[list[Any]] = [[] for _ in initial]
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            parameters = list(weights[place * each : (place + 1) * each])
            parameters += [None, None] if not has_biases else []
            state = tuple(start[place] for start in initial)
            steps = list(torch.unbind(input, time))
            states = []
            for x in reversed(steps) if direction else steps:
                state = step(x, state, *parameters)
                states.append(state[0])
            outputs.append(torch.stack(states[::-1] if direction else states, time))
            for collected, final in zip(last, state, strict=True):
                collected.append(final)
        input = torch.cat(outputs, -1) if directions > 1 else outputs[0]
    return input, [torch.stack(collected, 0) for collected in last]
