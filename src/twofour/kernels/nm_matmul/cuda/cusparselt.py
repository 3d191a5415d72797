"""2:4 products by cuSPARSELt through torch's operators `_cslt_compress` and `_cslt_sparse_mm`.

Only the first operand can be sparse, so y^T = W x^T is computed; the library writes it transposed back, which costs
nothing. The library fuses the bias of 16-bit products; torch's operators offer no activation. 8-bit products answer in
bfloat16, and one kernel applies scales, bias and the rest. The compressed bytes are the library's own: another GPU or
version may order them otherwise, so they are made where they run and never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from twofour.kernels.base import Prepared
from twofour.kernels.cuda import HALVES, Configuration, held_bias, padded, rounded_up
from twofour.kernels.nm_matmul.cuda.eight_bits import TYPES, rescaled, rounded, rounded_reference
from twofour.kernels.nm_matmul.cuda.library import LibraryMatmul
from twofour.kernels.nm_matmul.cuda.sealed_buffers import ALIGNED, Part, beside, joined, opened
from twofour.kernels.nm_matmul.cuda.tuning import key, tuned
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.native import gpu
from twofour.packing import Packed, layout_head, layout_header, pack, read_layout_header
from twofour.packing.encodings import Encoding
from twofour.patterns import Pattern

WEIGHT_MULTIPLE, TOKEN_MULTIPLE = {2: 16, 1: 32}, {2: 8, 1: 16}
"""Bytes of a number -> multiples that the weight's sides and the tokens must be (torch.sparse.semi_structured)."""

ALGORITHMS = 40
"""Algorithms tried; libraries of 2026 have up to about 30 and refuse the others."""

DEFAULT: Configuration = (0, 1, -1)
"""Algorithm, split of the inputs, mode of the split: the library's own choice."""


