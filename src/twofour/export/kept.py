"""What leaves as sparse is sparse: weights that do not keep their masks' patterns are refused."""

from __future__ import annotations

from torch import Tensor, nn

from twofour import masks
from twofour.errors import ExportError
from twofour.layers import full_tensor
from twofour.patterns import Pattern


def require_kept(model: nn.Module) -> None:
    """Refuse a model of which a weight does not keep its mask's pattern.

    Raises:
        ExportError: One does not.
        MaskError: A masked module has lost its weight.
    """
    for name, mask in masks.of(model).items():
        require_obeys(name, "the weight", mask.pattern, mask.axis.last(dense(mask)))


def require_obeys(name: str, what: str, pattern: Pattern, values: Tensor) -> None:
    """Refuse values of which a group, along the last axis, breaks the pattern.

    Raises:
        ExportError: One does.
    """
    result = pattern.check(values)
    if not result.ok:
        raise ExportError(
            f"{what} is not {pattern.name}",
            got=result.sentence,
            wanted="the zeros of the masked model",
            remedy="twofour.masks.enforce(model) applies the masks again; else please report it",
            layer=name,
        )


def dense(mask: masks.Mask) -> Tensor:
    """Return a masked weight whole and on the CPU."""
    return full_tensor(mask.parameter.detach()).cpu().contiguous()
