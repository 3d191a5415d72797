"""What leaves as sparse is sparse: weights that do not keep their masks' patterns are refused."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor, nn

from twofour import masks
from twofour.errors import ExportError
from twofour.layers import full_tensor
from twofour.patterns import Pattern

logger = logging.getLogger("twofour.export")


def require_kept(model: nn.Module) -> None:
    """Refuse a model of which a weight does not keep its mask's pattern.

    Raises:
        ExportError: One does not.
        MaskError: A masked module has lost its weight.
    """
    for name, mask in masks.of(model).items():
        require_obeys(name, "the weight", mask.pattern, mask.axis.last(dense(mask)))


def warn_dense(path: Path) -> None:
    """Say that a file is written of a model without masks."""
    logger.warning(
        '%s: the model has no masks, so nothing in the file is promised to be sparse; twofour.prune(model, "2:4") '
        "makes it sparse, twofour.masks.derive(model, pattern) finds masks in zeros that are there",
        path,
    )


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
