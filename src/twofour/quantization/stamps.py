"""What a layer of low bits held at one moment, and whether it holds something else by now."""

from __future__ import annotations

from torch import Tensor, nn

from twofour.quantization.carried import STEPS

_READ = ("weight", "bias", *STEPS)

Stamp = tuple[tuple[Tensor | None, int], ...]
"""Its tensors, and how often each had been written to."""


def stamp_of(module: nn.Module) -> Stamp:
    """Return what a layer of low bits holds now."""
    held = [module._parameters.get(name, module._buffers.get(name)) for name in _READ]
    return tuple((tensor, _version(tensor)) for tensor in held)


def has_changed(stamp: Stamp, module: nn.Module) -> bool:
    """Tell whether a layer holds other tensors than a stamp says, or some were written to; `()` is that of no layer."""
    if not stamp:
        return True
    for name, (tensor, version) in zip(_READ, stamp, strict=True):
        now = module._parameters.get(name, module._buffers.get(name))
        if now is not tensor or _version(now) != version:
            return True
    return False


def _version(tensor: Tensor | None) -> int:
    """Return how often a tensor was written to; inference tensors count none."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
