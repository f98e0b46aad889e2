"""Recurrent layers as the operations that torch hides in one call, in the order in which torch computes them.

Each function takes `steps`, which returns the indices of the time steps, and then the arguments of torch's function, in
its form for padded or for packed sequences. Modes that are active during the call see every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["OPERATIONS"]

State = tuple[Tensor, ...]  # the hidden state, and the cell state of an LSTM
Steps = Callable[[int], Iterable[int]]


class _Weights(NamedTuple):
    """Weights of one layer in one direction."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


Step = Callable[[Tensor, State, _Weights], State]  # the tensor is the input's part of the gates


def _plain_step(activation: Callable[[Tensor], Tensor], gates: Tensor, state: State, weights: _Weights) -> State:
    return (activation(F.linear(state[0], weights.hidden, weights.hidden_bias) + gates),)


def _lstm_step(gates: Tensor, state: State, weights: _Weights) -> State:
    hidden, cell = state
    gates = F.linear(hidden, weights.hidden, weights.hidden_bias) + gates
    let_in, forget, new, let_out = gates.chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(let_in) * torch.tanh(new)
    hidden = torch.sigmoid(let_out) * torch.tanh(cell)
    return (hidden if weights.projection is None else F.linear(hidden, weights.projection)), cell


def _gru_step(gates: Tensor, state: State, weights: _Weights) -> State:
    (hidden,) = state
    # The last line is (hidden - new) * update + new, as torch computes it: the textbook formula rounds other values.
    reset, update, new = gates.chunk(3, -1)
    of_reset, of_update, of_new = F.linear(hidden, weights.hidden, weights.hidden_bias).chunk(3, -1)
    reset, update = torch.sigmoid(of_reset + reset), torch.sigmoid(of_update + update)
    new = torch.tanh(new + of_new * reset)
    return ((hidden - new) * update + new,)


def _direction(
    step: Step, steps: Steps, gates: Tensor, sizes: Sequence[int], first: State, weights: _Weights, backwards: bool
) -> tuple[Tensor, State]:
    """Return the outputs in the order of the sequence, and the last state of each of its samples.

    gates: the rows of all time steps. Step t has sizes[t] rows, one for each sample, and never more than step t - 1.
    """
    starts = [0, *accumulate(sizes)]
    state = tuple(s[: sizes[-1]] for s in first) if backwards else first
    outputs: list[Tensor] = [gates] * len(sizes)
    ended: list[State] = []
    for i in steps(len(sizes)):
        t = len(sizes) - 1 - i if backwards else i
        known, size = len(state[0]), sizes[t]
        # Samples are sorted by length. Forwards, the last samples end first. Backwards, they begin later, from `first`.
        if size < known:
            ended.append(tuple(s[size:] for s in state))
            state = tuple(s[:size] for s in state)
        elif size > known:
            state = tuple(torch.cat([s, f[known:size]]) for s, f in zip(state, first, strict=True))
        state = step(gates[starts[t] : starts[t + 1]], state, weights)
        outputs[t] = state[0]
    if ended:
        state = tuple(torch.cat([*parts]) for parts in zip(state, *reversed(ended), strict=True))
    return torch.cat(outputs), state


def _layers(
    step: Step,
    steps: Steps,
    data: Tensor,
    sizes: Sequence[int],
    first: State,
    flat_weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, State]:
    directions = 2 if bidirectional else 1
    count = len(flat_weights) // (num_layers * directions)
    last: list[State] = []
    for layer in range(num_layers):
        if layer and dropout and training:
            data = F.dropout(data, dropout)
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            w = flat_weights[index * count : (index + 1) * count]
            weights = _Weights(*w) if has_biases else _Weights(w[0], w[1], projection=w[2] if len(w) > 2 else None)
            # The input's part of the gates is one product for all time steps, as torch computes it.
            gates = F.linear(data, weights.input, weights.input_bias)
            before = tuple(s[index] for s in first)
            output, state = _direction(step, steps, gates, sizes, before, weights, backwards=direction == 1)
            outputs.append(output)
            last.append(state)
        data = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return data, tuple(torch.stack(s) for s in zip(*last, strict=True))


def _layer(step: Step, steps: Steps, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    # In the call for a packed sequence `sizes` comes first, so that the weights, and not a flag, are at this position.
    if not isinstance(args[2], bool):
        sizes, state, *others = args
        data, last = _layers(step, steps, x, sizes.tolist(), _state(state), *others)
        return data, *last
    state, *others, batch_first = args
    if batch_first:
        x = x.transpose(0, 1)
    length, batch = x.shape[:2]
    data, last = _layers(step, steps, x.flatten(0, 1), [batch] * length, _state(state), *others)
    data = data.unflatten(0, (length, batch))
    return (data.transpose(0, 1) if batch_first else data), *last


def _state(state: Tensor | Sequence[Tensor]) -> State:
    return (state,) if isinstance(state, Tensor) else tuple(state)


def _cell(
    step: Step,
    steps: Steps,
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor | State:
    new_state = step(F.linear(x, w_ih, b_ih), _state(state), _Weights(w_ih, w_hh, b_ih, b_hh))
    return new_state[0] if isinstance(state, Tensor) else new_state


_STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": partial(_plain_step, torch.tanh),
    "rnn_relu": partial(_plain_step, torch.relu),
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: partial(_layer, step) for name, step in _STEPS.items()},
    **{f"{name}_cell": partial(_cell, step) for name, step in _STEPS.items()},
}
