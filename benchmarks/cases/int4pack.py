"""torch's own product with weights of 4 bits in groups on the CPU, `_weight_int4pack_mm_for_cpu`: a peer of our rows.

It is what torchao's `Int4WeightOnlyConfig` runs on x86. Of the other widths torchao's kernels are aarch64's alone; on
x86 its tensors become floats before each product (torchao 0.18).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twofour.errors import MeasureError
from twofour.kernels.bits_matmul import BitWeight, twos

NAME, SHORT = "torch int4pack", "torch int4"
GROUPS = (32, 64, 128, 256)
"""Inputs that share a scale, as the operator takes them."""
DTYPES = (torch.float32, torch.bfloat16)
"""Of the inputs; scales are of the same."""
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""How far its answer may lie from the real product, as a share of it."""


def calls(weight: BitWeight, x: Tensor, *, rounded: bool, copies: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a dtype and the product in it with a copy of a weight, checked; nothing for weights that are no such.

    Args:
        weight: Two's complement of 4 bits with groups, without zero points.
        x: float32 (tokens, in); it is handed over in the dtype.
        rounded: Whether it might round inputs: it does not.
        copies: Of the weight.

    Raises:
        MeasureError: Its answer is another.
    """
    if weight.levels != twos(4) or weight.group not in GROUPS or weight.shifted or weight.shape[0] % 64:
        return
    want = x.double() @ weight.real().double().T
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
    for dtype in DTYPES:
        # a code less 8, times the scale, and a shift: (groups, out, 2)
        scales = torch.stack([weight.scales.T, torch.zeros_like(weight.scales.T)], -1).contiguous().to(dtype)
        given = x.to(dtype)
        for index in range(copies):
            held = packed.clone() if index else packed
            run = partial(torch.ops.aten._weight_int4pack_mm_for_cpu, given, held, weight.group, scales)
            if index == 0 and (run().double() - want).norm() > NEAR[dtype] * want.norm():
                raise MeasureError(f"{NAME} is wrong and is not timed", got=f"{dtype}, groups of {weight.group}")
            yield str(dtype).removeprefix("torch."), run
