"""What files hold of a layer of low bits: its whole numbers in planes, the scales they are multiplied by, its steps."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from twofour.errors import TwofourError
from twofour.kernels.bits_matmul import BitWeight
from twofour.layers.modules import named_modules, parameters_of
from twofour.packing import Header, Packed, encodings, has_form, pack, packed_rule
from twofour.packing.encodings import Bits
from twofour.patterns import DENSE, Pattern
from twofour.quantization.carried import INPUT_STEP, INPUT_ZERO, WEIGHT_SCALE, WEIGHT_STEP, WEIGHT_ZERO, LowBits, over

SCALES = (WEIGHT_STEP, WEIGHT_SCALE, WEIGHT_ZERO)
"""What the scales and zero points of a packed weight are in the layer."""


def stored_encoding(held: LowBits) -> Bits:
    """Return how a file writes the whole numbers: ternary ones five in a byte, 1.6 bits a value where planes take 2."""
    encoding = held.widths.weights
    return encodings.TERNARY5 if encoding.levels == "ternary" else encoding


def stored_pattern(held: LowBits, pattern: Pattern | None) -> Pattern:
    """Return the form a file writes the weight in: that of its mask, dense where the encoding has no such form."""
    if pattern is None or held.shifted or not has_form(packed_rule(pattern), stored_encoding(held).name):
        return DENSE  # a zero that is shifted is a whole number like others
    return DENSE if held.group % packed_rule(pattern).group else pattern


def packed_of(name: str, module: nn.Module, held: LowBits, pattern: Pattern | None) -> Packed:
    """Return a layer's weight as a file holds it: codes, and a row of scales and zero points for each output.

    Args:
        name: Of the layer, for messages.
        module: The layer.
        held: Its low bits.
        pattern: What its mask obeys, None without one.

    Raises:
        QuantizationError: A step is zero, NaN or infinite, or a weight is not finite.
        PackingError: The whole numbers break the pattern, or a scale is so large that values overflow.
    """
    whole, scales = held.whole_weight(module, name)
    try:
        axis = 1 if whole.ndim > 1 else -1
        zeros = held.zeros(module, scales)
        codes = whole if zeros is None else whole + over(zeros, whole).to(whole.dtype)
        packed = pack(codes.cpu(), stored_pattern(held, pattern), stored_encoding(held).name, axis=axis)
        rows = {"scales": scales.detach(), **({} if zeros is None else {"zeros": zeros})}
        parts = {part: found.float().cpu().reshape(len(whole), -1).contiguous() for part, found in rows.items()}
        packed = replace(packed, header=replace(packed.header, group=held.group), **parts)
        packed.validate()
        return packed
    except TwofourError as error:
        raise error.for_layer(name) from None


def bytes_in_file(module: nn.Module, held: LowBits, pattern: Pattern | None) -> int:
    """Return the bytes of what `packed_of` makes, from the sizes alone."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    rule = packed_rule(stored_pattern(held, pattern))
    header = Header(rule.name, stored_encoding(held).name, tuple(weight.shape), 1)
    return header.format.nbytes + scale_bytes(held, len(weight), math.prod(weight.shape[1:]))


def scale_bytes(held: LowBits, rows: int, columns: int) -> int:
    """Return the bytes of scales and zero points of a weight."""
    return 4 * rows * (columns // held.group if held.group else 1) * (1 + held.shifted)


def steps_of_codes(held: LowBits, weight: BitWeight) -> dict[str, Tensor]:
    """Return the steps of a layer, by name, that has a weight of codes: float32."""
    rows = 1 if held.per_tensor else None
    zeros = {} if weight.zeros is None else {WEIGHT_ZERO: weight.zeros[:rows].float()}
    return {WEIGHT_STEP if held.learned else WEIGHT_SCALE: weight.scales[:rows].clone(), **zeros}


def shared(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules have: an embedding and a head tied to it."""
    owners: dict[int, set[int]] = {}
    for _, module in named_modules(model):
        for parameter in parameters_of(module).values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    return {key for key, modules in owners.items() if len(modules) > 1}


def empty_steps(module: nn.Module, held: LowBits, *, fixed: bool) -> dict[str, Tensor]:
    """Return the steps of a layer without their values: float32, on the device of its weight.

    Args:
        module: A Linear or Conv2d.
        held: What it is to compute in.
        fixed: Whether it has scales of a file that are not learned, beside levels whose scale is a mean.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    steps: dict[str, Tensor] = {}
    size = (len(weight), weight.shape[1] // held.group) if held.group else (1 if held.per_tensor else len(weight),)
    if held.learned:
        steps[WEIGHT_STEP] = torch.ones(size, dtype=torch.float32, device=weight.device)
    elif fixed:
        steps[WEIGHT_SCALE] = torch.ones(size, dtype=torch.float32, device=weight.device)
    if held.shifted:
        steps[WEIGHT_ZERO] = torch.zeros(size, dtype=torch.float32, device=weight.device)
    if held.static:
        steps |= {
            INPUT_STEP: torch.ones((), dtype=torch.float32, device=weight.device),
            INPUT_ZERO: torch.zeros((), dtype=torch.float32, device=weight.device),
        }
    return steps
