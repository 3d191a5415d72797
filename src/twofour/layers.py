"""Where a pattern may go: walks a model, names the weights that can be pruned and says why the others cannot.

The reduction axis is the one a product sums over: `in` of a Linear, `C_in / groups` of a convolution, separately for
each kernel position (Mishra et al. 2021; apex sparse_masklib flattens RSKC with C last). Both are axis 1 of the weight.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from twofour.errors import LayerError, TwofourError

Kind = Literal["linear", "conv1d", "conv2d"]

REDUCTION_AXIS = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_KINDS: dict[type[nn.Module], Kind] = {nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d"}
ELIGIBILITIES = ("asp", "any")
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


class CompiledLayer(nn.Module):
    """Base of the layers that a compiled model has in the places of plain ones: for inference, nothing to prune."""


_COMPILED = "_compiled_by_twofour"


def mark_compiled(model: nn.Module) -> None:
    """Note on a model that it is compiled: it may have no `CompiledLayer` where torch's own layers are the fastest."""
    object.__setattr__(model, _COMPILED, True)


def compiled_parts(model: nn.Module) -> str:
    """Return the names of a model's compiled layers, or of its compiled parts without any; "" where it is plain."""
    modules = list(model.named_modules())
    names = [f"`{name or '(model)'}`" for name, module in modules if isinstance(module, CompiledLayer)]
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"the compiled layers {', '.join(names[:8])}{more}"
    marked = [f"`{name}`" if name else "the model" for name, module in modules if _COMPILED in module.__dict__]
    return f"{', '.join(marked)} from twofour.compile, all layers torch's own" if marked else ""


def reduction_last(tensor: Tensor) -> Tensor:
    """View a weight (out, in, [spatial]) as (out, [spatial], in), so that groups lie along the last axis."""
    return tensor.movedim(REDUCTION_AXIS, -1)


def from_reduction_last(tensor: Tensor) -> Tensor:
    """Undo `reduction_last`: (out, [spatial], in) to (out, in, [spatial])."""
    return tensor.movedim(-1, REDUCTION_AXIS)


@dataclass(frozen=True)
class PrunableWeight:
    """One weight that a pattern can be laid over.

    Attributes:
        name: Full parameter name, "encoder.fc1.weight".
        layer: Name of the module that owns it, "encoder.fc1"; "" when the model is the layer.
        module: That module.
        attribute: Name of the parameter in the module.
        kind: Kind of layer.
        aliases: Further names of the same (tied) parameter.
    """

    name: str
    layer: str
    module: nn.Module
    attribute: str
    kind: Kind
    aliases: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of all layers that share the weight, `layer` first."""
        return (self.layer, *(alias.rpartition(".")[0] for alias in self.aliases))

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself, looked up again at each call."""
        parameter = self.module._parameters[self.attribute]
        assert parameter is not None, self.name
        return parameter

    @property
    def rows(self) -> int:
        """How many rows of `reduction` values: out times the kernel positions."""
        return self.parameter.numel() // max(self.reduction, 1)

    @property
    def reduction(self) -> int:
        """Length of the reduction axis: in_features, or in_channels / groups."""
        return self.parameter.shape[REDUCTION_AXIS]

    def reduction_last(self, tensor: Tensor) -> Tensor:
        """View a tensor of the weight's shape as (out, [spatial], in)."""
        return reduction_last(tensor)

    def from_reduction_last(self, tensor: Tensor) -> Tensor:
        """View a tensor (out, [spatial], in) in the weight's own order (out, in, [spatial])."""
        return from_reduction_last(tensor)


@dataclass(frozen=True)
class Skipped:
    """A parameter of two or more axes that stays dense, and the reason."""

    name: str
    layer: str
    reason: str


