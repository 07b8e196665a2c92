"""Recurrent cells and networks, step by step, as compositions of rules.

The moments of every gate and product are those of its rule; states of different steps depend on
each other through the lineage.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from covprop.errors import UnsupportedOperation
from covprop.flow.table import Batch, Kind, rule

STEPWISE = "step by step: activations exact, products as if jointly Gaussian"

PACKED = "packed sequences have no rule; propagate through each sequence at its own length"


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


def _plain_step(
    activation: Callable[..., Any],
    x: Any,
    state: Sequence[Any],
    w_ih: Any,
    w_hh: Any,
    b_ih: Any,
    b_hh: Any,
) -> Any:
    """H -> g(x_h + h_h)."""
    (h,) = state
    return (activation(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)),)


@rule(torch.lstm_cell, kind=Kind.RECURRENT, treatment=STEPWISE, name="LSTMCell",
      batch=Batch.STEPWISE)  # fmt: skip
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


@rule(torch.gru_cell, kind=Kind.RECURRENT, treatment=STEPWISE, name="GRUCell",
      batch=Batch.STEPWISE)  # fmt: skip
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


@rule(torch.rnn_tanh_cell, torch.rnn_relu_cell, kind=Kind.RECURRENT, treatment=STEPWISE,
      name="RNNCell", batch=Batch.STEPWISE)  # fmt: skip
def plain_cell(
    function: Callable[..., Any],
    input: Any,
    hx: Any,
    w_ih: Any,
    w_hh: Any,
    b_ih: Any = None,
    b_hh: Any = None,
) -> Any:
    """One step of a plain recurrent network."""
    activation = torch.tanh if function is torch.rnn_tanh_cell else torch.relu
    return _plain_step(activation, input, (hx,), w_ih, w_hh, b_ih, b_hh)[0]


@rule(torch.lstm, kind=Kind.RECURRENT, treatment=STEPWISE, name="LSTM",
      batch=Batch.STEPWISE)  # fmt: skip
def lstm(function: Callable[..., Any], input: Any, hx: Sequence[Any], *options: Any) -> Any:
    """All layers, directions and steps of an LSTM."""
    if not isinstance(hx, list | tuple):
        raise UnsupportedOperation(PACKED)
    output, (h, c) = _run(_lstm_step, input, list(hx), *options)
    return output, h, c


@rule(torch.gru, kind=Kind.RECURRENT, treatment=STEPWISE, name="GRU",
      batch=Batch.STEPWISE)  # fmt: skip
def gru(function: Callable[..., Any], input: Any, hx: Any, *options: Any) -> Any:
    """All layers, directions and steps of a GRU."""
    output, (h,) = _run(_gru_step, input, [hx], *options)
    return output, h


@rule(torch.rnn_tanh, torch.rnn_relu, kind=Kind.RECURRENT, treatment=STEPWISE, name="RNN",
      batch=Batch.STEPWISE)  # fmt: skip
def plain(function: Callable[..., Any], input: Any, hx: Any, *options: Any) -> Any:
    """All layers, directions and steps of a plain recurrent network."""
    activation = torch.tanh if function is torch.rnn_tanh else torch.relu
    output, (h,) = _run(partial(_plain_step, activation), input, [hx], *options)
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
    if not isinstance(weights, list | tuple):
        raise UnsupportedOperation(PACKED)
    time, directions = (1 if batch_first else 0), (2 if bidirectional else 1)
    each = 4 if has_biases else 2
    if len(weights) != num_layers * directions * each:
        raise UnsupportedOperation("an LSTM with proj_size has no rule; use one without")
    last: list[list[Any]] = [[] for _ in initial]
    for layer in range(num_layers):
        input = input if layer == 0 else F.dropout(input, dropout, train)
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
