"""The outputs of a model before and after its channels moved: they may differ by rounding alone.

Sums in another order differ, the more so the deeper the model and the longer its sums. Where outputs in the model's own
dtype differ by more than a shallow model's would, a copy is run in float64, in which rounding is 1e-9 of what it was
and a channel in the wrong place is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from twofour import calls
from twofour.errors import PermutationError
from twofour.measure.distance import largest_difference

_log = logging.getLogger("twofour.structure.permutation")

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of an output, relative to its largest value, that is not looked at more closely."""

EXACT = 1e-6
"""The same for a model run in float64: 1e-13 is usual; where an operator of its own rounds to float32 it is more."""

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Arithmetic:
    """How much a model rounds: its weights under a pattern, and the longest sum among them."""

    weights: int
    longest: int

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return the largest relative difference by rounding: four times that of independent errors in every sum."""
        least = TOLERANCES.get(dtype, 0.0)
        if dtype != torch.float32:  # the others are wide enough as they are
            return least
        return max(least, 4 * torch.finfo(dtype).eps * (self.weights * self.longest) ** 0.5)


def outputs(model: nn.Module, given: Mapping[str, Any]) -> list[Tensor]:
    """Run the model in evaluation mode and return the tensors that it answers with."""
    with torch.no_grad(), calls.evaluating(model):
        answer = model(**calls.fresh(given))
    found = [leaf.clone() for leaf in calls.output_leaves(answer) if isinstance(leaf, Tensor)]
    if not found:
        raise PermutationError(
            "the outputs cannot be compared",
            got=f"a {type(answer).__name__} without tensors",
            wanted="tensors",
            remedy="prune without permute=True, or wrap the model so that its forward returns tensors",
        )
    return found


class _Widened(TorchFunctionMode):
    """Computes in float64 where a forward asks for a narrower type, as normalisations do that round on purpose."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func in (Tensor.float, Tensor.half, Tensor.bfloat16) else func
        args, kwargs = tree_map(_wide, (args, kwargs or {}))
        return func(*args, **kwargs)


def _wide(leaf: Any) -> Any:
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf in _NARROW else leaf


def outputs_in_float64(model: nn.Module, given: Mapping[str, Any]) -> list[Tensor]:
    """Return the outputs of a model that is in float64, with everything inside it in float64 as well."""
    wide = tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, given
    )
    with _Widened():
        return outputs(model, wide)


def require_same(
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    arithmetic: Arithmetic,
    exactly: Callable[[], tuple[list[Tensor], list[Tensor]]],
) -> float:
    """Return the largest difference, in the outputs' own dtypes.

    Args:
        before: The outputs as they were; each is held to the tolerance of its own dtype.
        after: The outputs now.
        arithmetic: What bounds the rounding where a copy in float64 cannot be run.
        exactly: Returns the same of a copy in float64; called where a difference is not obviously rounding.

    Raises:
        PermutationError: They differ by more than rounding, or hold no finite value, which shows nothing.
    """
    if not any(old.isfinite().any() for old in before):
        raise PermutationError(
            "the example does not show whether permuting keeps what the model computes; everything was put back",
            got=f"outputs of shape {', '.join(str(tuple(old.shape)) for old in before[:4])} without a finite value",
            wanted="an example on which the model computes numbers",
            remedy="give real samples; if these are, look for NaN or infinity in the weights",
        )
    pairs = list(zip(before, after, strict=True))
    if all(largest_difference([new], [old]) <= TOLERANCES.get(old.dtype, 0.0) for old, new in pairs):
        return largest_difference(after, before)
    try:
        was, now = exactly()
        judged, allowed = largest_difference(now, was), EXACT
        if judged > allowed:
            raise _changed(judged, f"at most {allowed:g}, computed in float64")
    except PermutationError:
        raise
    except Exception as error:  # a forward of anybody's, in a dtype that it was not written for
        _log.info("the outputs are compared in their own dtypes, since float64 cannot be: %s", error)
        for old, new in pairs:
            judged, allowed = largest_difference([new], [old]), arithmetic.tolerance(old.dtype)
            if judged > allowed:
                raise _changed(judged, f"at most {allowed:.2g}") from None
    return largest_difference(after, before)


def _changed(error: float, wanted: str) -> PermutationError:
    return PermutationError(
        "permuting the channels changed what the model computes; everything was put back",
        got=f"an output that differs by {error:.2e} of its largest value",
        wanted=wanted,
        remedy="prune without permute=True, and report the model: its channels were traced wrongly",
    )
