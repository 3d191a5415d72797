"""What a compiled layer of low bits runs on: its codes, which take the place of its float weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from twofour import masks, quantization
from twofour.capture import outside_tracing
from twofour.compiler.unpacked import Reads, WeightedLayer
from twofour.kernels.bits_matmul import BitWeight
from twofour.quantization import LowBits
from twofour.quantization.carried import over
from twofour.quantization.layer import LowBitConv2d, LowBitLinear, add_steps
from twofour.quantization.stamps import Stamp, has_changed, stamp_of
from twofour.quantization.stored import SCALES, steps_of_codes


class Product(Protocol):
    """A product or convolution with a prepared weight of codes.

    Attributes:
        traced: Whether a trace can hold it.
    """

    traced: bool

    @property
    def dispatch_text(self) -> str:
        """Its kernels, by name."""
        ...

    def takes(self, x: Tensor) -> bool:
        """Tell whether kernels read such an input."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the answer."""
        ...

    def anew(self, module: nn.Module) -> Any:
        """Return the same for what the layer holds now."""
        ...

    def restored(self) -> BitWeight:
        """Return the weight (out, inputs)."""
        ...


@dataclass
class Codes:
    """What a layer of low bits runs on, prepared anew where something changes that it was made from.

    Attributes:
        product: What is run, no submodule of the layer.
        stamp: What it was prepared from. What is written through `.data` or numpy, or to tensors made in
            inference mode, leaves no trace and is not seen; nor is, while the model is traced, what was written since
            its last call: call it once before.
    """

    product: Any
    stamp: Stamp

    @classmethod
    def of(cls, module: nn.Module, make: Callable[[], Any]) -> Codes:
        """Return what a layer runs on: what is written while it is made is seen at the next call."""
        stamp = stamp_of(module)
        return cls(make(), stamp)

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return the answer, None for inputs that floats serve: another dtype or device, or a gradient asked for."""
        traced = is_compiling() or _is_tracing() or _len_torch_dispatch_stack() > 0
        if (traced and not self.product.traced) or not self.product.takes(x) or not x.is_cpu:
            return None
        if x.requires_grad and torch.is_grad_enabled():
            return None
        return self.product(x) if traced else self.following(module)(x)

    def following(self, module: nn.Module) -> Any:
        """Return the product for what the layer holds by now."""
        if has_changed(self.stamp, module):
            made = Codes.of(module, lambda: self.product.anew(module))
            self.product, self.stamp = made.product, made.stamp
        return self.product

    def weight(self) -> BitWeight:
        """Return the weight (out, inputs) that it multiplies by."""
        return self.product.restored()


class CodedLayer(WeightedLayer):
    """A layer of low bits that has codes in the place of its float weight, its scales and its zero points.

    Its weight can be looked at, and what no kernel takes is computed with it: unpacked at each such call.
    """

    weight_names = "weight", *SCALES

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight in the model that was compiled."""
        return self.__dict__["_shape"]

    def _unpacker(self, *, said: bool = True) -> Callable[[], Tensor]:
        name, reads, shape, dtype = self.name, self.weight_reads, self.weight_shape, self.weight_dtype
        runs = _held(self).runs
        assert runs is not None

        def values() -> Tensor:
            if said:
                reads.add(name)
            with outside_tracing():
                return runs.weight().real().view(shape).to(dtype)

        return values


class CodedLinear(CodedLayer, LowBitLinear):
    """A Linear of codes."""


class CodedConv2d(CodedLayer, LowBitConv2d):
    """A Conv2d of codes."""


def is_coded(module: nn.Module) -> bool:
    """Return whether a layer has codes in the place of its float weight."""
    return isinstance(module, CodedLayer)


def hold_codes(name: str, module: nn.Module, codes: Codes, reads: Reads) -> None:
    """Let codes take the place of a layer's float weight and of its scales; its mask goes, its pattern stays.

    Args:
        name: Of the layer.
        module: A layer of low bits; the weight is no other's.
        codes: What it runs on.
        reads: What was said of the model's weights being read.
    """
    weight, mask = module.get_parameter("weight"), masks.of(module).get("weight")
    masks.detach(module)
    held = {
        "name": name,
        "weight_reads": reads,
        "weight_dtype": weight.dtype,
        "pattern": None if mask is None else mask.pattern,
        "_stand_in": None,
        "_shape": tuple(weight.shape),
    }
    module.__dict__.update(held)
    for part in ("weight", *SCALES):
        module._parameters.pop(part, None)
        module._buffers.pop(part, None)
    module.__class__ = _coded(type(module))
    low = _held(module)
    low.runs, low.sound = codes, ()  # which would keep the float weight in memory, as the stamp would
    codes.stamp = stamp_of(module)


def hold_floats(module: nn.Module, values: Tensor | None = None) -> None:
    """Undo `hold_codes`: the weight is what the codes stand for, or the values that are given."""
    weight, held = module.weight, _held(module)
    assert isinstance(weight, Tensor) and held.runs is not None
    codes, values = held.runs.weight(), weight.clone() if values is None else values
    module.__class__ = type(module).__bases__[-1]
    for part in ("name", "weight_reads", "weight_dtype", "pattern", "_stand_in", "_shape"):
        del module.__dict__[part]
    module.register_parameter("weight", nn.Parameter(values, requires_grad=False))
    add_steps(module, steps_of_codes(held, codes))
    held.runs = None


def codes_of(name: str, module: nn.Module, low: LowBits) -> BitWeight:
    """Return the weight of a layer of low bits in codes (out, inputs)."""
    if (codes := low.codes(module)) is not None:
        return codes
    whole, scales = low.whole_weight(module, name)
    scales = scales.detach().float()
    if (zeros := low.zeros(module, scales)) is not None:
        whole, zeros = whole + over(zeros, whole).to(whole.dtype), zeros.to(torch.int8)
    return BitWeight(low.widths.weights.codes_of(whole.flatten(1)), low.widths.levels, scales, zeros)


def _held(module: nn.Module) -> LowBits:
    held = quantization.held_by(module)
    assert held is not None
    return held


@cache
def _coded(base: type[nn.Module]) -> type[nn.Module]:
    kind = CodedConv2d if issubclass(base, LowBitConv2d) else CodedLinear
    return kind if kind.__bases__[-1] is base else type(f"Coded{base.__name__}", (CodedLayer, base), {})
