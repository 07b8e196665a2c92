"""Recurrent layers: a step is written in torch's own operations, and a layer repeats it.

Both directions of a layer make their steps together, as one state of twice the size: the backward
one reads the sequence from its end. A carrier that knows how to repeat a step does so
(`Carrier.recurrent`); with others the operations of all steps follow one another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.errors import UnsupportedOperation
from covprop.flow.algebra import Recurrence
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor, dispatch
from covprop.rules.operands import batch_error, gaussians

STEPWISE = "step by step: activations exact, products as if jointly Gaussian"
PACKED = "packed sequences have no rule; propagate through each sequence at its own length"


# One step: (gates, last part of the state) -> parts of the next state, the output first.


def _squashed(gates: Any, sigmoids: Sequence[bool]) -> Any:
    """Parts of a vector, of each the sigmoid or tanh.

    With sigmoid(y) = (1 + tanh(y / 2)) / 2 all are one function, of which every pair is exact.
    """
    if isinstance(gates, GaussianTensor) and gates.lineage.activations:  # each may have its own
        pairs = zip(gates.chunk(len(sigmoids), -1), sigmoids, strict=True)
        return [
            torch.sigmoid(part) if is_sigmoid else torch.tanh(part) for part, is_sigmoid in pairs
        ]
    rates = torch.tensor([0.5 if one else 1.0 for one in sigmoids])
    rate = rates.to(gates.device, gates.dtype).repeat_interleave(gates.shape[-1] // len(sigmoids))
    return (torch.tanh(gates * rate) * rate + (1 - rate)).chunk(len(sigmoids), -1)


def _lstm(gates: Any, c: Any) -> tuple[Any, ...]:
    """h' = o tanh(c'),  c' = f c + i g."""
    i, f, g, o = _squashed(gates, (True, True, False, True))
    c = f * c + i * g
    return o * torch.tanh(c), c


def _gru(gates: Any, h: Any) -> tuple[Any, ...]:
    """h' = n + z (h - n),  n = tanh(x_n + r h_n)."""
    size = h.shape[-1]
    both, x_n, h_n = gates.split([2 * size, size, size], -1)
    r, z = torch.sigmoid(both).chunk(2, -1)
    n = torch.tanh(x_n + r * h_n)
    return (n + z * (h - n),)


def _plain(activation: Callable[..., Any], gates: Any, h: Any) -> tuple[Any, ...]:
    """h' = g(x_h + h_h)."""
    del h
    return (activation(gates),)


@final
@dataclass(frozen=True)
class Cell:
    """What repeats: a step, and which parts of torch's weights make which parts of its gates.

    of_input, of_state: the part of w_ih x + b_ih, and of w_hh h + b_hh, in each gate, or None.
    """

    step: Callable[..., tuple[Any, ...]]
    of_input: tuple[int | None, ...]
    of_state: tuple[int | None, ...]

    def weights(self, directions: Sequence[Sequence[Any]]) -> "Weights":
        """The weights of all directions as one; each has w_ih, w_hh and maybe biases."""

        def parts(tensor: Tensor, places: Sequence[int | None]) -> list[Tensor]:
            every = tensor.chunk(1 + max(place for place in places if place is not None))
            return [torch.zeros_like(every[0]) if i is None else every[i] for i in places]

        def matrix(which: int, places: Sequence[int | None]) -> Tensor:
            split = [parts(one[which], places) for one in directions]
            return torch.cat([torch.block_diag(*gate) for gate in zip(*split, strict=True)])

        def bias(which: int, places: Sequence[int | None]) -> Tensor:
            split = [parts(one[which], places) for one in directions]
            return torch.cat([part for gate in zip(*split, strict=True) for part in gate])

        offset = None
        if len(directions[0]) > 2 and directions[0][2] is not None:  # noqa: PLR2004
            offset = bias(2, self.of_input) + bias(3, self.of_state)
        return Weights(matrix(0, self.of_input), matrix(1, self.of_state), offset)


@final
@dataclass(frozen=True)
class Weights:
    """Gates = of_input x + of_state h + bias."""

    of_input: Tensor
    of_state: Tensor
    bias: Tensor | None


LSTM = Cell(_lstm, (0, 1, 2, 3), (0, 1, 2, 3))
GRU = Cell(_gru, (0, 1, 2, None), (0, 1, None, 2))
TANH, RELU = (Cell(partial(_plain, f), (0,), (0,)) for f in (torch.tanh, torch.relu))
CELLS: dict[Callable[..., Any], Cell] = {
    torch.lstm_cell: LSTM,
    torch.lstm: LSTM,
    torch.gru_cell: GRU,
    torch.gru: GRU,
    torch.rnn_tanh_cell: TANH,
    torch.rnn_tanh: TANH,
    torch.rnn_relu_cell: RELU,
    torch.rnn_relu: RELU,
}

_recurrent = partial(rule, kind=Kind.RECURRENT, treatment=STEPWISE, batch=Batch.STEPWISE)


@_recurrent(torch.rnn_tanh_cell, torch.rnn_relu_cell, name="RNNCell")
@_recurrent(torch.gru_cell, name="GRUCell")
@_recurrent(torch.lstm_cell, name="LSTMCell")
def recurrent_cell(
    function: Callable[..., Any],
    input: Any,
    hx: Any,
    w_ih: Any,
    w_hh: Any,
    b_ih: Any = None,
    b_hh: Any = None,
) -> Any:
    """The rule of recurrent cells: one step."""
    cell = CELLS[function]
    state = hx if function is torch.lstm_cell else (hx,)
    made = _next(cell, cell.weights([(w_ih, w_hh, b_ih, b_hh)]), input, state)
    return made if function is torch.lstm_cell else made[0]


