"""Masks in checkpoints: saved and restored exactly, or derived from weights that are already sparse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypedDict, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from twofour.errors import MaskError, PatternError
from twofour.layers import PrunableWeight, full_tensor, is_distributed, local, nearest, parse_globs, walk
from twofour.masks.mask import Mask, attach_all, of
from twofour.patterns import Pattern, parse


class SavedMask(TypedDict):
    """One mask in a training checkpoint; torch.load(weights_only=True) reads it."""

    pattern: str
    shape: tuple[int, ...]
    bits: Tensor


@runtime_checkable
class PatternChoice(Protocol):
    """Anything that gives each layer a pattern, or None for dense, as a Recipe does."""

    @property
    def skip(self) -> tuple[str, ...]:
        """Globs of layers that are dense."""
        ...

    @property
    def eligibility(self) -> str:
        """The rule of `layers.walk`."""
        ...

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of layers that are sparse although an embedding has their weight."""
        ...

    def pattern_for(self, *layers: str) -> Pattern | None:
        """Return the pattern of a layer, given all its names."""
        ...


def state_dict(model: nn.Module) -> dict[str, SavedMask]:
    """Return the exact masks of `model`, one bit a value, to store beside the model's own state dict.

    Each entry holds the pattern's text, the weight's shape and `bits`: uint8 (rows, bytes), one row for each index of
    the weight's first axis, eight values a byte in the weight's own order, the first value in the lowest bit. The bits
    of a mask that is sharded over processes (FSDP2) are a DTensor sharded along the rows, so that
    `torch.distributed.checkpoint` has each process write and read its part.
    """
    return {
        name: {"pattern": mask.pattern.name, "shape": tuple(mask.keep.shape), "bits": _to_bits(mask.keep)}
        for name, mask in of(model).items()
    }


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Mask]:
    """Restore the masks that `state_dict` returned, attaching them where the model has none; all or nothing.

    Raises:
        MaskError: A name or shape does not fit the model, an entry is malformed, or the model has a mask that the
            state lacks.
    """
    if not _is_mapping(state):
        raise MaskError(
            "the masks are no state dict",
            got=type(state).__name__,
            wanted="what twofour.masks.state_dict returned: a dict of names and their masks",
            remedy="twofour.masks.derive(model, pattern) finds masks in a model's zeros",
        )
    weights = walk(model, eligibility="any", tied="*").by_name
    plan: list[tuple[PrunableWeight, Tensor, Pattern | str]] = []
    for name, saved in state.items():
        if name not in weights:
            raise MaskError(
                "the checkpoint holds a mask for a weight the model lacks",
                got=f"`{name}`",
                wanted="the masks of this model",
                remedy=nearest(str(name), weights) or "build the model that the masks were saved from",
                layer=str(name),
            )
        plan.append(_restore(weights[name], saved))
    names = {prunable.name for prunable, _, _ in plan}
    if extra := [name for name in of(model) if name not in weights or weights[name].name not in names]:
        raise MaskError(
            "the model has masks that the checkpoint lacks",
            got=", ".join(extra),
            wanted="a model whose masks are all in the checkpoint, or without masks",
            remedy="call twofour.masks.detach(model) first",
        )
    attach_all(plan)
    return of(model)