@dataclass(frozen=True)
class Walk:
    """What a walk over a model found, in the model's own order."""

    weights: tuple[PrunableWeight, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class _Owner:
    """One place of a parameter in the model; a tied parameter has several."""

    name: str
    layer: str
    module: nn.Module
    attribute: str
    inside_attention: bool


def walk(model: nn.Module, *, skip: str | Sequence[str] = (), eligibility: str = "asp") -> Walk:
    """Find the weights of `model` that can be pruned; each other parameter with two or more axes gets a reason.

    Args:
        model: Any module; a single layer is a model too.
        skip: Globs of layers to leave dense, matched as `matches` does.
        eligibility: "asp" takes a weight only if size(0) % 8 == 0 and size(1) % 16 == 0 (apex asp.py), which leaves
            RGB stems, depth-wise convolutions and odd heads dense; "any" leaves it to the pattern's group.

    Raises:
        LayerError: `eligibility` is unknown, or a glob in `skip` matches no layer.
    """
    require_eligibility(eligibility)
    globs = (skip,) if isinstance(skip, str) else tuple(skip)
    require_matches(model, globs, "a glob in `skip`")
    owners = _owners(model)
    shared = _shared_memory(owners)
    weights: list[PrunableWeight] = []
    skipped: list[Skipped] = []
    for key, places in owners.items():
        first, parameter = places[0], places[0].module._parameters[places[0].attribute]
        assert parameter is not None
        reason = _reason(places, parameter, globs, eligibility) or shared.get(key)
        if reason is None:
            aliases = tuple(place.name for place in places[1:])
            weights.append(
                PrunableWeight(first.name, first.layer, first.module, first.attribute, _kind(first.module), aliases)
            )
        elif _has_axes(parameter):
            skipped.append(Skipped(first.name, first.layer, reason))
    return Walk(tuple(weights), tuple(skipped))


def matches(glob: str, layer: str) -> bool:
    """Whether a glob names the layer or a module around it; `*` crosses dots, so "encoder.*.fc1" fits any depth."""
    parts = layer.split(".")
    return any(fnmatchcase(".".join(parts[:end]), glob) for end in range(len(parts), 0, -1))


def nearest(glob: str, names: Iterable[str]) -> str:
    """Say which of `names` look most like `glob`, for the last line of an error."""
    names = list(dict.fromkeys(name for name in names if name))
    found = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3]
    return "nearest names: " + ", ".join(f"`{name}`" for name in found) if found else "the model has no named layers"


def require_eligibility(eligibility: object, kind: type[TwofourError] = LayerError) -> None:
    """Raise an error of `kind` unless `eligibility` is one of `ELIGIBILITIES`."""
    if eligibility not in ELIGIBILITIES:
        raise kind(
            "the eligibility rule is unknown", got=repr(eligibility), wanted=" or ".join(map(repr, ELIGIBILITIES))
        )


def require_matches(model: nn.Module, globs: Iterable[str], source: str, kind: type[TwofourError] = LayerError) -> None:
    """Raise an error of `kind` unless each glob names a layer of `model`; `source` says where the globs stand."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise kind(
                f"{source} matches no layer",
                got=repr(glob),
                wanted="the name of a layer, or a glob of such names",
                remedy=nearest(glob, names),
            )


def _owners(model: nn.Module) -> dict[int, list[_Owner]]:
    """Group the places of each parameter by the parameter's identity, so that a tied one is handled once."""
    owners: dict[int, list[_Owner]] = {}
    attention: list[str] = []
    for layer, module in model.named_modules(remove_duplicate=False):
        inside = any(layer.startswith(f"{name}." if name else "") for name in attention)
        if isinstance(module, nn.MultiheadAttention):
            attention.append(layer)
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{layer}.{attribute}" if layer else attribute
                owners.setdefault(id(parameter), []).append(_Owner(name, layer, module, attribute, inside))
    return owners


def _shared_memory(owners: dict[int, list[_Owner]]) -> dict[int, str]:
    """Find parameters that are different objects over the same memory: one mask could not hold for both."""
    seen: dict[int, tuple[int, str]] = {}
    reasons: dict[int, str] = {}
    for key, (first, *_) in owners.items():
        parameter = first.module._parameters[first.attribute]
        if type(parameter) is not nn.Parameter or parameter.layout != torch.strided or parameter.numel() == 0:
            continue
        address = 0 if parameter.is_meta else parameter.data_ptr()
        if not address:
            continue
        other, name = seen.setdefault(address, (key, first.name))
        if other != key:
            reasons[key] = f"shares memory with `{name}` without being the same Parameter"
            reasons[other] = f"shares memory with `{first.name}` without being the same Parameter"
    return reasons


