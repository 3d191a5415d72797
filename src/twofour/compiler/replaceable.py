"""Which layers of a model compile can replace, with their weights; and why the others stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twofour.compiler.plan import LayerPlan
from twofour.errors import PackingError
from twofour.packing import Packed, pack
from twofour.patterns import parse
from twofour.patterns.base import non_finite

_TWO_FOUR = parse("2:4")


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
            yield name, layer_weight(module, name)


def layer_weight(module: nn.Linear, name: str) -> LayerWeight:
    """Pack the weight of a Linear when it is 2:4, else say why it stays dense."""
    weight = module.weight.detach()
    rows, columns = weight.shape
    if not torch.isfinite(weight).all():
        raise non_finite("a weight", weight).for_layer(name)
    bias = None if module.bias is None else module.bias.detach()
    try:
        source, because = (pack(weight, _TWO_FOUR), "") if columns % 4 == 0 else (weight, _odd(columns))
    except PackingError:
        found = _TWO_FOUR.check(weight)
        source, because = (
            weight,
            f"not 2:4, {found.groups - found.legal} of {found.groups} groups have 3 or 4 non-zeros",
        )
    return LayerWeight(source, bias, rows, columns, id(module.weight), because)


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
    """Return a plan entry for every Linear and convolution that stays as it is, with its reason."""
    inside_attention = attention_parts(model)
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
    entries = []
    for name, module in model.named_modules():
        reason = refusal(module, name in inside_attention) if isinstance(module, kinds) else None
        weight = module._parameters.get("in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight")
        if reason is None or not isinstance(weight, Tensor):
            continue
        kind, size = type(module).__name__, weight.numel() * weight.element_size()
        entries.append(
            LayerPlan(name, kind, tuple(weight.shape), None, "torch", "", None, None, f"dense: {reason}", size, size)
        )
    return entries
