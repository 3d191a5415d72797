"""What the kernels of a recurrent layer compute, in plain torch, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twofour.shapes import Float

CELLS = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
"""Cells and how many gates their weights stack, in the order of `Cell` in recurrent.h."""


def recurrent_reference(
    cell: str,
    x: Float[Tensor, "tokens inputs"],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    state: Float[Tensor, "batch width"],
    memory: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    *,
    backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return one direction of one layer: equations of torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN.

    Args:
        cell: A key of `CELLS`.
        x: (tokens, in), the rows of a step together, one step after the other.
        weights: (gates * hidden, in), (gates * hidden, width), and of a projection (width, hidden).
        biases: (gates * hidden,) or None, of the first two.
        state: (batch, width) before the first step.
        memory: (batch, hidden), of an LSTM.
        sizes: Sequences of each step, never more than of the step before; None: every step has the whole batch.
        backward: Take the steps from the last to the first.

    Returns:
        The states of all steps (tokens, width), the last state of each sequence, and its memory.
    """
    state, memory = state.clone(), None if memory is None else memory.clone()
    counts = list(sizes) if sizes is not None else [len(state)] * (len(x) // max(len(state), 1))
    begins = [sum(counts[:step]) for step in range(len(counts))]
    y = x.new_zeros(len(x), state.shape[1])
    steps = list(zip(begins, counts, strict=True))
    for begin, count in reversed(steps) if backward else steps:
        h, c = state[:count], None if memory is None else memory[:count]
        from_x = torch.nn.functional.linear(x[begin : begin + count], weights[0], biases[0])
        from_h = torch.nn.functional.linear(h, weights[1], biases[1])
        h, c = _step(cell, from_x, from_h, h, c)
        h = h @ weights[2].T if len(weights) > 2 else h
        state[:count] = y[begin : begin + count] = h
        if memory is not None and c is not None:
            memory[:count] = c
    return y, state, memory


def _step(cell: str, x: Tensor, h: Tensor, state: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if cell == "lstm":
        assert memory is not None
        i, f, g, o = (x + h).chunk(4, dim=1)
        memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
        return o.sigmoid() * memory.tanh(), memory
    if cell == "gru":
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=1), h.chunk(3, dim=1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        return (1 - z) * n + z * state, None
    return (x + h).tanh() if cell == "tanh" else (x + h).relu(), None
