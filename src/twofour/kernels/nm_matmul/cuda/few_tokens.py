"""Few tokens on the GPU: rows that read packed weights from memory, 16-bit or int4, and their order of bytes.

A row of the weight is cut into groups of four inputs, padded to a multiple of 64 with groups of zeros:

* "few_half": values, 32 bits a group, the first kept value in the low half; positions, 4 bits a group, eight groups an
  int32, the first group lowest. These are the canonical bytes, padded.
* "few_int4": values, 8 bits a group, the first in the low nibble; positions as above; bfloat16 scales, one for each run
  of inputs; int8 zero points where there are any. The buffer's length in blocks of 256 bytes, modulo 8, says which runs
  (`_FORMS`), so that no kernel has to wait for a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.base import Prepared
from twofour.kernels.cuda import HALVES, Configuration, CudaKernel, rounded_up
from twofour.kernels.nm_matmul.cuda.reference import opened_weight
from twofour.kernels.nm_matmul.cuda.sealed_buffers import ALIGNED, Part, joined, opened, size
from twofour.kernels.nm_matmul.cuda.tuning import key, tuned
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.packing import Header, Packed, has_zeros, layout_head, layout_header, read_layout_header
from twofour.packing.encodings import GROUPS

PADDED_GROUPS = 64
"""Groups of four to whose multiples a row is padded: the largest block that a program takes at once."""

FEW = 64
"""Tokens up to which `compile` tries these rows: above, the library's kernels are not limited by memory."""

_FORMS = tuple((group, zeros) for group in GROUPS for zeros in (False, True))

VECTOR_TOKENS = 4
"""Tokens up to which the way without tensor cores is tried: each costs it five instructions a group of four."""

SURE_VECTOR_TOKENS = 2
"""Tokens up to which it runs where nothing was searched."""

_TENSOR_CORES = ((64, 16, 4, 3), (32, 32, 4, 1), (64, 32, 4, 3), (16, 64, 4, 3), (128, 32, 8, 3))
"""Rows and groups of a block, warps, stages of its pipeline: what is searched with tensor cores, the default first."""

_VECTORS = ((8, 128, 4, 1), (2, 512, 4, 1), (4, 256, 4, 1), (16, 64, 4, 1))
"""The same without them; the first whose groups divide a row's is the default."""


