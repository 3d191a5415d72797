"""Which optimiser state is zero at pruned places without a look: what was filled there and moved by a step alone since.

Adam keeps two tensors beside a parameter; filling them in every step costs as much memory traffic as the step itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, optim
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from twofour.layers import is_distributed

KEEPING = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
)
"""Optimisers whose step leaves state at zero where state, parameter and gradient are zero: each place moves by itself.

Not their subclasses, which may do anything. Not Adamax and Rprop, which keep eps and the least step size where
gradients are zero; not Adafactor, Muon and LBFGS, which mix places.
"""

_filled: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensor -> (its version, the mask and the mask's version) when it was last zero at every pruned place."""


def note(tensor: Tensor, keep: Tensor) -> None:
    """Remember that `tensor` is zero now wherever `keep` is False."""
    if not is_distributed(tensor):  # what its parts go through, the whole's version does not tell
        _filled[tensor] = (tensor._version, TensorWeakRef(keep), keep._version)


def known(tensor: Tensor) -> bool:
    """Whether `tensor` is zero at pruned places; right after `review` and a step."""
    return tensor in _filled


def review(optimizer: Optimizer, closure: bool, parameter: Tensor, keep: Tensor, state: Iterable[Tensor]) -> None:
    """Forget, right before a step, the state that the step may not leave zero at pruned places.

    Args:
        optimizer: What is about to step.
        closure: Whether it calls a closure, which may write anywhere.
        parameter: A masked parameter.
        keep: Its mask.
        state: Its state in the optimiser.
    """
    trusted = type(optimizer) in KEEPING and not closure and _untouched(parameter, keep)
    for tensor in state:
        if not (trusted and _untouched(tensor, keep)):
            _filled.pop(tensor, None)


def _untouched(tensor: Tensor, keep: Tensor) -> bool:
    if tensor not in _filled:
        return False
    version, mask, of_mask = _filled[tensor]
    return version == tensor._version and mask() is keep and of_mask == keep._version
