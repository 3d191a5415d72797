"""Why a parameter stays dense, and what keeps a layer from being replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from twofour.layers.attachments import attached, keeps_zeros
from twofour.layers.globs import matches
from twofour.layers.kinds import ATTENTION_OUT, SUPPORTED, Kind, kind_of
from twofour.layers.modules import table
from twofour.layers.sharded import is_distributed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

ASP_RULE = "(ASP's rule)"
"""How a reason ends that `eligibility="any"` lifts."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)  # pyright: ignore[reportPrivateUsage]
_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""What peft calls the modules of its low-rank adapters."""
_METHODS = ("forward", "_conv_forward")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Place:
    """One place of a parameter in the model; a tied parameter has several.

    Attributes:
        name: Full name of the parameter there.
        layer: Name of the module that owns it.
        module: That module.
        attribute: Name of the parameter in the module.
        attention: The nn.MultiheadAttention around the module, or None.
    """

    name: str
    layer: str
    module: nn.Module
    attribute: str
    attention: nn.Module | None = None

    @property
    def kind(self) -> Kind | None:
        """The kind of weight, or None where it is none that a pattern can be laid over."""
        if self.attention is not None:
            return ATTENTION_OUT if self.module is getattr(self.attention, "out_proj", None) else None
        return kind_of(self.module)

    @property
    def embeds(self) -> bool:
        """Whether rows of the parameter are looked up here."""
        return isinstance(self.module, nn.Embedding | nn.EmbeddingBag)


def reason(
    places: Sequence[Place],
    parameter: Tensor,
    skip: Sequence[str],
    eligibility: str,
    tied: Sequence[str],
    empty: bool = False,
) -> str | None:
    """Say why a parameter stays dense, or None when it can be pruned.

    Args:
        places: Where it stands; the first is the one that would be masked.
        parameter: The parameter.
        skip: Globs of layers to leave dense.
        eligibility: "asp" or "any".
        tied: Globs of whole layer names that are pruned although their weight is an embedding too.
        empty: Whether a parameter on the meta device will do.
    """
    for place in places:
        for glob in skip:
            if matches(glob, place.layer):
                return f"left out by skip={glob!r}"
    if is_lazy(parameter):
        return "a lazy layer without a shape yet: run one batch first"
    allowed = any(fnmatchcase(place.layer, glob) for glob in tied for place in places if not place.embeds)
    for place in places:
        if (allowed and place.embeds and place is not places[0]) or not (why := _place_reason(place)):
            continue
        return why if place is places[0] else f"shared with `{place.name}`: {why}{_asking(places[0], place)}"
    kind = places[0].kind
    assert kind is not None, places[0]
    axes = {place.kind.reduction(place.module) for place in places if place.kind and not place.embeds}
    if len(axes) > 1:
        return f"shared with `{places[1].name}`, whose product sums over another axis"
    return tensor_reason(parameter, empty) or (
        _asp_reason(kind, places[0].module, parameter) if eligibility == "asp" else None
    )


def _asking(head: Place, embedding: Place) -> str:
    if not embedding.embeds:
        return ""
    return f'; a rule that names it, {{"{head.layer}": ...}}, prunes both'


def _place_reason(place: Place) -> str | None:
    module, name = place.module, type(place.module).__name__
    around = place.layer.split(".")
    if place.embeds:
        return "an embedding: its rows are looked up, not multiplied"
    if isinstance(module, _NORMS):
        return "a normalisation weight"
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        by = ", ".join(type(part).__name__.lstrip("_") for part in module)
        return (
            f"parametrised ({by}): the weight is computed at each use; torch.nn.utils.parametrize."
            "remove_parametrizations makes it plain"
        )
    if "parametrizations" in around:
        return "part of a parametrisation, not a layer"
    if any(part in _ADAPTERS for part in around):
        return "a low-rank adapter (LoRA): merge it into its layer before pruning, which it would make dense again"
    kind = place.kind
    if place.attention is not None and kind is None:
        return "inside nn.MultiheadAttention, which reads the weight without calling the layer"
    if kind is None:
        return f"{name} is not a supported kind of layer ({SUPPORTED})"
    if not kind.holds(place.attribute):
        return _replaced_reason(place.attribute)
    if place.attention is not None and (own := own_forward(place.attention, nn.MultiheadAttention)):
        return f"inside nn.MultiheadAttention: {own}"
    if keeps_zeros(module):  # a class of ours over the layer, which multiplies by zero where the weight is zero
        return _own_method(type(module).__bases__[-1], kind.base)
    return own_forward(module, kind.base)


def _replaced_reason(attribute: str) -> str:
    if attribute.endswith(("_v", "_g")) and attribute.startswith("weight"):
        stem = attribute[:-2]
        return (
            f"weight-normed: the weight is computed from {stem}_g and {stem}_v; torch.nn.utils.remove_weight_norm "
            "makes it plain"
        )
    if attribute.endswith("_orig"):
        return (
            f"the weight is computed from {attribute} (spectral norm or torch.nn.utils.prune); remove_spectral_norm or "
            "prune.remove makes it plain"
        )
    return f"`{attribute}` is not the layer's weight"


def own_forward(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Say that a layer computes otherwise than its kind's class, None where it does not."""
    if replaced := next((method for method in _METHODS if method in module.__dict__), None):
        return f"its {replaced} was replaced on the instance"
    return _own_method(type(module), base)


