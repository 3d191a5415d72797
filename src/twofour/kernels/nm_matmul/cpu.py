"""Native 2:4 matmul on the CPU: rows of nm_matmul.inc, their layouts and the call through raw pointers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Kernel
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.kernels.nm_matmul.layout import to_layout
from twofour.packing import HEADER_BYTES, Packed

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""dtype of activations -> `Type` in nm_matmul.h."""

READS = {
    "float32": (torch.float32,),
    "bfloat16": (torch.float32, torch.bfloat16),
    "int4": (torch.float32, torch.bfloat16),
}
"""Computing type -> the dtypes of x its rows read."""


@dataclass(frozen=True)
class NativeMatmul(Kernel):
    """One row of nm_matmul.inc: y = x @ W.T + bias with W 2:4.

    `tokens_min` and `tokens_max` bound where the row can win; it is correct for every token count.
    Pruned positions are skipped: an infinity or NaN in `x` at such a position does not reach the output.
    """

    index: int
    tokens_min: int
    tokens_max: int

    def prepare(self, weight: Packed | Tensor) -> Tensor:
        """Return `weight` in this row's layout behind a 64-byte header: uint8."""
        assert isinstance(weight, Packed), type(weight)
        return to_layout(weight, self.layout)

    def layout_bytes(self, out_features: int, in_features: int, group: int = 0, zeros: bool = False) -> int:
        """Return the bytes of a weight of this size in this row's layout, without the header."""
        return native.extension().layout_bytes(self.layout, out_features, in_features, group, zeros)

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of header and layout."""
        return HEADER_BYTES + self.layout_bytes(out_features, in_features)

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
        epilogue: Epilogue = PLAIN_EPILOGUE,
        other: Tensor | None = None,
    ) -> Tensor:
        """Multiply; see `Kernel.run`. x may have any row stride.

        Raises:
            KernelError: `x` is of another dtype or not on the CPU, `other` does not fit, or the bytes were made for
                another kernel or another shape.
        """
        if x.dtype not in READS[self.dtype] or not x.is_cpu:  # an address says nothing of what stands there
            raise _unreadable(self, x)
        tokens, in_features = x.shape
        if not epilogue.plain:
            other = _second_operand(epilogue, other, x, out_features)
        y = torch.empty(tokens, out_features, dtype=x.dtype)
        if x.stride(1) != 1 and in_features > 1:
            x = x.contiguous()
        kind = TYPES[x.dtype]
        ok = native.extension().nm_matmul(
            self.index,
            x.data_ptr(),
            kind,
            x.stride(0),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            kind,
            tokens,
            out_features,
            in_features,
            *epilogue.codes,
            0 if other is None else other.data_ptr(),
            0 if other is None else other.stride(0),
            *_NO_QUANTIZATION,
            native.threads(),
        )
        if not ok:
            raise _foreign(self, weight, out_features, in_features)
        return y


_NO_QUANTIZATION = (False, 1.0, 0, 1.0, 0)


def native_rows() -> list[NativeMatmul]:
    """Return the rows of nm_matmul.inc in their order there."""
    return [
        NativeMatmul(name, "nm_matmul", "2:4", dtype, "cpu", isa, layout, index, least, most)
        for index, (name, isa, dtype, layout, least, most) in enumerate(native.extension().nm_matmul_rows())
    ]


def _second_operand(epilogue: Epilogue, other: Tensor | None, x: Tensor, out_features: int) -> Tensor | None:
    """Return `other` as the kernel reads it: rows of contiguous numbers of x's dtype, any distance apart."""
    epilogue.require(other, (x.size(0), out_features))
    if other is None:
        return None
    if other.dtype != x.dtype or not other.is_cpu:
        raise KernelError(
            "the second operand of an epilogue does not fit",
            got=f"other of {other.dtype} on {other.device}",
            wanted=f"{x.dtype} on the CPU",
        )
    return other if other.stride(1) == 1 or out_features == 1 else other.contiguous()


def _unreadable(kernel: NativeMatmul, x: Tensor) -> KernelError:
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in READS[kernel.dtype])
    return KernelError(
        f"{kernel.name} cannot read its input", got=f"x of {x.dtype} on {x.device}", wanted=f"{wanted} on the CPU"
    )


def _foreign(kernel: NativeMatmul, weight: Tensor, out_features: int, in_features: int) -> KernelError:
    head = bytes(weight[:HEADER_BYTES].tolist())
    return KernelError(
        f"{kernel.name} was given bytes made for another kernel",
        got=f"a buffer that starts with {head[:48]!r}",
        wanted=f"layout {kernel.layout!r} of a 2:4 {kernel.dtype} weight ({out_features}, {in_features})",
        remedy="prepare the weight with kernel.prepare(packed)",
    )
