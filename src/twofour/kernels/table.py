"""The only list of kernels: dispatch, tests, benchmarks, `twofour kernels` and docs/kernels.md all read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Kernel, R, Row
from twofour.kernels.bits_matmul import BitsMatmul, bits_rows
from twofour.kernels.bits_matmul.conv import bits_conv_rows
from twofour.kernels.bits_matmul.cuda import BIT_PLANES
from twofour.kernels.block_matmul import block_rows, pointwise_block_rows
from twofour.kernels.conv import ConvKernel
from twofour.kernels.dense_conv import ONEDNN_CONV, PLAIN_CONV, direct_rows, winograd_rows
from twofour.kernels.dense_matmul import MKL, ONEDNN, ONEDNN_BF16, ONEDNN_INT8, PLAIN, PLAIN_BF16, native_dense_rows
from twofour.kernels.dense_matmul.cuda import CUDA_DENSE
from twofour.kernels.dense_matmul.cuda_int4 import TINY_INT4
from twofour.kernels.depthwise_conv import depthwise_rows
from twofour.kernels.nm_conv import CONV_REFERENCE, hybrid_conv_rows, native_conv_rows, pointwise_rows
from twofour.kernels.nm_conv_gradient import conv_gradient_rows
from twofour.kernels.nm_matmul import REFERENCE, native_rows
from twofour.kernels.nm_matmul.cuda import CUSPARSELT, CUTLASS, FEW_TOKENS
from twofour.kernels.nm_matmul.hybrid import hybrid_rows
from twofour.kernels.window_conv import window_conv_rows
from twofour.native import gpu

_ADDED: list[Kernel] = []


@cache
def rows() -> tuple[Kernel, ...]:
    """Return every kernel of a product there is, whether or not it can run here."""
    torchs = (REFERENCE, ONEDNN, *MKL, PLAIN, ONEDNN_BF16, PLAIN_BF16, ONEDNN_INT8)
    on_gpu = (*CUSPARSELT, *CUTLASS, *FEW_TOKENS, *CUDA_DENSE, TINY_INT4, BIT_PLANES)
    packed = (*native_rows(), *hybrid_rows(), *block_rows(), *bits_rows())
    return (*packed, *torchs, *native_dense_rows(), *on_gpu, *_ADDED)


def add(kernel: Kernel) -> Kernel:
    """Add a kernel of another package to the table, and return it; `compile` measures it beside the others.

    Raises:
        KernelError: A kernel of that name is there.
    """
    if kernel.name in _by_name():
        raise KernelError(
            "a kernel of this name is in the table",
            got=kernel.name,
            wanted="a name of its own",
            remedy="name it <operation>_<pattern>_<dtype>_<design>__<hardware>, the package's name in <design>",
        )
    _ADDED.append(kernel)
    rows.cache_clear()
    _by_name.cache_clear()
    return kernel


@cache
def convolutions() -> tuple[ConvKernel, ...]:
    """Return every kernel of a convolution there is, whether or not it can run here."""
    dense = (ONEDNN_CONV, PLAIN_CONV, *direct_rows(), *depthwise_rows(), *winograd_rows())
    return (
        *native_conv_rows(),
        *hybrid_conv_rows(),
        *pointwise_rows(),
        CONV_REFERENCE,
        *pointwise_block_rows(),
        *dense,
        *window_conv_rows(),
    )


@dataclass(frozen=True)
class Listed:
    """What is said of any kernel, also of those that make masks and packed weights and are no rows of a product.

    Attributes:
        name: As `Kernel.name`.
        operation: As `NativeRow.operation` or `Kernel.operation`.
        pattern: Pattern of the weights, "any" for every N:M, "dense" for none.
        dtype: Computing type.
        device: "cpu" or "cuda".
        isa: Instruction-set level it needs, "any" when torch chooses; of the GPU its least architecture.
        reason: Why it cannot run here and now, or None when it can.
        measured: Whether its speed was measured on some machine, or only its results checked.
    """

    name: str
    operation: str
    pattern: str
    dtype: str
    device: str
    isa: str
    reason: str | None
    measured: bool = True


GPU_STEPS = (
    ("nm_mask_2x4__triton", "nm_mask"),
    ("nm_tiles_2x4__triton", "nm_tiles"),
    ("nm_compress_2x4__triton", "nm_compress"),
)
"""Kernels on the GPU that make 2:4 masks and packed weights, and their operation."""


def listing() -> tuple[Listed, ...]:
    """Return every kernel in the order of the pipeline: checks, masks, packing, products, convolutions, the rest."""
    listed = [
        Listed(row.name, operation, row.pattern, row.dtype, "cpu", row.isa, native.unavailable(row.isa))
        for operation, table in native.tables().items()
        for row in table
    ]
    reason = gpu.unavailable(triton=True)
    listed += [Listed(name, operation, "2:4", "float32", "cuda", "sm_80", reason) for name, operation in GPU_STEPS]
    native_names = {one.name for one in listed}
    listed += [
        Listed(k.name, k.operation, k.pattern, k.dtype, k.device, k.isa, k.unavailable())
        for k in (*rows(), *convolutions())
        if k.name not in native_names
    ]
    unmeasured = {one.name for one in native.instruction_sets().values() if not one.measured}
    listed = [replace(one, measured=one.device == "cpu" and one.isa not in unmeasured) for one in listed]
    order = [*native.tables(), *(one.operation for one in listed)]
    return tuple(sorted(listed, key=lambda one: order.index(one.operation)))


@cache
def _by_name() -> dict[str, Row]:
    return {row.name: row for row in (*rows(), *convolutions(), *bits_conv_rows(), *conv_gradient_rows())}


def find(name: str, kind: type[R] = Kernel) -> R:
    """Return the row of a kind that is called `name`: `Kernel`, `ConvKernel`, or `Row` for either.

    Raises:
        KernelError: There is none of that kind and name.
    """
    found = _by_name().get(name)
    if not isinstance(found, kind):
        of = " of a convolution" if kind is ConvKernel else ""
        raise KernelError(
            f"there is no such kernel{of}",
            got=repr(name),
            wanted=f"one of {', '.join(row.name for row in _by_name().values() if isinstance(row, kind))}",
            remedy="`twofour kernels` lists them with what each needs",
        )
    return found


def _reduced(row: Row, protocol: Any) -> Any:
    """Let a row of the table be pickled by its name: what it holds besides, such as its index, is of this build."""
    if _by_name().get(row.name) == row:
        return find, (row.name, Row)
    return object.__reduce_ex__(row, protocol)


Row.__reduce_ex__ = _reduced  # here, as the rows' base does not know the table


def sparse_products(device: str = "cpu") -> tuple[Kernel, ...]:
    """Return the kernels of products with a packed weight of a device, whether or not they can run here.

    The reference, which is dense, is not among them, nor are the rows of codes, which take a `BitWeight`.
    """
    found = (kernel for kernel in rows() if kernel.sparse and not isinstance(kernel, BitsMatmul))
    return tuple(kernel for kernel in found if kernel.device == device and kernel is not REFERENCE)


def available(operation: str, device: str = "cpu") -> tuple[Kernel, ...]:
    """Return the kernels of `operation` that can run here and now, in the table's order, without the reference."""
    return tuple(
        kernel
        for kernel in rows()
        if kernel.operation == operation
        and kernel.device == device
        and kernel is not REFERENCE
        and kernel.unavailable() is None
    )
