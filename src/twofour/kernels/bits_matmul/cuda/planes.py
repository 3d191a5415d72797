"""Products of codes on a GPU by planes of bits: the order of a weight, tiles, and the row of the table.

The planes of a weight are int32 (bits, words, out): bit i of word j is input 32 j + i, and outputs stand beside each
other, so that neighbouring threads read neighbouring words. Codes of inputs become planes (bits, tokens, words) by a
kernel of their own, which finds the range of each token too. Then

    sum_k u_x u_w = sum over planes of 2^(s + t) popcount(x_s & w_t)

(Feng et al. 2021, arXiv 2106.12169, section 4), and what codes stand for follows from that sum and two sums of rows, as
on a CPU: the README of `bits_matmul` has the formula. Bits behind the last input are zero in both operands.

The bits are counted by ordinary instructions. Triton has none for the 1-bit units of Turing to Ada, which
`tensor_core/bits.py` executes, and its inline assembly holds no fragment of a warp. A multiprocessor counts 16 words a
cycle from compute capability 5.0 to 9.0 (CUDA C++ Programming Guide, throughput of native arithmetic instructions), 512
products of one bit where int8's units make 2048 products of bytes on A100 and 4096 on H100. So this is for few tokens,
whose time is that of the weight's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.base import Prepared
from twofour.kernels.bits_matmul.coded import BitsProblem
from twofour.kernels.bits_matmul.codes import BitWeight, Levels
from twofour.kernels.cuda import CudaKernel
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.kernels.quantization import Quantization, quantize_output
from twofour.native import gpu
from twofour.tensor_core.bits import planes_of

WORD = 32
"""Bits of a word of a plane."""

TILES = tuple(product((1, 4, 16, 64), (16, 32, 64)))
"""Tokens and outputs of a program."""

_ROWS = 256
"""Outputs of a weight that are cut into planes at once, which takes 8 bytes a bit."""


def tile_of(tokens: int, rows: int, processors: int) -> tuple[int, int]:
    """Return the tokens and outputs of a program, by the rule of Feng et al. 2021 (arXiv 2106.12169).

    Of the tiles that give every multiprocessor a program the one with the most products for a word that is loaded;
    where none does, the one with the most programs.
    """

    def programs(tile: tuple[int, int]) -> int:
        return -(-tokens // tile[0]) * -(-rows // tile[1])

    fitting = [tile for tile in TILES if tile[0] < 2 * tokens or tile[0] == 1]
    busy = [tile for tile in fitting if programs(tile) >= processors]
    if not busy:
        return max(fitting, key=lambda tile: (programs(tile), tile[1]))
    return max(busy, key=lambda tile: (tile[0] * tile[1] / (tile[0] + tile[1]), tile[1]))


@dataclass(frozen=True)
class BitPlanes(CudaKernel):
    """y = x @ W.T + bias, W codes of 1 to 8 bits, x rounded to codes of 1 to 8 bits: bits of `bits_matmul_reference`.

    Sums are exact; what is done to them is rounded once an operation, in the order of the other rows.
    """

    def refuses_weight(self, weight: BitWeight, quantization: Quantization) -> str | None:
        """Return why this row cannot multiply by a weight, or None when it can."""
        if weight.group or weight.shifted or quantization.real:
            return "is for no scales of groups, zero points of weights and float inputs"
        return self.refuses_levels(weight.levels, weight.shape[1], quantization)

    def refuses_levels(self, levels: Levels, columns: int, quantization: Quantization) -> str | None:
        """Return why this row cannot multiply `columns` inputs by codes of these levels, or None when it can."""
        if (reason := self.unavailable()) is not None:
            return reason
        if columns > (longest := levels.longest(quantization)):
            return f"has sums of {columns} inputs, which may exceed int32; at most {longest}"
        return None

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a weight of one bit."""
        return 4 * -(-in_features // WORD) * out_features

    def beside_bytes(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the bytes of scales, sums of values, and levels."""
        return 4 * out_features, 4 * out_features, 8

    def prepare(self, weight: BitWeight) -> Prepared:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a weight on the current GPU: its planes; beside them scales, sums of values, and alpha and beta.

        Raises:
            KernelError: It has scales of groups or zero points.
        """
        if weight.group or weight.shifted:
            raise KernelError(
                f"{self.name} does not take a weight of codes",
                got="scales of groups" if weight.group else "zero points",
                wanted="a scale for each output",
                remedy="`refuses_weight` of a row says what it takes; rows of layout 'bits_groups' take these on a CPU",
            )
        levels, device = weight.levels, gpu.device()
        parts = [planes_of(rows, levels.bits, WORD) for rows in torch.split(weight.codes, _ROWS)]
        planes = torch.cat(parts, 1).transpose(1, 2).contiguous()
        of_levels = torch.tensor([levels.alpha, levels.beta], dtype=torch.int32, device=device)
        beside = (weight.scales.to(device), weight.values().sum(1, dtype=torch.int32).to(device), of_levels)
        return Prepared(self, planes.to(device), beside, weight.shape[1])

    def restore(self, prepared: Prepared) -> BitWeight:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the weight of a prepared one."""
        planes, (scales, _, of_levels) = prepared.tensor.cpu(), prepared.beside
        bits, _, rows = planes.shape
        places = torch.arange(WORD, device="cpu")[:, None]
        codes = torch.stack([(planes[p, :, None, :] >> places & 1) << p for p in range(bits)]).sum(0)
        codes = codes.reshape(-1, rows)[: prepared.columns].T.to(torch.uint8).contiguous()
        alpha, beta = of_levels.cpu()
        return BitWeight(codes, Levels(bits, int(alpha), int(beta)), scales.cpu())

    def dense(self, prepared: Prepared, rows: int, columns: int) -> Tensor:
        """Return the real weight, float32 (rows, columns), on its device."""
        return self.restore(prepared).real().to(prepared.tensor.device)

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`. `problem.quantization` says bits, levels and range of the inputs.

        A token that is not finite is NaN, with a static range one that holds NaN; in answers of bytes NaN is their
        least number.

        Raises:
            KernelError: Triton cannot run here, or an operand does not fit: its sizes, type or device, or inputs that
                stay real.
        """
        self._require(x, weight, bias, problem)
        problem.epilogue.require(other, (len(x), problem.rows))
        quantization = problem.quantization
        answer = quantization.output(x)
        y = torch.empty(
            len(x), problem.rows, dtype=answer if answer.is_floating_point else torch.float32, device=x.device
        )
        if y.numel():
            from twofour.kernels.bits_matmul.cuda.planes_triton import launch  # imports Triton

            processors = 1 if gpu.interpreted() else gpu.processors()
            bias = None if bias is None else bias.contiguous()
            other = None if other is None else other.contiguous()
            tile = tile_of(len(x), problem.rows, processors)
            launch(x.contiguous(), weight.tensor, weight.beside, bias, other, y, problem, tile)
        return quantize_output(y, quantization)

    def _require(self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem) -> None:
        quantization, planes = problem.quantization, weight.tensor
        rows = planes.shape[-1]
        if (reason := self.unavailable()) is not None:
            wrong = "it cannot run", reason, "a GPU, or Triton's interpreter"
        elif planes.dtype is not torch.int32 or planes.ndim != 3 or len(weight.beside) != 3 or rows != problem.rows:
            got = f"{planes.dtype} {tuple(planes.shape)} for {problem.rows} outputs"
            wrong = "a weight was prepared for another kernel or shape", got, "what its own `prepare` returned"
        elif x.ndim != 2 or x.shape[1] != weight.columns or x.dtype not in self.reads or x.device != planes.device:
            wanted = f"(tokens, {weight.columns}) of {', '.join(map(str, self.reads))} on {planes.device}"
            wrong = "inputs do not fit the weight", f"{tuple(x.shape)} of {x.dtype} on {x.device}", wanted
        elif quantization.real or (isinstance(problem, BitsProblem) and (problem.coded or problem.answer)):
            wrong = "it takes and gives no such numbers", "inputs that stay real, or codes", "inputs that it rounds"
        elif bias is not None and (bias.shape != (rows,) or bias.dtype is not torch.float32 or bias.device != x.device):
            got = f"{tuple(bias.shape)} of {bias.dtype} on {bias.device}"
            wrong = "the bias does not fit the weight", got, f"({rows},) of torch.float32 on {x.device}"
        else:
            return
        what, got, wanted = wrong
        remedy = "`refuses_weight` says what it takes, and `twofour kernels` lists the rows of `bits_matmul`"
        raise KernelError(f"{self.name}: {what}", got=got, wanted=wanted, remedy=remedy)


BIT_PLANES = BitPlanes(
    "bits_matmul_planes__triton", "bits_matmul", "dense", "bits", "cuda", "sm_80", "cuda_bits_planes", triton=True
)
"""The row; `compile` does not take it, since no GPU has run it."""