def _is_mapping(state: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(state, Mapping)


def derive(
    model: nn.Module,
    pattern: str | Pattern | PatternChoice,
    *,
    skip: str | Sequence[str] = (),
    eligibility: str = "asp",
) -> dict[str, Mask]:
    """Attach masks to a model whose weights already are sparse, as loaded from a plain checkpoint.

    The non-zero values are kept. Where a group has fewer than the pattern allows, zeros fill the mask up, the lowest
    index first (the tie rule of the projection on |w|). All or nothing.

    Args:
        model: Model with sparse weights.
        pattern: One pattern for all eligible weights, or a recipe, whose own eligibility then counts.
        skip: Globs of layers that are dense, beside those of the recipe.
        eligibility: As in `layers.walk`.

    Raises:
        MaskError: A weight breaks the pattern; one reason for each, with its first offending group.
        PatternError: A weight holds NaN or infinity.
    """
    plan: list[tuple[PrunableWeight, Tensor, Pattern | str]] = []
    reasons: list[str] = []
    for prunable, chosen in _candidates(model, pattern, parse_globs(skip), eligibility):
        try:
            plan.append((prunable, _derive_one(prunable, chosen), chosen))
        except PatternError as error:
            raise error.for_layer(prunable.name) from None
        except MaskError as error:
            reasons.append(error.what)
    if reasons:
        raise MaskError(
            "no masks can be derived: weights are not sparse in the pattern",
            got=f"{len(reasons)} weights that break it",
            reasons=reasons,
            wanted="weights whose reduction axis obeys the pattern already",
            remedy="leave dense layers out with skip=..., or make them sparse with twofour.prune",
        )
    if not plan:
        raise MaskError(
            "no masks can be derived: no weight of the model is eligible",
            got=f"eligibility={eligibility!r}, skip={skip!r}",
            wanted="at least one weight that the pattern's groups divide",
            remedy='eligibility="any" lifts ASP\'s rule of 8 x 16 multiples',
        )
    attach_all(plan)
    return of(model)


def _candidates(
    model: nn.Module, pattern: str | Pattern | PatternChoice, skip: tuple[str, ...], eligibility: str
) -> Iterator[tuple[PrunableWeight, Pattern]]:
    if isinstance(pattern, PatternChoice):
        skip, eligibility, tied = (*skip, *pattern.skip), pattern.eligibility, pattern.tied
    else:
        pattern, tied = parse(pattern), ()
    for prunable in walk(model, skip=skip, eligibility=eligibility, tied=tied).weights:
        chosen = pattern if isinstance(pattern, Pattern) else pattern.pattern_for(*prunable.layers)
        if chosen is not None and prunable.reduction % chosen.group == 0:
            yield prunable, prunable.lay(chosen)


def _derive_one(prunable: PrunableWeight, pattern: Pattern) -> Tensor:
    weight = prunable.reduction_last(full_tensor(prunable.parameter.detach()))
    found = pattern.check(weight)
    if not found.ok:
        raise MaskError(
            f"`{prunable.name}` is not {pattern.name}: group at {found.first} holds {found.values}",
            got=found.sentence,
            wanted=f"{pattern.name} along the reduction axis",
            remedy="twofour.prune makes it so",
        )
    return prunable.from_reduction_last(pattern.project(weight, absolute=True))


def _restore(prunable: PrunableWeight, saved: object) -> tuple[PrunableWeight, Tensor, Pattern]:
    if not _is_mapping(saved):
        raise MaskError(
            "the saved mask is malformed",
            got=f"a {type(saved).__name__} in place of a mask",
            wanted="an entry of twofour.masks.state_dict: the model's own state dict holds weights, not masks",
            remedy="twofour.masks.derive(model, pattern) finds masks in weights that are sparse already",
            layer=prunable.name,
        )
    try:
        pattern, shape, bits = parse(saved["pattern"]), tuple(saved["shape"]), saved["bits"]
        keep = _from_bits(bits, shape)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise MaskError(
            "the saved mask is malformed",
            got=error.what if isinstance(error, PatternError) else str(error),
            wanted="an entry of twofour.masks.state_dict",
            remedy="twofour.masks.derive finds masks in weights that are sparse already",
            layer=prunable.name,
        ) from error
    return prunable, keep if is_distributed(keep) else keep.to(prunable.parameter.device), pattern


def _to_bits(keep: Tensor) -> Tensor:
    if not is_distributed(keep):
        return _packed(keep)
    from torch.distributed.tensor import Shard

    mask: Any = keep
    rows = [Shard(0) if placement.is_shard() else placement for placement in mask.placements]
    by_rows = mask.redistribute(mask.device_mesh, rows)
    width = -(-mask[:1].numel() // 8)
    bits, shape = _packed(by_rows.to_local()), (len(mask), width)
    return mask.from_local(bits, mask.device_mesh, rows, run_check=False, shape=shape, stride=(width, 1))


def _packed(keep: Tensor) -> Tensor:
    rows = keep.reshape(len(keep), -1).to("cpu", torch.uint8)
    padded = torch.unflatten(torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8)), 1, (-1, 8))
    return (padded << torch.arange(8, dtype=torch.uint8, device="cpu")).sum(-1, dtype=torch.uint8)


def _from_bits(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    width = torch.Size(shape[1:]).numel()
    if bits.dtype != torch.uint8 or tuple(bits.shape) != (shape[0], -(-width // 8)):
        raise ValueError(f"bits {tuple(bits.shape)} of {bits.dtype} for the shape {shape}")
    part = local(bits)
    values = (part.unsqueeze(-1).cpu() >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1
    keep = values.flatten(1)[:, :width].bool().reshape(len(part), *shape[1:])
    if not is_distributed(bits):
        return keep
    sharded: Any = bits
    stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
    return sharded.from_local(
        keep.to(part.device), sharded.device_mesh, sharded.placements, run_check=False, shape=shape, stride=stride
    )