def _has_axes(parameter: Tensor) -> bool:
    return is_lazy(parameter) or parameter.ndim >= 2


def _reason(places: Sequence[_Owner], parameter: Tensor, globs: Sequence[str], eligibility: str) -> str | None:
    """Say why a parameter stays dense, or None when it can be pruned."""
    for place in places:
        for glob in globs:
            if matches(glob, place.layer):
                return f"left out by skip={glob!r}"
    if is_lazy(parameter):
        return "a lazy layer without a shape yet: run one batch first"
    for place in places:
        if reason := _module_reason(place):
            return reason if place is places[0] else f"shared with `{place.name}`: {reason}"
    return _tensor_reason(parameter) or (_asp_reason(places[0].module, parameter) if eligibility == "asp" else None)


def _module_reason(place: _Owner) -> str | None:
    module, kind = place.module, type(place.module).__name__
    if place.inside_attention:
        return "inside nn.MultiheadAttention, which reads the weight without calling the layer"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "an embedding: its rows are looked up, not multiplied"
    if isinstance(module, _NORMS):
        return "a normalisation weight"
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return "parametrised: the weight is computed at each use"
    base = next((base for base in _KINDS if isinstance(module, base)), None)
    if base is None:
        return f"{kind} is not a supported kind of layer (Linear, Conv1d, Conv2d)"
    if place.attribute != "weight":
        return _replaced_reason(place.attribute)
    return _forward_reason(module, base)


def _replaced_reason(attribute: str) -> str:
    known = {
        "weight_v": "weight-normed: the weight is computed from weight_g and weight_v",
        "weight_g": "weight-normed: the weight is computed from weight_g and weight_v",
        "weight_orig": "the weight is computed from weight_orig (spectral norm or torch.nn.utils.prune)",
    }
    return known.get(attribute, f"`{attribute}` is not the layer's weight")


def _forward_reason(module: nn.Module, base: type[nn.Module]) -> str | None:
    for method in ("forward", "_conv_forward"):
        own = getattr(base, method, None)
        if method in module.__dict__:
            return f"its {method} was replaced on the instance"
        if getattr(type(module), method, None) is not own:
            return f"{type(module).__name__} has a {method} of its own"
    return None


def _tensor_reason(parameter: Tensor) -> str | None:
    if parameter.is_meta:
        return "on the meta device: it has no values"
    if parameter.layout != torch.strided:
        return f"stored as {parameter.layout}"
    if parameter.dtype not in DTYPES:
        return f"dtype {str(parameter.dtype).removeprefix('torch.')} is not a real floating type that can be ranked"
    if type(parameter) not in (Tensor, nn.Parameter) and not is_distributed(parameter):
        return f"held in a tensor subclass, {type(parameter).__name__}"
    if parameter.ndim < 2 or parameter.numel() == 0:
        return f"shape {tuple(parameter.shape)} has no values" if parameter.numel() == 0 else "a single axis"
    return None


def _asp_reason(module: nn.Module, weight: Tensor) -> str | None:
    linear = isinstance(module, nn.Linear)
    out, reduction = weight.shape[0], weight.shape[REDUCTION_AXIS]
    if reduction % 16:
        name = "in_features" if linear else "in_channels"
        if getattr(module, "groups", 1) != 1:
            name += " / groups"
        return f"{name} {reduction} is not a multiple of 16 (ASP's rule)"
    if out % 8:
        return f"{'out_features' if linear else 'out_channels'} {out} is not a multiple of 8 (ASP's rule)"
    return None


def is_distributed(tensor: Tensor) -> bool:
    """Whether the tensor is sharded over processes (a DTensor, as FSDP2 makes them)."""
    if type(tensor) in (Tensor, nn.Parameter) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return all values of a tensor; for a sharded one (DTensor) every process must call this together."""
    return cast(Any, tensor).full_tensor() if is_distributed(tensor) else tensor


def _kind(module: nn.Module) -> Kind:
    return next(kind for base, kind in _KINDS.items() if isinstance(module, base))
