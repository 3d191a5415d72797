"""Which layers of a model compile can replace, with their weights; and why the others stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twofour.compiler.build_conv import NO_IMAGES
from twofour.compiler.conv import conv_refusal
from twofour.compiler.encoding import Encoding
from twofour.compiler.plan import LayerPlan
from twofour.errors import CompileError
from twofour.kernels.nm_matmul import DYNAMIC, Quantization
from twofour.layers import compiled_parts
from twofour.packing import Packed
from twofour.patterns.base import is_finite, non_finite

FLOAT32 = Encoding()

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
        name: Name of the layer.
        weight: The weight (out, in) as the model or the file holds it.
        bias: float32 (out,) or None.
        rows: out_features.
        columns: in_features.
        identity: Equal for tied weights.
        encoding: How the compiled layer writes it.
        activations: dtype of the layer's input in the model.
        quantization: int8: the input's static range, or dynamic.
    """

    name: str
    weight: Packed | Tensor
    bias: Tensor | None
    rows: int
    columns: int
    identity: int
    encoding: Encoding
    activations: torch.dtype
    quantization: Quantization = DYNAMIC

    @property
    def nbytes(self) -> int:
        """Bytes of the dense weight."""
        return self.rows * self.columns * self.activations.itemsize

    def encoded(self) -> tuple[Packed | Tensor, str]:
        """Return the weight as the kernels take it, and why it is not packed, "" when it is; made at each call.

        Raises:
            PatternError: The weight holds NaN or infinity.
        """
        if isinstance(self.weight, Tensor) and not is_finite(self.weight):
            raise non_finite("a weight", self.weight).for_layer(self.name)
        return self.encoding.encode(self.weight)


def replaceable(model: nn.Module, encoding: Encoding) -> Iterator[tuple[str, LayerWeight]]:
    """Yield the Linear layers that compile replaces, by name."""
    inside_attention = attention_parts(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and refusal(module, name in inside_attention, encoding) is None:
            yield name, layer_weight(name, module.weight, module.bias, encoding)


def layer_weight(
    name: str, weight: Packed | Tensor, bias: Tensor | None, encoding: Encoding, like: torch.dtype | None = None
) -> LayerWeight:
    """Describe the weight of a Linear.

    Args:
        name: Name of the layer.
        weight: (out, in), dense or packed.
        bias: (out,) or None.
        encoding: How the compiled layer writes it.
        like: dtype of the model's weight where `weight` is not it but a file's.
    """
    shape = weight.header.shape if isinstance(weight, Packed) else weight.shape
    stored = torch.float32 if isinstance(weight, Packed) else weight.dtype
    held = weight if isinstance(weight, Packed) else weight.detach()
    bias = None if bias is None else bias.detach().float()
    return LayerWeight(name, held, bias, shape[0], shape[1], id(weight), encoding, like or stored)


def refusal(module: nn.Module, inside_attention: bool, encoding: Encoding = FLOAT32) -> str | None:
    """Return why a layer with a weight cannot be replaced, or None when it can."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        other = "" if encoding.dtype == "float32" else f"convolutions run in float32, not in {encoding.dtype}"
        return conv_refusal(module) or other or NO_IMAGES
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
    weight = module.weight
    if not encoding.takes(weight) or type(weight) is not nn.Parameter or not weight.numel():
        return f"its weight is {weight.dtype} of shape {tuple(weight.shape)}: no {encoding.dtype} kernel takes it"
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


def left_alone(
    model: nn.Module, encoding: Encoding = FLOAT32, convs: Mapping[str, object] | None = None
) -> list[LayerPlan]:
    """Return a plan entry for every Linear, convolution, attention and recurrent layer that stays, with its reason.

    Args:
        model: Any module.
        encoding: How the compiled layers write their weights.
        convs: The convolutions that are replaced, by name.
    """
    inside_attention = attention_parts(model)
    entries = []
    for name, module in model.named_modules():
        attribute = next((attribute for kind, attribute in _WEIGHTS.items() if isinstance(module, kind)), None)
        if name in (convs or {}):
            continue
        reason = attribute and refusal(module, name in inside_attention, encoding)
        weight = getattr(module, attribute or "", None)
        if reason and isinstance(weight, Tensor):
            kind, size = type(module).__name__, weight.numel() * weight.element_size()
            shape = tuple(weight.shape)
            sizes = size, size, size
            entries.append(LayerPlan(name, kind, shape, None, "torch", "", None, None, f"dense: {reason}", *sizes))
    return entries


def impossible_tokens(tokens: object) -> CompileError:
    """Build the error for token counts that cannot be measured."""
    return CompileError(
        "the token counts are impossible",
        got=repr(tokens),
        wanted="a sequence of positive whole numbers",
        remedy="tokens=(1, 8, 32, 128): batch times sequence length of the calls to come",
    )


def require_plain(model: nn.Module) -> None:
    """Refuse a model that is compiled already.

    Raises:
        CompileError: It is, or some of its layers are.
    """
    if found := compiled_parts(model):
        raise CompileError(
            "the model is compiled already",
            got=found,
            wanted="the masked or dense model that it was compiled from",
            remedy="compile that one with other options, or twofour.load(path, model, memory=..., graph=...) its file",
        )


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