@dataclass(frozen=True)
class FewTokens(CudaKernel):
    """y = x @ W.T + bias with W 2:4 and read packed.

    An infinity or NaN in a token leaves none of its outputs finite: NaN where it meets a pruned place, and without
    tensor cores in all outputs of the token. int4 weights are opened to the input's type of 16 bits where tensor cores
    multiply: to float16 only as far as that reaches, 65504.
    """

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return `weight` in this row's order, one buffer on the current GPU."""
        assert isinstance(weight, Packed) and weight.header.dtype == self.dtype, weight
        weight.validate()
        header = weight.header
        rows, columns = header.shape
        more = rounded_up(columns // 4, PADDED_GROUPS) - columns // 4
        codes = torch.zeros(rows, (columns // 4 + more) // 2, dtype=torch.uint8, device="cpu")
        codes[:, : weight.indices.shape[1]] = weight.indices
        empty = 0x44 if more else 0  # positions 0 and 1: a legal code for groups of zeros
        codes[:, (columns // 4 + 1) // 2 :] = empty
        if columns // 4 % 2 and more:
            codes[:, columns // 8] |= 0x40
        per_group = 1 if self.dtype == "int4" else 2
        values = torch.nn.functional.pad(weight.values.view(rows, -1), (0, more * per_group))
        tensors = [values, codes]
        if self.dtype == "int4":
            tensors += _scales(weight, self.name)
        group, zeros = header.group, weight.zeros is not None
        buffer = joined(layout_header("2:4", self.dtype, self.layout, rows, columns, group=group, zeros=zeros), tensors)
        return Prepared(self, _marked(buffer, (group, zeros)) if self.dtype == "int4" else buffer)

    def restore(self, prepared: Prepared) -> Packed:
        """Return the canonical form of a prepared weight."""
        buffer = prepared.tensor
        head = layout_head(buffer)
        found = read_layout_header(head)
        rows, columns = found.shape
        values, codes, *scaled = (part.cpu() for part in opened(buffer, self._parts(buffer, rows, columns), self.name))
        kept = columns // 4 if self.dtype == "int4" else columns // 2
        indices = codes.view(torch.uint8)[:, : (columns // 4 + 1) // 2].clone()
        if columns // 4 % 2:
            indices[:, -1] &= 0x0F
        header = Header(found.pattern, found.dtype, found.shape, 1, group=found.group)
        values = values.view(torch.uint8 if self.dtype == "int4" else HALVES[self.dtype])[:, :kept].clone()
        runs = columns // found.group if found.group else 0
        scales = scaled[0][:, :runs].float() if scaled else None
        return Packed(header, values, indices, scales, scaled[1][:, :runs].float() if has_zeros(head) else None)

    def dense(self, prepared: Prepared, rows: int, columns: int) -> Tensor:
        """Return the weight (rows, columns) in the row's type, int4 as float32."""
        parts = self._parts(prepared.tensor, rows, columns)
        values, codes, *scaled = opened(prepared.tensor, parts, self.name)
        group = _form(prepared.tensor)[0] if scaled else 0
        return opened_weight(values, codes, scaled, group, HALVES.get(self.dtype, torch.float32))[:, :columns]

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a prepared weight, of int4 with the fewest scales."""
        return size(self._sizes(out_features, in_features, max(GROUPS), False))

    def configurations(self, rows: int, columns: int, tokens: int) -> Sequence[Configuration]:
        """Return blocks and splits that keep every multiprocessor busy, their pipelines, and the ways to multiply."""
        padded = rounded_up(columns // 4, PADDED_GROUPS)
        families = [(_VECTORS, 0, (1, 2, 4), 1), (_TENSOR_CORES, 1, (1, 2, 4, 8, 16), 4)]
        return [
            (block, groups, split, warps, stages, tensor_cores)
            for shapes, tensor_cores, splits, least_steps in families[tokens > VECTOR_TOKENS :]
            for block, groups, warps, stages in shapes
            for split in splits
            if padded % (groups * split) == 0 and (split == 1 or padded // (groups * split) >= least_steps)
        ]

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`. float32 and foreign 16-bit inputs are rounded to the row's type first."""
        chosen = tuned().chosen(key(self.name, problem.rows, x.shape[1], len(x)), default_way(x.shape[1], len(x)))
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
        """Multiply in a given way: (rows, groups, split, warps, stages, whether tensor cores multiply)."""
        from twofour.kernels.nm_matmul.cuda.launch import launch

        problem.epilogue.require(other, (len(x), problem.rows))
        columns = x.shape[1]
        y = torch.empty(len(x), problem.rows, dtype=x.dtype, device=x.device)
        if not y.numel():
            return y
        kind = HALVES.get(self.dtype, torch.float16 if x.dtype is torch.float16 else torch.bfloat16)
        parts = opened(weight.tensor, self._parts(weight.tensor, problem.rows, columns), self.name)
        group, _ = _form(weight.tensor) if self.dtype == "int4" else (0, False)
        other = None if other is None else other.contiguous()
        launch(way, _aligned(x.to(kind)), parts, group, bias, other, y, problem.epilogue, kind)
        return y

    def _parts(self, prepared: Tensor, rows: int, columns: int) -> tuple[Part, ...]:
        return self._sizes(rows, columns, *(_form(prepared) if self.dtype == "int4" else (0, False)))

    def _sizes(self, rows: int, columns: int, group: int, zeros: bool) -> tuple[Part, ...]:
        groups = rounded_up(columns // 4, PADDED_GROUPS)
        if self.dtype != "int4":
            return Part(torch.int32, (rows, groups)), Part(torch.int32, (rows, groups // 8))
        runs = 4 * groups // group
        found = (
            Part(torch.uint8, (rows, groups)),
            Part(torch.int32, (rows, groups // 8)),
            Part(torch.bfloat16, (rows, runs)),
        )
        return (*found, Part(torch.int8, (rows, runs))) if zeros else found


def default_way(columns: int, tokens: int) -> Configuration:
    """Return blocks for a row of this many inputs where nothing was searched: the first that fits."""
    padded = rounded_up(columns // 4, PADDED_GROUPS)
    if tokens <= SURE_VECTOR_TOKENS:
        rows, groups, warps, stages = next(shape for shape in _VECTORS if padded % shape[1] == 0)
        return (rows, groups, 1, warps, stages, 0)
    rows, groups, warps, stages = _TENSOR_CORES[0]
    steps = padded // groups
    split = max(split for split in (1, 2, 4, 8) if steps % split == 0 and split <= max(1, steps // 4))
    return (rows, groups, split, warps, stages, 1)


def _aligned(x: Tensor) -> Tensor:
    """Return inputs that are contiguous and begin at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x  # a view that begins inside another tensor


def _scales(weight: Packed, name: str) -> list[Tensor]:
    scales, group = weight.scales, weight.header.group
    if scales is None or not group or not torch.equal(scales, scales.bfloat16().float()):
        raise KernelError(
            f"{name} cannot hold the scales of this weight",
            got="no groups" if scales is None or not group else "scales that are no bfloat16 numbers",
            wanted="a bfloat16 scale for each group of inputs",
            remedy='pack the weight again from floating point: pack(weight, "2:4", "int4")',
        )
    more = 4 * rounded_up(weight.header.reduction // 4, PADDED_GROUPS) // group - scales.shape[1]
    padded = torch.nn.functional.pad(scales, (0, more), value=1.0).bfloat16()
    if weight.zeros is None:
        return [padded]
    return [padded, torch.nn.functional.pad(weight.zeros, (0, more)).to(torch.int8)]


def _marked(buffer: Tensor, form: tuple[int, bool]) -> Tensor:
    blocks = (_FORMS.index(form) - buffer.numel() // ALIGNED) % 8
    return torch.cat([buffer, buffer.new_zeros(blocks * ALIGNED)])


def _form(prepared: Tensor) -> tuple[int, bool]:
    """Return how many inputs share a scale, and whether there are zero points."""
    index = prepared.numel() // ALIGNED % 8
    if index >= len(_FORMS):
        raise KernelError(
            "the bytes of a packed int4 weight are of no known form",
            got=f"{prepared.numel()} bytes",
            wanted="what kernel.prepare(packed) returned",
        )
    return _FORMS[index]


_ROW = ("nm_matmul", "2:4")
_HALF = FewTokens("", *_ROW, "bfloat16", "cuda", "sm_80", "few_half", triton=True, tokens_most=FEW)
FEW_TOKENS = (
    replace(_HALF, name="nm_matmul_2x4_bf16_few__triton"),
    replace(_HALF, name="nm_matmul_2x4_f16_few__triton", dtype="float16", layout="few_half_f16"),
    replace(_HALF, name="nm_matmul_2x4_int4_few__triton", dtype="int4", layout="few_int4"),
)
"""The rows of few tokens."""