@dataclass(frozen=True)
class CusparseltMatmul(LibraryMatmul):
    """y = x @ W.T + bias with W 2:4; a bfloat16, float16, int8 or float8 row."""

    def unavailable(self) -> str | None:
        """Return why not: no GPU, or torch without cuSPARSELt."""
        reason = super().unavailable()
        if reason is None and not torch.backends.cusparselt.is_available():
            return "this build of torch has no cuSPARSELt"
        return reason

    def takes(self, pattern: Pattern, encoding: Encoding) -> bool:
        """As `Kernel.takes`; float8 rows round a float32 weight themselves."""
        read = "float32" if self.dtype == "float8" else self.dtype
        return self.form == pattern and encoding.name == read

    @property
    def _type(self) -> torch.dtype:
        return HALVES.get(self.dtype) or TYPES[self.dtype]

    def _padded(self, rows: int, columns: int) -> tuple[int, int]:
        multiple = WEIGHT_MULTIPLE[self._type.itemsize]
        return rounded_up(rows, multiple), rounded_up(columns, multiple)

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight compressed on the current GPU, padded, with its scales in front where it has 8 bits."""
        assert isinstance(weight, Packed), weight
        rows, columns = weight.header.shape
        high, wide = self._padded(rows, columns)
        values, scales = _plain(weight, self._type)
        values = functional.pad(
            values.view(torch.int8) if values.itemsize == 1 else values, (0, wide - columns, 0, high - rows)
        )
        compressed = torch.ops.aten._cslt_compress(values.view(self._type).to(gpu.device()))
        tensors = [compressed.view(torch.uint8)]
        if scales is not None:
            tensors.insert(0, functional.pad(scales, (0, high - rows), value=1.0))
        head = layout_header("2:4", self.dtype, self.layout, rows, columns)
        return Prepared(self, joined(head, tensors, open_end=True))

    def _multiples(self) -> tuple[int, int]:
        multiple = WEIGHT_MULTIPLE[self._type.itemsize]
        return multiple, multiple

    def repack(self, values: Tensor, keep: Tensor | None = None) -> Prepared:
        """Zero what is pruned, and let the library compress; see `LibraryMatmul.repack`."""
        pruned = values if keep is None else values.masked_fill(~keep, 0)
        compressed = torch.ops.aten._cslt_compress(pruned.to(self._type).contiguous())
        return Prepared(self, beside([compressed.view(torch.uint8)], open_end=True))

    def _multiply(self, packed: Prepared, rows: int, x: Tensor) -> Tensor:
        algorithm, split, mode = tuned().chosen(key(self.name, rows, len(x), x.shape[1]), DEFAULT)
        (compressed,) = opened(packed.tensor, self._parts(rows), self.name)
        return torch.ops.aten._cslt_sparse_mm(
            *(compressed, x, None, None, None), alg_id=algorithm, split_k=split, split_k_mode=mode
        )

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of half the values, which the library stores with more."""
        high, wide = self._padded(out_features, in_features)
        return ALIGNED + high * wide * self._type.itemsize // 2

    def configurations(self, rows: int, columns: int, tokens: int) -> Sequence[Configuration]:
        """Return every algorithm, and splits of the inputs where there are few outputs for many inputs."""
        plain = [(algorithm, 1, -1) for algorithm in range(ALGORITHMS)]
        blocks = (rounded_up(rows, 128) // 128) * (rounded_up(tokens, 128) // 128)
        if blocks > 2 * gpu.processors() or columns < 2048:
            return plain
        return [*plain, *((a, split, mode) for a in range(ALGORITHMS) for split in (2, 4, 8) for mode in (1, 2))]

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`."""
        chosen = tuned().chosen(key(self.name, problem.rows, x.shape[1], len(x)), DEFAULT)
        return self.run_as(chosen, x, weight, bias, problem, other)

    def run_as(
        self,
        way: Configuration,
        x: Tensor,
        weight: Prepared,
        bias: MaybeTensor,
        problem: Problem,
        other: MaybeTensor = None,
    ) -> Tensor:
        """Multiply by a given algorithm: (algorithm, split, mode)."""
        tokens, columns = x.shape
        high, wide = self._padded(problem.rows, columns)
        parts = opened(weight.tensor, self._parts(high), self.name)
        if self.dtype in HALVES:
            held = held_bias(bias, high, self._type)
            y = self._product(way, x.to(self._type), parts[0], held, wide)[:tokens, : problem.rows]
            y = y.to(x.dtype)
            return problem.finish(y, other).contiguous()
        whole, scale = rounded(x, self._type)
        total = self._product(way, whole, parts[1], None, wide, torch.bfloat16)[:tokens, : problem.rows]
        return rescaled(total, scale, parts[0][: problem.rows], bias, problem.epilogue, other, x.dtype)

    def _product(
        self,
        configuration: Configuration,
        x: Tensor,
        compressed: Tensor,
        bias: Tensor | None,
        columns: int,
        answer: torch.dtype | None = None,
    ) -> Tensor:
        """Return x W^T, tokens and rows padded, in `answer` where that is given, else in x's type."""
        algorithm, split, mode = configuration
        if x.itemsize == 1:  # padding is not defined for float8
            x = padded(x.view(torch.int8), TOKEN_MULTIPLE[1], columns).view(x.dtype)
        else:
            x = padded(x, TOKEN_MULTIPLE[2], columns)
        return torch.ops.aten._cslt_sparse_mm(
            *(compressed, x.t(), bias, None, answer),
            transpose_result=True,
            alg_id=algorithm,
            split_k=split,
            split_k_mode=mode,
        )

    def _parts(self, high: int) -> tuple[Part, ...]:
        compressed = Part(self._type, (high, -1))
        return (compressed,) if self.dtype in HALVES else (Part(torch.float32, (high,)), compressed)

    def _opened(self, prepared: Prepared, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
        """Return what the library holds, by multiplying the unit matrix, which is exact; and the scales (out, 1).

        The compressed bytes are the library's own, so only the library can open them.
        """
        high, wide = self._padded(rows, columns)
        *scales, compressed = opened(prepared.tensor, self._parts(high), self.name)
        unit = torch.eye(columns, device=prepared.tensor.device, dtype=torch.float32).to(self._type)
        exact = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.float32}.get(self._type)
        total = self._product(DEFAULT, unit, compressed, None, wide, exact)[:columns, :rows].t()
        return total, scales[0][:rows, None] if scales else None

    def dense(self, prepared: Prepared, rows: int, columns: int) -> Tensor:
        """Return the weight (rows, columns): 16-bit in its type, 8-bit as float32."""
        total, scales = self._opened(prepared, rows, columns)
        return total if scales is None else total.float() * scales

    def restore(self, prepared: Prepared) -> Packed:
        """Return the canonical form of what the library holds; float8 weights come back as float32."""
        rows, columns = read_layout_header(layout_head(prepared.tensor)).shape
        total, scales = self._opened(prepared, rows, columns)
        if scales is None or self._type is not torch.int8:
            return pack(self.dense(prepared, rows, columns).cpu(), "2:4")
        return replace(pack(total.to(torch.int8).cpu(), "2:4"), scales=scales.cpu().contiguous())


def _plain(weight: Packed, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the dense weight in a computing type, and its scales per output where that has 8 bits."""
    if dtype.itemsize == 2:
        return weight.unpack().to(dtype), None
    if dtype is torch.int8 and weight.scales is not None:
        return replace(weight, scales=None).unpack(), weight.scales.flatten()
    values, scales = rounded_reference(weight.unpack(), dtype)
    return values, scales.flatten()


_ROW = ("nm_matmul", "2:4")


def _row(short: str, dtype: str, isa: str, capability: tuple[int, int]) -> CusparseltMatmul:
    name = f"nm_matmul_2x4_{short}_cusparselt__cuda"
    return CusparseltMatmul(name, *_ROW, dtype, "cuda", isa, f"cslt_{short}", capability)


CUSPARSELT = (
    _row("bf16", "bfloat16", "sm_80", (8, 0)),
    _row("f16", "float16", "sm_80", (8, 0)),
    _row("int8", "int8", "sm_80", (8, 0)),
    _row("fp8", "float8", "sm_89", (8, 9)),
)
"""The rows of cuSPARSELt."""
