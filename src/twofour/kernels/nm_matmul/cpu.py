"""Native 2:4 matmul on the CPU: rows of nm_matmul.inc, their layouts and the call through raw pointers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Kernel
from twofour.packing import HEADER_BYTES, Header, Packed, layout_header, read_layout_header


@dataclass(frozen=True)
class NativeMatmul(Kernel):
    """One row of nm_matmul.inc: y = x @ W.T + bias with W 2:4 in float32.

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

    def layout_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a weight of this size in this row's layout, without the header."""
        return native.extension().layout_bytes(self.layout, out_features, in_features)

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of header and layout."""
        return HEADER_BYTES + self.layout_bytes(out_features, in_features)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """Multiply; see `Kernel.run`. x may have any row stride.

        Raises:
            KernelError: `x` is not float32 on the CPU, or the bytes were made for another kernel or another shape.
        """
        if x.dtype is not torch.float32 or not x.is_cpu:  # an address says nothing of what stands there
            raise KernelError(
                f"{self.name} cannot read its input", got=f"x of {x.dtype} on {x.device}", wanted="float32 on the CPU"
            )
        tokens, in_features = x.shape
        y = torch.empty(tokens, out_features)
        if x.stride(1) != 1 and in_features > 1:
            x = x.contiguous()
        ok = native.extension().nm_matmul(
            self.index,
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            tokens,
            out_features,
            in_features,
            native.threads(),
        )
        if not ok:
            raise _foreign(self, weight, out_features, in_features)
        return y


def native_rows() -> list[NativeMatmul]:
    """Return the rows of nm_matmul.inc in their order there."""
    return [
        NativeMatmul(name, "nm_matmul", "2:4", "float32", "cpu", isa, layout, index, least, most)
        for index, (name, isa, layout, least, most) in enumerate(native.extension().nm_matmul_rows())
    ]


def to_layout(packed: Packed, layout: str) -> Tensor:
    """Write a canonical 2:4 float32 weight in a kernel's own layout.

    Args:
        packed: Canonical weight of shape (out, in); every index is validated first.
        layout: A layout of nm_matmul/README.md: "panels", "pairs" or "rows".

    Returns:
        uint8: 64-byte header, then the layout's bytes.

    Raises:
        PackingError: The packed weight is inconsistent.
    """
    packed.validate()
    header = packed.header
    assert (header.pattern, header.dtype) == ("2:4", "float32"), header
    extension, rows, columns = native.extension(), header.rows, header.reduction
    buffer = torch.empty(HEADER_BYTES + extension.layout_bytes(layout, rows, columns), dtype=torch.uint8)
    extension.advise_huge_pages(buffer.data_ptr(), buffer.nbytes)
    head = layout_header("2:4", "float32", layout, rows, columns)
    buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    values, indices = packed.values.contiguous(), packed.indices.contiguous()
    extension.layout_pack(
        layout, values.data_ptr(), indices.data_ptr(), rows, columns, buffer.data_ptr() + HEADER_BYTES
    )
    return buffer


def from_layout(buffer: Tensor) -> Packed:
    """Read a kernel's own layout back into the canonical form.

    Raises:
        PackingError: The buffer has no header of this version.
    """
    found = read_layout_header(bytes(buffer[:HEADER_BYTES].tolist()))
    rows, columns = found.shape
    values = torch.empty(rows, columns // 2)
    indices = torch.empty(rows, (columns // 4 + 1) // 2, dtype=torch.uint8)
    native.extension().layout_unpack(
        found.layout, buffer.data_ptr() + HEADER_BYTES, rows, columns, values.data_ptr(), indices.data_ptr()
    )
    return Packed(Header(found.pattern, found.dtype, found.shape, 1), values, indices)


def _foreign(kernel: NativeMatmul, weight: Tensor, out_features: int, in_features: int) -> KernelError:
    head = bytes(weight[:HEADER_BYTES].tolist())
    return KernelError(
        f"{kernel.name} was given bytes made for another kernel",
        got=f"a buffer that starts with {head[:48]!r}",
        wanted=f"layout {kernel.layout!r} of a 2:4 float32 weight ({out_features}, {in_features})",
        remedy="prepare the weight with kernel.prepare(packed)",
    )