def _next(cell: Cell, weights: Weights, x: Any, state: Sequence[Any]) -> tuple[Any, ...]:
    """One step on tensors."""
    gates = F.linear(x, weights.of_input, weights.bias) + F.linear(state[0], weights.of_state)
    return cell.step(gates, state[-1])


@_recurrent(torch.rnn_tanh, torch.rnn_relu, name="RNN")
@_recurrent(torch.gru, name="GRU")
@_recurrent(torch.lstm, name="LSTM")
def recurrent_network(
    function: Callable[..., Any],
    input: Any,
    hx: Any,
    weights: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """The rule of recurrent networks: all layers."""
    initial = hx if function is torch.lstm else [hx]
    if not isinstance(initial, list | tuple) or not isinstance(weights, list | tuple):
        raise UnsupportedOperation(PACKED)
    cell, directions = CELLS[function], 2 if bidirectional else 1
    each = 4 if has_biases else 2
    if len(weights) != num_layers * directions * each:
        raise UnsupportedOperation("an LSTM with proj_size has no rule; use one without")
    x = input if batch_first else input.transpose(0, 1)
    last: list[Sequence[Any]] = []
    for layer in range(num_layers):
        x = x if layer == 0 else F.dropout(x, dropout, train)
        places = range(layer * directions, (layer + 1) * directions)
        own = [weights[each * place : each * (place + 1)] for place in places]
        state = [start[places.start : places.stop].transpose(0, 1).flatten(1) for start in initial]
        x, *final = _layer(cell, own, x, state)
        last.append([part.unflatten(-1, (directions, -1)) for part in final])
    states = (
        (torch.cat(parts, 1) if num_layers > 1 else parts[0]).transpose(0, 1)
        for parts in zip(*last, strict=True)
    )
    return x if batch_first else x.transpose(0, 1), *states


@rule(torch._pack_padded_sequence, kind=Kind.OTHER, batch=Batch.STEPWISE)
def packed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse to pack a batch of sequences of several lengths."""
    raise UnsupportedOperation(PACKED)


def _layer(
    cell: Cell, parameters: Sequence[Sequence[Tensor]], x: Any, state: Sequence[Any]
) -> tuple[Any, ...]:
    """The outputs (batch, length, features) and the last state of a layer, parts (batch, features).

    parameters: of each direction; state: the initial one, those of both directions side by side.
    """
    length, features = x.shape[1:]
    size, directions = state[0].shape[-1], len(parameters)
    steps = torch.arange(length, device=x.device)
    reads = torch.stack([steps, steps.flip(0)][:directions], -1)  # (step, direction)
    inputs = reads[..., None] * features + torch.arange(features, device=x.device)
    hidden = torch.arange(size, device=x.device).reshape(directions, -1)
    order = reads[..., None] * size + hidden  # a direction reads at t in the step that writes at t
    made = _repeated(cell, parameters, x.flatten(1), state, inputs.flatten(1))
    output = made[:, order.flatten()].unflatten(-1, (length, size))
    last = range((length - 1) * size, made.shape[-1], size)
    return output, *(made[:, place : place + size] for place in last)


def _repeated(
    cell: Cell,
    parameters: Sequence[Sequence[Tensor]],
    x: Any,
    state: Sequence[Any],
    index: Tensor,
) -> Any:
    """Outputs in the order of the steps, then the other parts of the last state, side by side.

    index (length, inputs): what of x (batch, any) each step reads.
    """
    split, size, weights = index.shape[-1], state[0].shape[-1], cell.weights(parameters)
    both = torch.cat([weights.of_input, weights.of_state], -1)

    def step(joint: Any) -> tuple[Any, ...]:
        gates = F.linear(joint[..., : split + size], both, weights.bias)
        return cell.step(gates, joint[..., -size:])

    varies = bool(gaussians(tuple(state), {}))
    vector: Any = torch.cat([x, *state], -1) if varies else x
    initial = None if varies else torch.cat(list(state), -1)
    recurrence = Recurrence(step, index, size, len(state), initial)

    def one_by_one() -> Any:
        current, outputs = state, []
        for place in vector.lineage.repeated(list(index), growing=True):
            current = _next(cell, weights, x[:, place], current)
            outputs.append(current[0])
        return torch.cat([*outputs, *current[1:]], -1)

    return dispatch(recurrent_layer, (vector, recurrence, one_by_one, parameters), {})


def recurrent_layer(
    vector: Tensor, recurrence: Recurrence, one_by_one: Callable[[], Any], parameters: Any
) -> Tensor:
    """A function that is dispatched for each layer, so that plans and bars can name it."""
    raise NotImplementedError


@rule(recurrent_layer, kind=Kind.RECURRENT, batch=Batch.STEPWISE)
def repeated(
    function: Callable[..., Any],
    vector: GaussianTensor,
    recurrence: Recurrence,
    one_by_one: Callable[[], Any],
    parameters: Any,
) -> Any:
    """By the carrier, (batch, any) to (batch, any), or one step after another.

    Where the model has merged the batch with rows or columns, each Gaussian has several sequences.
    """
    del parameters  # a plan asks whether they have gradients
    vector.materialize()
    at = vector.batch_at
    if at.dim != 0:
        raise batch_error(function, vector)
    if recurrence.initial is not None:
        recurrence = replace(recurrence, initial=at.first(recurrence.initial))
    made = vector.carrier.recurrent(vector.loc, recurrence)
    return one_by_one() if made is None else GaussianTensor(*made).with_batch_at(at)
