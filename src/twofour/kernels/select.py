"""Choose a kernel once, say which, or raise with the reason of every candidate."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.problem import Problem
from twofour.kernels.table import find, sparse_products
from twofour.native.surroundings import by_operators, plain, unreadable
from twofour.packing import Packed

logger = logging.getLogger("twofour.kernels")

FEW_TOKENS = 16
"""Up to here the first of `LAYOUTS` wins, above it the second; `compile` measures instead."""

LAYOUTS = {"float32": ("rows", "pairs"), "bfloat16": ("bf16_rows", "bf16_panels"), "int4": ("int4_rows", "int4_rows")}
"""dtype of the weight -> layouts for few and for many tokens; other dtypes take the table's first."""

_prepared: WeakKeyDictionary[Packed, dict[str, Prepared]] = WeakKeyDictionary()


def select(packed: Packed, tokens: int) -> Kernel:
    """Return the kernel for a product of `tokens` rows with `packed`, without measuring.

    Raises:
        KernelError: No kernel takes this weight here; one reason per candidate.
    """
    candidates = sparse_products()
    fitting = [kernel for kernel in candidates if kernel.refuses(packed) is None]
    if not fitting:
        raise KernelError(
            f"no kernel multiplies by a {packed.header.pattern} {packed.header.dtype} weight here",
            reasons=[f"{kernel.name}: {kernel.refuses(packed)}" for kernel in candidates],
            remedy='kernel="nm_matmul_any_reference__torch" runs it densely, without any saving',
        )
    layout = LAYOUTS.get(packed.header.dtype, ("", ""))[tokens > FEW_TOKENS]
    # max keeps the first of equals: the table's order decides within an instruction set.
    chosen = max(fitting, key=lambda kernel: (kernel.layout == layout, kernel.level, kernel.serves(tokens)))
    logger.debug("using %s for %d tokens of a %s weight", chosen.name, tokens, packed.header.shape)
    return chosen


def matmul(x: Tensor, packed: Packed, bias: Tensor | None = None, *, kernel: str | None = None) -> Tensor:
    """Return x @ W.T + bias with W packed.

    Args:
        x: (..., in) on the CPU, any strides: float32, or bfloat16 where the weight is that.
        packed: Weight (out, in) in the canonical form; its kernel layout is made once and kept beside it.
        bias: float32 (out,) or None.
        kernel: Name of a row of the kernel table; default: chosen by token count.

    Returns:
        (..., out) in x's dtype.

    Raises:
        KernelError: Shapes, dtypes or devices do not fit, a gradient is asked for, or no kernel takes the weight.
    """
    x, bias = _readable(x, packed, bias)
    flat = x.reshape(-1, x.shape[-1])
    chosen = find(kernel) if kernel else select(packed, len(flat))
    if reason := chosen.refuses(packed):
        raise KernelError(f"{chosen.name} cannot run this product", got=reason, remedy="leave `kernel` out")
    layouts = _prepared.setdefault(packed, {})
    if chosen.layout not in layouts:
        layouts[chosen.layout] = chosen.prepare(packed)
    bias = None if bias is None else bias.detach().contiguous()
    with torch.no_grad():
        y = chosen.run(flat.detach(), layouts[chosen.layout], bias, Problem(packed.header.rows))
    return y.view(*x.shape[:-1], packed.header.rows)


def _readable(x: Tensor, packed: Packed, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the operands as their memory has them, or refuse them."""
    header = packed.header
    if (odd := unreadable(x)) is not None:
        raise _unfit(*odd)
    if by_operators():
        raise _unfit("a call that torch follows operator by operator", "a call outside of tracing and torch's modes")
    if len(header.shape) != 2 or header.axis != 1:
        raise _unfit(f"a packed weight of shape {header.shape}, axis {header.axis}", "a Linear weight (out, in)")
    if x.ndim == 0 or x.shape[-1] != header.reduction:
        raise _unfit(f"x of shape {tuple(x.shape)}", f"(..., {header.reduction})")
    own = [row for row in sparse_products() if row.dtype == header.dtype]
    readable = own[0].reads if own else (torch.float32,)
    for role, tensor, dtypes in (("x", x, readable), ("bias", bias, (torch.float32,))):
        if tensor is not None and (tensor.device.type != "cpu" or tensor.dtype not in dtypes):
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise _unfit(f"{role} of {tensor.dtype} on {tensor.device}", f"{wanted} on the CPU")
    if bias is not None and tuple(bias.shape) != (header.rows,):
        raise _unfit(f"bias of shape {tuple(bias.shape)}", f"({header.rows},)")
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise _unfit("an operand that requires a gradient", "inference: wrap the call in torch.inference_mode()")
    x, bias = plain("a packed product", x, bias)
    return x, bias


def _unfit(got: str, wanted: str) -> KernelError:
    remedy = "convert or reshape the operand: x.to(dtype), x.cpu(), x.reshape(..., in_features)"
    return KernelError("the operands of a packed product do not fit", got=got, wanted=wanted, remedy=remedy)
