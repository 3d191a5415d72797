"""What products of libraries are handed: they go by addresses, and some read as if nothing lay apart.

Native rows of ours look at their operands in C++ (`native/operand.h`). oneDNN reads a bias as if its numbers stood in a
row, and both it and torch's copies read at the null address of a tensor whose storage was freed.
"""

from __future__ import annotations

from torch import Tensor

from twofour.errors import KernelError
from twofour.native.surroundings import memoryless


def require_memory(x: Tensor) -> None:
    """Refuse a tensor whose numbers stand nowhere: freed storage, a fake or zero tensor. It takes some 100 ns.

    Raises:
        KernelError: There is no memory behind it.
    """
    if (odd := memoryless(x)) is not None:
        raise KernelError(
            "a product cannot read its input",
            got=f"{odd[0]}: {x.dtype} {tuple(x.shape)}",
            wanted="a plain tensor with its values",
            remedy="call the layer with the tensor itself, before its storage is freed",
        )


def together(x: Tensor) -> Tensor:
    """Return a matrix whose rows each stand together in memory, any distance apart: itself, or a copy.

    Raises:
        KernelError: It would have to be copied, and there is no memory behind it.
    """
    if x.stride(1) == 1 or x.size(1) == 1:
        return x
    require_memory(x)  # torch's copy reads at the null address
    return x.contiguous()


def plain_bias(bias: Tensor | None, rows: int) -> Tensor | None:
    """Return a bias as libraries read it: itself where its numbers stand in a row, else a copy of them.

    Args:
        bias: (rows,) of any strides, or None.
        rows: Rows of the weight.

    Raises:
        KernelError: It is of another shape, or without memory.
    """
    if bias is None:
        return None
    if bias.ndim != 1 or bias.size(0) != rows:
        raise KernelError(
            "the bias of a product does not fit",
            got=f"a bias {tuple(bias.shape)}",
            wanted=f"({rows},)",
            remedy="give the layer the bias of the model it was compiled from",
        )
    require_memory(bias)
    return bias if bias.is_contiguous() else bias.contiguous()
