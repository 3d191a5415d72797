"""Which recurrent layers compile replaces, what they compute, and why one stays torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import Tensor, nn

from twofour.compiler.computing import Computing
from twofour.kernels.recurrent import RecurrentProblem
from twofour.layers import obstacle

Recurrent = nn.RNNBase | nn.RNNCellBase

_CELLS = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "tanh", "RNN_RELU": "relu"}
"""`mode` of a layer of torch -> the key of `kernels.recurrent.CELLS`."""


def is_recurrent(module: nn.Module) -> TypeGuard[Recurrent]:
    """Whether a layer is an LSTM, a GRU, an RNN or a cell of one."""
    return isinstance(module, nn.LSTM | nn.GRU | nn.RNN | nn.LSTMCell | nn.GRUCell | nn.RNNCell)


def is_cell(module: nn.Module) -> bool:
    """Whether it runs a single step at a time."""
    return isinstance(module, nn.RNNCellBase)


def problem_of(module: Any) -> RecurrentProblem:
    """Return what a recurrent layer computes."""
    if isinstance(module, nn.RNNCellBase):
        cell = {nn.LSTMCell: "lstm", nn.GRUCell: "gru"}.get(type(module)) or str(
            getattr(module, "nonlinearity", "tanh")
        )
        return RecurrentProblem(cell, module.input_size, module.hidden_size, module.hidden_size)
    width = module.proj_size or module.hidden_size
    ways = 2 if module.bidirectional else 1
    return RecurrentProblem(_CELLS[module.mode], module.input_size, module.hidden_size, width, module.num_layers, ways)


def parts_of(module: Recurrent) -> Iterator[tuple[str, str]]:
    """Yield each weight and its bias, "" where it has none, by name, in the order of `RecurrentProblem.shapes`."""
    if isinstance(module, nn.RNNCellBase):
        suffixes, projected = [""], False
    else:
        ways = ("", "_reverse") if module.bidirectional else ("",)
        suffixes = [f"_l{layer}{way}" for layer in range(module.num_layers) for way in ways]
        projected = module.proj_size > 0
    for suffix in suffixes:
        for part in ("ih", "hh"):
            yield f"weight_{part}{suffix}", f"bias_{part}{suffix}" if module.bias else ""
        if projected:
            yield f"weight_hr{suffix}", ""


def recurrent_refusal(module: Recurrent, computing: Computing) -> str | None:
    """Return why a recurrent layer cannot be replaced, or None when it can."""
    if computing.device != "cpu":
        return "recurrent layers have kernels on the CPU alone"
    if reason := obstacle(module):
        return reason
    if inner := [name for name, _ in module.named_children()]:
        return f"`{inner[0]}` stands inside it, which a replacement would lose"
    held = module._parameters
    for name, bias in parts_of(module):
        weight = held.get(name)
        if type(weight) is not nn.Parameter or not weight.numel() or not computing.takes(weight):
            return f"its {name} is {_shown(weight)}: no {computing.dtype} kernel takes it"
        if bias and not isinstance(held.get(bias), Tensor):
            return f"its {bias} is missing"
    return None


def _shown(weight: Tensor | None) -> str:
    return "missing" if weight is None else f"{weight.dtype} of shape {tuple(weight.shape)}"
