"""Which layers of a model compile can replace, with their weights; and why the others stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twofour.compiler.plan import LayerPlan
from twofour.errors import CompileError, PackingError
from twofour.packing import Packed, pack
from twofour.patterns import parse
from twofour.patterns.base import non_finite

_TWO_FOUR = parse("2:4")

_WEIGHTS = {
    nn.Linear: "weight",
    nn.modules.conv._ConvNd: "weight",
    nn.MultiheadAttention: "in_proj_weight",
    nn.RNNBase: "weight_ih_l0",
}
"""Kinds of layer that the plan speaks of, and the weight whose shape it shows."""


@dataclass(frozen=True, eq=False)
class LayerWeight:
    """The weight of a Linear to be replaced.

    Attributes:
        source: Canonical 2:4 form, or the dense float32 weight (out, in).
        bias: float32 (out,) or None.
        rows: out_features.
        columns: in_features.
        identity: Equal for tied weights.
        dense_because: Why the weight is not packed, "" when it is.
    """

    source: Packed | Tensor
    bias: Tensor | None
    rows: int
    columns: int
    identity: int
    dense_because: str = ""


def replaceable(model: nn.Module) -> Iterator[tuple[str, LayerWeight]]:
    """Yield the Linear layers that compile replaces, by name.

    Raises:
        PatternError: A weight holds NaN or infinity.
    """
    inside_attention = attention_parts(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and refusal(module, name in inside_attention) is None:
            yield name, layer_weight(module.weight, module.bias, name)


def layer_weight(weight: Tensor, bias: Tensor | None, name: str) -> LayerWeight:
    """Pack the dense weight (out, in) of a Linear when it is 2:4, else say why it stays dense.

    Raises:
        PatternError: The weight holds NaN or infinity.
    """
    dense = weight.detach()
    rows, columns = dense.shape
    if not torch.isfinite(dense).all():
        raise non_finite("a weight", dense).for_layer(name)
    try:
        source, because = (pack(dense, _TWO_FOUR), "") if columns % 4 == 0 else (dense, _odd(columns))
    except PackingError:
        found = _TWO_FOUR.check(dense)
        source, because = dense, f"not 2:4, {found.groups - found.legal} of {found.groups} groups have 3 or 4 non-zeros"
    return LayerWeight(source, None if bias is None else bias.detach(), rows, columns, id(weight), because)


def _odd(columns: int) -> str:
    return f"in_features {columns} is not a multiple of 4"


def refusal(module: nn.Module, inside_attention: bool) -> str | None:
    """Return why a layer with a weight cannot be replaced, or None when it can."""
    if not isinstance(module, nn.Linear):
        return f"no packed kernel for {type(module).__name__} yet"
    if inside_attention:
        return "nn.MultiheadAttention reads its weight directly; attention projections are planned"
    if type(module).forward is not nn.Linear.forward or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its weight is parametrised"
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return "it has hooks, which a replacement would lose"
    if module.weight.dtype != torch.float32 or type(module.weight) is not nn.Parameter or not module.weight.numel():
        return f"its weight is {module.weight.dtype} of shape {tuple(module.weight.shape)}: float32 kernels only yet"
    return None


def attention_parts(model: nn.Module) -> set[str]:
    """Return the names of all modules inside an nn.MultiheadAttention."""
    return {
        f"{outer}.{inner}".lstrip(".")
        for outer, attention in model.named_modules()
        if isinstance(attention, nn.MultiheadAttention)
        for inner, _ in attention.named_modules()
        if inner
    }


def left_alone(model: nn.Module) -> list[LayerPlan]:
    """Return a plan entry for every Linear, convolution, attention and recurrent layer that stays, with its reason."""
    inside_attention = attention_parts(model)
    entries = []
    for name, module in model.named_modules():
        attribute = next((attribute for kind, attribute in _WEIGHTS.items() if isinstance(module, kind)), None)
        reason = attribute and refusal(module, name in inside_attention)
        weight = getattr(module, attribute or "", None)
        if reason and isinstance(weight, Tensor):
            kind, size = type(module).__name__, weight.numel() * weight.element_size()
            shape = tuple(weight.shape)
            entries.append(LayerPlan(name, kind, shape, None, "torch", "", None, None, f"dense: {reason}", size, size))
    return entries


def require_cpu(model: nn.Module, *, meta: bool = False) -> None:
    """Refuse a model on a device without kernels.

    Args:
        model: Any module.
        meta: Accept tensors on the meta device: a file will give them values.

    Raises:
        CompileError: A parameter or buffer is elsewhere than on the CPU.
    """
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if devices - {"cpu", *(["meta"] if meta else [])}:
        raise CompileError(
            "the model is on a device without kernels",
            got=", ".join(sorted(devices)),
            wanted="a model on the CPU",
            remedy="model.cpu(), or, for a model on the meta device, load its weights first",
        )
