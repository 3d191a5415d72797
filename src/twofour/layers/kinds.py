"""The kinds of layer whose weights a pattern can be laid over: for each weight its reduction axis and what feeds it.

The reduction axis is the one a product sums over. Linear (out, in) and convolutions (out, in / groups, kernel), whose
groups lie along the input channels separately for each kernel position: Mishra et al. 2021; apex sparse_masklib
flattens RSKC with C last. Stacked weights, the gates of an LSTM (4 hidden, in) and query, key and value of attention
(3 embed, embed), stack rows. Transposed convolutions (in, out / groups, kernel) and Hugging Face's Conv1D (in, out)
store the input first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from twofour.layers.axis import Reduction

_HUGGING_FACE = ("transformers.pytorch_utils", "transformers.modeling_utils")
"""Modules that have defined `Conv1D`, the second until transformers 4.26; they need not be imported to know it."""


@dataclass(frozen=True)
class Feed:
    """What a block of a weight's rows is multiplied by.

    Attributes:
        rows: First row of the block and the one after its last.
        name: Parameter of the module's forward that holds it, "input", "query"; or, where `argument` is None, what it
            is: it is computed inside the module and no hook sees it.
        argument: Position of that parameter.
    """

    rows: tuple[int, int]
    name: str
    argument: int | None = 0

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the input among the arguments that a forward pre-hook of the module got; None where it is inside."""
        if self.argument is None:
            return None
        return args[self.argument] if len(args) > self.argument else kwargs.get(self.name)


@dataclass(frozen=True)
class Kind:
    """A kind of weight.

    Attributes:
        name: "linear", "conv2d", "attention_in", "lstm", ...
        base: The class whose forward is known.
        axis: Reduction axis.
        holds: Whether an attribute of the module is a weight of this kind.
        reduction_name: What the module calls the length of the reduction axis.
        rows_name: What it calls the number of rows.
        feeds: (module, attribute, rows) -> the inputs of the blocks of rows.
    """

    name: str
    base: type[nn.Module]
    axis: int
    holds: Callable[[str], bool]
    reduction_name: str
    rows_name: str
    feeds: Callable[[nn.Module, str, int], tuple[Feed, ...]]

    @property
    def transposed_conv(self) -> bool:
        """Whether the groups of the module lie along the reduction axis."""
        return self.name.startswith("conv_transpose")

    def reduction(self, module: nn.Module) -> Reduction:
        """Return the reduction axis of a weight of `module`."""
        groups = getattr(module, "groups", 1)
        return Reduction(self.axis, groups if self.transposed_conv and isinstance(groups, int) else 1)

    def stacked(self, attribute: str) -> int:
        """Return how many matrices a weight is, one above the other: gates, or query, key and value."""
        if attribute == "in_proj_weight":
            return 3
        return 1 if attribute.startswith("weight_hr") else _GATES.get(self.name.removesuffix("_cell"), 1)

    def rows(self, module: nn.Module, shape: Sequence[int]) -> int:
        """Return how many outputs a weight of `shape` has, kernel positions not counted."""
        if self.transposed_conv:
            return shape[1] * self.reduction(module).parts
        return shape[1 - self.axis]


def _only(*names: str) -> Callable[[str], bool]:
    return lambda attribute: attribute in names


def _fed_by(name: str) -> Callable[[nn.Module, str, int], tuple[Feed, ...]]:
    return lambda module, attribute, rows: (Feed((0, rows), name),)


def _attention(module: nn.Module, attribute: str, rows: int) -> tuple[Feed, ...]:
    names = ("query", "key", "value")
    if attribute == "in_proj_weight":
        third = rows // 3
        return tuple(Feed((i * third, (i + 1) * third), name, i) for i, name in enumerate(names))
    index = "qkv".index(attribute[0])
    return (Feed((0, rows), names[index], index),)


def _heads(module: nn.Module, attribute: str, rows: int) -> tuple[Feed, ...]:
    return (Feed((0, rows), "the joined heads", None),)


def _recurrent(module: nn.Module, attribute: str, rows: int) -> tuple[Feed, ...]:
    if attribute in ("weight_ih", "weight_ih_l0", "weight_ih_l0_reverse"):
        return (Feed((0, rows), "input"),)
    inside = "the output of the layer below" if attribute.startswith("weight_ih") else "the hidden state"
    return (Feed((0, rows), inside, None),)


def _is_recurrent(attribute: str) -> bool:
    return attribute.startswith(("weight_ih", "weight_hh", "weight_hr")) and not attribute.endswith(
        ("_g", "_v", "_orig")
    )


def _conv(name: str, base: type[nn.Module], axis: int = 1) -> Kind:
    return Kind(name, base, axis, _only("weight"), "in_channels", "out_channels", _fed_by("input"))


def _gated(name: str, base: type[nn.Module]) -> Kind:
    return Kind(name, base, 1, _is_recurrent, "input width", "stacked rows", _recurrent)


_GATES = {"lstm": 4, "gru": 3}
"""Gates of a recurrent layer, whose weights stack them (torch.nn.LSTM, torch.nn.GRU)."""

_OUT_PROJECTION = nn.modules.linear.NonDynamicallyQuantizableLinear

ATTENTION_OUT = Kind("attention_out", _OUT_PROJECTION, 1, _only("weight"), "embed_dim", "embed_dim", _heads)
"""The output projection of an nn.MultiheadAttention, which reads the weight of its child without calling it."""

KINDS = (
    Kind("linear", nn.Linear, 1, _only("weight"), "in_features", "out_features", _fed_by("input")),
    _conv("conv1d", nn.Conv1d),
    _conv("conv2d", nn.Conv2d),
    _conv("conv3d", nn.Conv3d),
    _conv("conv_transpose1d", nn.ConvTranspose1d, 0),
    _conv("conv_transpose2d", nn.ConvTranspose2d, 0),
    _conv("conv_transpose3d", nn.ConvTranspose3d, 0),
    Kind(
        "attention_in",
        nn.MultiheadAttention,
        1,
        _only("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
        "input width",
        "rows",
        _attention,
    ),
    _gated("lstm", nn.LSTM),
    _gated("gru", nn.GRU),
    _gated("rnn", nn.RNN),
    _gated("lstm_cell", nn.LSTMCell),
    _gated("gru_cell", nn.GRUCell),
    _gated("rnn_cell", nn.RNNCell),
)

SUPPORTED = "Linear, Conv1d to Conv3d, ConvTranspose1d to 3d, MultiheadAttention, LSTM, GRU, RNN, Hugging Face's Conv1D"


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of a module's weights, or None where it has none that a pattern can be laid over."""
    found = next((kind for kind in KINDS if isinstance(module, kind.base)), None)
    if found is None and (base := _hugging_face_conv1d(type(module))) is not None:
        return Kind("hf_conv1d", base, 0, _only("weight"), "nx", "nf", _fed_by("x"))
    return found


def is_hugging_face_conv1d(module: nn.Module) -> bool:
    """Whether a module is the `Conv1D` of transformers: a linear layer whose weight is stored (in, out)."""
    return _hugging_face_conv1d(type(module)) is not None


def _hugging_face_conv1d(of: type) -> type[nn.Module] | None:
    return next((base for base in of.__mro__ if base.__name__ == "Conv1D" and base.__module__ in _HUGGING_FACE), None)
