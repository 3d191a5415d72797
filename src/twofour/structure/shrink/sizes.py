"""The sizes that known layers hold beside their tensors, read off the tensors after a cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from twofour.layers import is_hugging_face_conv1d

Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _linear(module: Any) -> dict[str, Any]:
    outputs, inputs = module.weight.shape
    return {"in_features": inputs, "out_features": outputs}


def _convolution(module: Any) -> dict[str, Any]:
    outputs, inputs = module.weight.shape[:2]
    return {"in_channels": inputs * module.groups, "out_channels": outputs}


def _transposed(module: Any) -> dict[str, Any]:
    inputs, outputs = module.weight.shape[:2]
    return {"in_channels": inputs, "out_channels": outputs * module.groups}


def _normalisation(module: Any) -> dict[str, Any]:
    held = next((t for t in (module.weight, module.running_mean) if t is not None), None)
    return {} if held is None else {"num_features": len(held)}


def _layer_norm(module: Any) -> dict[str, Any]:
    return {} if module.weight is None else {"normalized_shape": tuple(module.weight.shape)}


def _group_norm(module: Any) -> dict[str, Any]:
    return {} if module.weight is None else {"num_channels": len(module.weight)}


def _embedding(module: Any) -> dict[str, Any]:
    return {"embedding_dim": module.weight.shape[1]}


def _prelu(module: Any) -> dict[str, Any]:
    return {"num_parameters": len(module.weight)}


def _recurrent(module: Any) -> dict[str, Any]:
    return {"input_size": module.weight_ih_l0.shape[1], "hidden_size": module.weight_hh_l0.shape[1]}


def _transposed_linear(module: Any) -> dict[str, Any]:
    inputs, outputs = module.weight.shape
    return {"nx": inputs, "nf": outputs}


SIZES: tuple[tuple[Any, Callable[[Any], dict[str, Any]]], ...] = (
    (nn.Linear, _linear),
    (Convolution, _convolution),
    (Transposed, _transposed),
    (_NormBase, _normalisation),
    ((nn.LayerNorm, nn.RMSNorm), _layer_norm),
    (nn.GroupNorm, _group_norm),
    (nn.Embedding, _embedding),
    (nn.PReLU, _prelu),
    (nn.RNNBase, _recurrent),
)
"""Kinds of layers, each with what its attributes are for the tensors that it has."""


RECURRENT = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
ROWS: tuple[tuple[Any, Mapping[str, int]], ...] = (
    ((nn.Linear, Convolution), {"weight": 0, "bias": 0}),
    (Transposed, {"weight": 1, "bias": 0}),
    (_NormBase, dict.fromkeys(("weight", "bias", "running_mean", "running_var"), 0)),
    ((nn.LayerNorm, nn.GroupNorm), {"weight": 0, "bias": 0}),
    (nn.MultiheadAttention, {"in_proj_weight": 0, "in_proj_bias": 0}),
)
"""Kinds of layers, each with the axes of its tensors that hold the same channels."""


def same_axes(module: nn.Module) -> dict[str, int]:
    """Return the axes of a layer's tensors that hold the same channels, by attribute; {} of one that is not known."""
    if isinstance(module, Transposed) and module.groups > 1:  # the bias has the channels of all groups
        return {}
    if isinstance(module, nn.RNNBase):  # states of all layers and directions: torch keeps one size
        return {name: 0 for name in module._parameters if name.startswith(RECURRENT)}
    if is_hugging_face_conv1d(module):
        return {"weight": 1, "bias": 0}
    return dict(next((axes for kind, axes in ROWS if isinstance(module, kind)), {}))


def bare_size(module: object) -> str:
    """Return where a normalisation that has no tensor to read its number of channels off holds it, "" of any other."""
    if isinstance(module, _NormBase) and not _normalisation(module):
        return "num_features"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and not _layer_norm(module) and len(module.normalized_shape) == 1:
        return "normalized_shape"
    return ""


def number(module: nn.Module, name: str) -> int | None:
    """Return a whole number that a module holds, also as the only entry of a tuple; None where it holds none."""
    value = module.__dict__.get(name)
    value = value[0] if type(value) is tuple and len(value) == 1 else value
    return value if type(value) is int else None


def set_number(module: nn.Module, name: str, value: int) -> None:
    """Set such a number, in a tuple where it stands in one."""
    setattr(module, name, (value,) if type(module.__dict__.get(name)) is tuple else value)


def is_known(module: nn.Module) -> bool:
    """Whether the layer's sizes are read off its tensors."""
    return _sizes(module) is not None


def _sizes(module: nn.Module) -> Callable[[Any], dict[str, Any]] | None:
    if is_hugging_face_conv1d(module):
        return _transposed_linear
    return next((sizes for kind, sizes in SIZES if isinstance(module, kind)), None)


def refresh(module: nn.Module) -> dict[str, Any]:
    """Set the sizes of a layer of torch to those of its tensors; return what they were."""
    sizes = _sizes(module)
    before: dict[str, Any] = {}
    for name, size in (sizes(module) if sizes is not None else {}).items():
        before[name] = getattr(module, name)
        setattr(module, name, size)
    return before