def _own_method(of: type[nn.Module], base: type[nn.Module]) -> str | None:
    own = next((method for method in _METHODS if getattr(of, method, None) is not getattr(base, method, None)), None)
    return None if own is None else f"{of.__name__} has a {own} of its own"


def tensor_reason(parameter: Tensor, empty: bool = False) -> str | None:
    """Say why no pattern can be laid over a tensor, whatever layer it belongs to; `empty` allows the meta device."""
    if parameter.is_meta and not empty:
        return "on the meta device: it has no values"
    if parameter.is_nested:
        return "a nested tensor"
    if parameter.layout != torch.strided:
        return f"stored as {parameter.layout}"
    if reason := dtype_reason(parameter.dtype):
        return reason
    if type(parameter) not in (Tensor, nn.Parameter) and not is_distributed(parameter):
        return f"held in a tensor subclass, {type(parameter).__name__}"
    if parameter.is_neg():
        return "a view that torch negates on reading: assign a clone of it"
    if any(step == 0 and size > 1 for size, step in zip(parameter.shape, parameter.stride(), strict=True)):
        return "expanded, several of its values share one place in memory: assign a clone of it"
    if parameter.ndim < 2 or parameter.numel() == 0:
        return f"shape {tuple(parameter.shape)} has no values" if parameter.numel() == 0 else "a single axis"
    return None


def dtype_reason(dtype: object) -> str | None:
    """Say why values of a dtype, torch's or the name of a file's own, cannot be ranked, or None."""
    name = str(dtype).removeprefix("torch.")
    return None if dtype in DTYPES else f"dtype {name} is not a real floating type that can be ranked"


def _asp_reason(kind: Kind, module: nn.Module, weight: Tensor) -> str | None:
    rows, reduction = kind.rows(module, weight.shape), kind.reduction(module).length(weight.shape)
    if reduction % 16:
        grouped = " / groups" if getattr(module, "groups", 1) != 1 else ""
        return f"{kind.reduction_name}{grouped} {reduction} is not a multiple of 16 {ASP_RULE}"
    return f"{kind.rows_name} {rows} is not a multiple of 8 {ASP_RULE}" if rows % 8 else None


def remedy_for(reasons: Iterable[str]) -> str:
    """Return what to try where no weight was taken, from the reasons why each was not."""
    if any(reason.endswith(ASP_RULE) for reason in reasons):
        return 'eligibility="any" lifts ASP\'s rule of 8 x 16 multiples'
    return "change what the reasons name, or pass a model that has such layers"


def obstacles(module: nn.Module, base: type[nn.Module] | None = None) -> Iterator[tuple[str, str]]:
    """Yield (kind, reason) of each: "attached", "forward", "parametrised", "hooks".

    Args:
        module: A layer of a kind, or of none with `base`; else it has no obstacles.
        base: The class that it must compute as; default: that of its kind.
    """
    kind = kind_of(module)
    base = kind.base if base is None and kind is not None else base
    if base is None:
        return
    if over := attached(module):
        yield "attached", f"{over} is attached: call remove() of its handle first"
    if own := own_forward(module, base):
        yield "forward", own
    if torch.nn.utils.parametrize.is_parametrized(module):
        yield "parametrised", "its weight is parametrised"
    if any(table(module, hooks) for hooks in _HOOKS):
        yield "hooks", "it has hooks, which a replacement would lose"


def obstacle(module: nn.Module, accepted: Collection[str] = (), base: type[nn.Module] | None = None) -> str | None:
    """Return the reason of the first obstacle whose kind is not accepted, None where there is none."""
    return next((reason for kind, reason in obstacles(module, base) if kind not in accepted), None)
