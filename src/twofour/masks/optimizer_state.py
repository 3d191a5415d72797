"""Which optimiser state is zero at pruned places without a look: filled there before, and only stepped since.

Adam keeps two float32 values beside each of a parameter. Filling both moves 18 bytes, its fused step itself 28.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor, optim
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from twofour.layers import is_distributed
from twofour.layers.modules import table

KEEPING = (optim.SGD, optim.Adam, optim.AdamW)
"""Optimisers whose step leaves state at zero where state, parameter and gradient are zero, whatever their options.

Not their subclasses, which may do anything. Of torch's others Adamax and Rprop keep eps and the least step size there,
Adadelta and RMSprop divide 0 by 0 when eps is 0, Adafactor, Muon and LBFGS mix places.
"""

_filled: MutableMapping[Tensor, tuple[TensorWeakRef, tuple[int, ...]]] = WeakTensorKeyDictionary()
"""State -> the mask at whose pruned places it was zero, and what shows that somebody wrote to it since."""


def note(state: Tensor, parameter: Tensor, keep: Tensor) -> None:
    """Remember that `state` and `parameter` are zero now wherever `keep` is False."""
    # What the parts of a sharded tensor go through the whole's version does not tell; inference tensors have none.
    if not any(is_distributed(tensor) or tensor.is_inference() for tensor in (state, parameter, keep)):
        _filled[state] = (TensorWeakRef(keep), _marks(state, parameter, keep))


def known(state: Tensor, keep: Tensor) -> bool:
    """Whether `state` is zero wherever `keep` is False; asked right after `review` and a step."""
    return state in _filled and _filled[state][0]() is keep


def review(optimizer: Optimizer, state: Tensor, parameter: Tensor, keep: Tensor, *, closure: bool) -> None:
    """Forget `state`, right before a step, unless the step is sure to leave it zero at pruned places.

    Args:
        optimizer: What is about to step.
        state: A tensor it keeps for `parameter`.
        parameter: A masked parameter.
        keep: Its mask.
        closure: Whether the step calls a closure, which may write anywhere.
    """
    # Hooks of the optimiser's own run between ours and may write as well.
    hooks = table(optimizer, "_optimizer_step_pre_hooks") or table(optimizer, "_optimizer_step_post_hooks")
    trusted = type(optimizer) in KEEPING and not closure and not hooks and known(state, keep)
    if not (trusted and _filled[state][1] == _marks(state, parameter, keep)):
        _filled.pop(state, None)


def _marks(state: Tensor, parameter: Tensor, keep: Tensor) -> tuple[int, ...]:
    tensors = (state, parameter, keep)
    return id(parameter), *(tensor._version for tensor in tensors), *(tensor.data_ptr() for tensor in tensors)
