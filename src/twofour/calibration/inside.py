"""Inputs that arise inside a layer: attention's joined heads, the hidden states of recurrent layers.

The layer is run once more on the arguments of its call, opened up where the input arises.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)


def joined_heads(attention: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what the output projection of a call is given: the call's output with that projection the identity."""
    weight = attention.out_proj.weight
    identity = nn.Linear(weight.shape[1], weight.shape[1], bias=False, device="meta")
    identity.weight = nn.Parameter(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device), False)
    bare = copy.copy(attention)
    bare._modules = {**attention._modules, "out_proj": identity}
    bare._forward_hooks, bare._forward_pre_hooks = OrderedDict(), OrderedDict()
    return bare(*args, **kwargs)[0]


def cell_input(cell: nn.Module, attribute: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what `weight_ih` or `weight_hh` of a recurrent cell is multiplied with."""
    x = args[0] if args else kwargs["input"]
    if attribute == "weight_ih":
        return x
    state = args[1] if len(args) > 1 else kwargs.get("hx")
    hidden = state[0] if isinstance(state, tuple) else state
    return x.new_zeros(*x.shape[:-1], int(getattr(cell, "hidden_size", 0))) if hidden is None else hidden


def recurrent_input(layer: nn.RNNBase, attribute: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what a weight of a recurrent layer is multiplied with, as the layer takes its input; 0 in padding.

    Args:
        layer: LSTM, GRU or RNN.
        attribute: "weight_ih_l0", "weight_hh_l1_reverse", ...
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    # "weight_hh_l1_reverse": layer 1 of the stack. Torch computes all layers in one call and shows no input between
    # them, so the layers below are computed again, each as a recurrent layer of its own.
    number = int(attribute.removesuffix("_reverse").rpartition("l")[2])
    reverse = attribute.endswith("_reverse")
    x = args[0] if args else kwargs["input"]
    state = args[1] if len(args) > 1 else kwargs.get("hx")
    for below in range(number):
        x = _single(layer, below, x)(x, _state(layer, below, state))[0]
    if attribute.startswith("weight_ih"):
        return _padded(layer, x)[0]
    # weight_hh multiplies the hidden states of the step before: the outputs y, moved on by one step, with the initial
    # state first. The reverse direction walks from the end, so there the step before is the next one in time.
    states = _state(layer, number, state)
    y, valid = _padded(layer, _single(layer, number, x)(x, states)[0])
    width = y.shape[-1] // (2 if layer.bidirectional else 1)
    y, time = y[..., width * reverse : width * reverse + width], 0 if y.ndim == 2 or not layer.batch_first else 1
    first = states[0] if isinstance(states, tuple) else states
    start = torch.zeros_like(y.narrow(time, 0, 1)) if first is None else first[int(reverse)].unsqueeze(time)
    if reverse:
        # A packed sequence that is shorter than the longest starts from 0 here, whatever state was given.
        return torch.cat([y.narrow(time, 1, y.shape[time] - 1), start], time) * valid
    return torch.cat([start, y.narrow(time, 0, y.shape[time] - 1)], time) * valid


def _padded(layer: nn.RNNBase, x: Any) -> tuple[Tensor, Tensor | float]:
    """Return the values of a plain or packed sequence, 0 after its end, and where it has values."""
    if not isinstance(x, PackedSequence):
        return x, 1.0
    values, lengths = pad_packed_sequence(x, batch_first=layer.batch_first)
    count = values.shape[1 if layer.batch_first else 0]
    valid = (torch.arange(count, device="cpu") < lengths.unsqueeze(1)).to(values.device, values.dtype)
    return values, (valid if layer.batch_first else valid.T).unsqueeze(-1)


def _single(layer: nn.RNNBase, number: int, x: Any) -> nn.RNNBase:
    """Return one layer of a stack, sharing its weights."""
    width = (x.data if isinstance(x, PackedSequence) else x).shape[-1]
    options: dict[str, Any] = {"bias": layer.bias, "batch_first": layer.batch_first}
    if isinstance(layer, nn.LSTM):
        options["proj_size"] = layer.proj_size
    if isinstance(layer, nn.RNN):
        options["nonlinearity"] = layer.nonlinearity
    kind = next(kind for kind in RECURRENT if isinstance(layer, kind))
    one = kind(width, layer.hidden_size, bidirectional=layer.bidirectional, device="meta", **options)
    for name in list(one._parameters):
        setattr(one, name, layer._parameters[name.replace("_l0", f"_l{number}")])
    return one.eval()


def _state(layer: nn.RNNBase, number: int, state: Any) -> Any:
    """Return the initial state of one layer of a stack."""
    if state is None:
        return None
    directions = 2 if layer.bidirectional else 1
    part = slice(number * directions, (number + 1) * directions)
    return tuple(each[part] for each in state) if isinstance(state, tuple) else state[part]
