"""Fused blocks in torch, a step at a time: what the native kernels are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from twofour.kernels.fused_block.expression import Expression, Value
from twofour.shapes import Float, Shaped

OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: functional.silu(x),
    "gelu": lambda x: functional.gelu(x),
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "rounded": lambda x: x.bfloat16().to(x.dtype),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "prod": lambda x: x.prod(-1, keepdim=True),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "amin": lambda x: x.amin(-1, keepdim=True),
    "over_width": lambda x: x,  # divided where the width is known
}
OF_TWO: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "rsub": lambda a, b: b - a,
    "rdiv": lambda a, b: b / a,
    "maximum": lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device)),
    "minimum": lambda a, b: torch.minimum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device)),
}
OF_THREE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "where": lambda c, a, b: torch.where(c != 0, a, b),
    "fma": lambda a, b, c: a * b + c,
}
STEPS: dict[str, Callable[..., Tensor]] = {**OF_ONE, **OF_TWO, **OF_THREE}
"""Steps that are no function of torch of the same name."""


def fused_block_reference(
    expression: Expression, inputs: Sequence[Shaped[Tensor, " ..."]], dtype: torch.dtype = torch.float32
) -> list[Float[Tensor, " ..."]]:
    """Return what an expression stores, computed in `dtype`.

    Args:
        expression: Of the block.
        inputs: As `fused_block` takes them.
        dtype: Of all arithmetic and of the answers.
    """
    given = dict(enumerate(inputs))
    for table, rows in expression.gathers:
        given[table] = inputs[table][given.pop(rows).squeeze(-1)]
    typed = [tensor.to(dtype) for tensor in given.values()]
    spread: list[Tensor] = list(torch.broadcast_tensors(*typed))  # pyright: ignore
    wide = dict(zip(given, spread, strict=True))
    known: dict[Value, Tensor] = {}

    def of(value: Value | float) -> Tensor | float:
        if not isinstance(value, Value):
            return value
        if value not in known:
            known[value] = compute(value).to(dtype)
        return known[value]

    def compute(value: Value) -> Tensor:
        if value.step == "load":
            return wide[int(value.operands[0])][..., :1] if value.of_row else wide[int(value.operands[0])]
        if value.step == "fill":
            return torch.full_like(wide[0][..., :1] if value.of_row else wide[0], float(value.operands[0]))
        step: Callable[..., Tensor] = STEPS.get(value.step) or getattr(torch, value.step)
        made: Tensor = step(*map(of, value.operands))
        return made / wide[0].shape[-1] if value.step == "over_width" else made

    for value in expression.stores:
        of(value)
    return [known[value] for value in expression.stores]
