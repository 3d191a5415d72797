"""Products of single bits on Tensor Cores, `mma` of b1 with AND or XOR, and of numbers of 1 to 8 bits made of them.

Dense instructions: d = sum_k popcount(a & b) + c in s32, or popcount(a ^ b) (PTX ISA, 9.7.14.5). With g = lane / 4,
q = lane % 4 and h = m / 8, a register is 32 bits along K, the first in the lowest:

    A, register r:   row g + 8 (r % h),  word 4 (r / h) + q
    B, register r:   column g,           word 4 r + q
    C, D, register r: row g + 8 (r / 2), column 2 q + r % 2

Derived from the text of the PTX ISA; on sm_90 `check` found them so, bit for bit. A product of p by q bits is p q
products of planes (Feng et al. 2021, arXiv 2106.12169, section 4), by either:
popcount(x ^ w) = popcount(x) + popcount(w) - 2 popcount(x & w).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.shapes import Int32, Int64, UInt8

SYSTEMS = ("unsigned", "twos", "bipolar", "ternary")
"""What the code u of p bits stands for: u; u with its top bit flipped, in two's complement; 2 u - (2^p - 1); of codes 0
to 2 in two bits u - 1."""

_LANES, _WORD = 32, 32


@dataclass(frozen=True)
class BitInstruction:
    """`mma.sync.aligned.m<m>n8k<k>.row.col.s32.b1.b1.s32.<operation>.popc`.

    Attributes:
        k: Bits that are multiplied for each element of D, 128 or 256.
        m: Rows of A and D, 8 or 16.
        operation: "and" or "xor".
        arch: First architecture whose PTX has it.
        last: Last one that has it as an instruction of its own (BMMA): what NVIDIA's assembler, ptxas 12.8, makes of
            it. Later ones run others in its place: Hopper two ANDs for an XOR, Blackwell products of bytes.
        n: Columns of B and D.
    """

    k: int
    m: int = 16
    operation: str = "and"
    arch: str = "sm_80"
    last: str = "sm_90"
    n: int = 8

    @property
    def name(self) -> str:
        """For example "mma.m16n8k256.b1.and.popc"."""
        return f"mma.m{self.m}n{self.n}k{self.k}.b1.{self.operation}.popc"

    @property
    def ptx(self) -> str:
        """The opcode in PTX."""
        return f"mma.sync.aligned.m{self.m}n{self.n}k{self.k}.row.col.s32.b1.b1.s32.{self.operation}.popc"

    @property
    def lanes(self) -> int:
        """Threads that execute it together."""
        return _LANES

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of A, of B, and of C and D that a lane holds."""
        tall, words = self.m // 8, self.k // _WORD
        return tall * words // 4, words // 4, 2 * tall


MMA_B1 = (
    BitInstruction(128),
    BitInstruction(256),
    BitInstruction(128, 8),
    BitInstruction(128, operation="xor", last="sm_89"),
    BitInstruction(256, operation="xor", last="sm_89"),
    BitInstruction(128, 8, "xor", "sm_75", "sm_89"),
)
"""The rows of the table."""


def _places(row: BitInstruction) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each lane and register of A, B and C where in the flat matrix it stands, A and B in words."""
    lane, words, tall = torch.arange(_LANES, device="cpu")[:, None], row.k // _WORD, row.m // 8
    group, quad = lane // 4, lane % 4
    a, b, c = (torch.arange(size, device="cpu") for size in row.registers)
    of_a = (group + 8 * (a % tall)) * words + 4 * (a // tall) + quad
    of_b = group * words + 4 * b + quad
    return of_a, of_b, (group + 8 * (c // 2)) * row.n + 2 * quad + c % 2


def to_registers(
    row: BitInstruction, a: Int32[Tensor, "m words"], b: Int32[Tensor, "n words"]
) -> tuple[Tensor, Tensor]:
    """Return what lanes hold of A's rows and B's columns, words of 32 bits along K: int32 (32, registers) each.

    Raises:
        PackingError: Words are not as many as the instruction reads.
    """
    of_a, of_b, _ = _places(row)
    for what, given, size in (("A", a, row.m), ("B", b, row.n)):
        _require(row, f"words of {what}", given, (size, row.k // _WORD))
    return a.flatten()[of_a], b.flatten()[of_b]


def execute_b1(row: BitInstruction, a: Tensor, b: Tensor, c: Tensor) -> Int32[Tensor, "lanes registers"]:
    """Execute the instruction on what 32 lanes hold: int32 (32, registers) of A, B and C; returns D as C is.

    Raises:
        PackingError: Registers are not those of the instruction.
    """
    of_a, of_b, of_c = _places(row)
    for what, given, places in (("A", a, of_a), ("B", b, of_b), ("C", c, of_c)):
        _require(row, f"registers of {what}", given, tuple(places.shape))
    words = row.k // _WORD
    rows = torch.zeros(row.m * words, dtype=torch.int32, device="cpu").scatter_(0, of_a.flatten(), a.flatten())
    columns = torch.zeros(row.n * words, dtype=torch.int32, device="cpu").scatter_(0, of_b.flatten(), b.flatten())
    a, b = rows.view(row.m, 1, words), columns.view(1, row.n, words)
    return popcount(a ^ b if row.operation == "xor" else a & b).sum(2, dtype=torch.int32).flatten()[of_c] + c


def _require(row: BitInstruction, what: str, given: Tensor, size: tuple[int, ...]) -> None:
    if given.dtype is not torch.int32 or given.shape != size:
        raise PackingError(
            f"{row.name} has other {what}", got=f"{given.dtype} {tuple(given.shape)}", wanted=f"int32 {size}"
        )


def popcount(words: Int32[Tensor, "*any"]) -> Int32[Tensor, "*any"]:
    """Return the ones of each word of 32 bits."""
    x = words.long() & 0xFFFFFFFF
    x = x - (x >> 1 & 0x55555555)
    x = (x & 0x33333333) + (x >> 2 & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101 & 0xFFFFFFFF) >> 24).to(torch.int32)


def planes_of(codes: UInt8[Tensor, "rows k"], bits: int, multiple: int) -> Int32[Tensor, "bits rows words"]:
    """Return the planes of codes, the lowest first, words of 32 bits along K, which zeros fill up to a multiple."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % multiple)).long()
    places = torch.arange(_WORD, device="cpu")
    planes = torch.stack([padded >> p & 1 for p in range(bits)]).unflatten(2, (-1, _WORD))
    return ((planes << places).sum(3) << 32 >> 32).to(torch.int32)


def ones_in_both(row: BitInstruction, a: Tensor, b: Tensor) -> Int64[Tensor, "rows columns"]:
    """Return popcount(a & b) of all pairs of rows of words (rows, words) and (columns, words), by the instruction.

    XOR counts popcount(a) + popcount(b) less twice of it.
    """
    words, size = row.k // _WORD, (len(a), len(b))
    tall, wide = -(-len(a) // row.m) * row.m, -(-len(b) // row.n) * row.n
    a, b = (torch.nn.functional.pad(x, (0, 0, 0, to - len(x))) for x, to in ((a, tall), (b, wide)))
    found = torch.zeros(tall, wide, dtype=torch.int64, device="cpu")
    of_c = _places(row)[2].flatten()
    for i in range(0, tall, row.m):
        for j in range(0, wide, row.n):
            d = torch.zeros(_LANES, of_c.numel() // _LANES, dtype=torch.int32, device="cpu")
            for k in range(0, a.shape[1], words):
                here = a[i : i + row.m, k : k + words], b[j : j + row.n, k : k + words]
                d = execute_b1(row, *to_registers(row, *here), d)
            tile = torch.empty(row.m * row.n, dtype=torch.int32, device="cpu").scatter_(0, of_c, d.flatten())
            found[i : i + row.m, j : j + row.n] = tile.view(row.m, row.n)
    if row.operation == "xor":
        found = (popcount(a).sum(1)[:, None] + popcount(b).sum(1) - found) // 2
    return found[: size[0], : size[1]]


def bit_product(
    x: UInt8[Tensor, "tokens k"],
    w: UInt8[Tensor, "out k"],
    of_x: tuple[int, str],
    of_w: tuple[int, str],
    row: BitInstruction = MMA_B1[1],
) -> Int64[Tensor, "tokens out"]:
    """Return the whole sums of products of the numbers that codes stand for, by products of their planes.

    A plane of an unsigned number weighs 2^s, the top one of two's complement, whose bit codes hold flipped, -2^(p-1);
    those of a bipolar one are -1 and 1, 2^s (2 b - 1). So with n = popcount(x_s & w_t) of true length K a pair of
    planes is worth n; 2 n - popcount(x_s) where w is bipolar, 2 n - popcount(w_t) where x is; and where both are
    K - 2 popcount(x_s ^ w_t), popcount(x ^ w) = popcount(x) + popcount(w) - 2 n.

    Args:
        x: Codes of inputs.
        w: Codes of weights.
        of_x: Bits, 1 to 8, and system of the inputs: one of `SYSTEMS`.
        of_w: The same of the weights.
        row: Which instruction multiplies.

    Raises:
        PackingError: There are no codes, lengths differ, or codes do not fit their bits.
    """
    for codes in (x, w):
        if codes.dtype is not torch.uint8 or codes.ndim != 2 or not codes.numel():
            raise PackingError(
                "codes are not rows of bytes",
                got=f"{codes.dtype} {tuple(codes.shape)}",
                wanted="uint8 (rows, inputs), at least one of each",
            )
    for codes, (bits, system) in ((x, of_x), (w, of_w)):
        most, known = int(codes.max()), isinstance(bits, int) and bits in range(1, 9) and system in SYSTEMS
        if system == "ternary":
            known = known and bits == 2 and most < 3
        if not known or most >> bits or x.shape[1] != w.shape[1]:
            raise PackingError(
                "codes do not fit their bits",
                got=f"{bits} bits, {system}, codes up to {most}, {x.shape[1]} inputs of {w.shape[1]}",
                wanted=f"1 to 8 bits, one of {', '.join(SYSTEMS)} (2 bits, to code 2), codes of so many, equal lengths",
            )
    (a, of_a), (b, of_b) = (_weighed(codes, *of, row.k) for codes, of in ((x, of_x), (w, of_w)))
    # planes stand below each other, so that those of few tokens share an instruction
    n = ones_in_both(row, a.flatten(0, 1), b.flatten(0, 1)).view(len(a), len(x), len(b), len(w))
    ones_a, ones_b = popcount(a).sum(2)[:, :, None, None], popcount(b).sum(2)
    match of_x[1] == "bipolar", of_w[1] == "bipolar":
        case True, True:
            n = x.shape[1] - 2 * (ones_a + ones_b - 2 * n)
        case False, True:
            n = 2 * n - ones_a
        case True, False:
            n = 2 * n - ones_b
        case _:
            pass
    weights = (torch.tensor(of, dtype=torch.int64, device="cpu") for of in (of_a, of_b))
    return (n * next(weights)[:, None, None, None] * next(weights)[:, None]).sum((0, 2))


def _weighed(codes: Tensor, bits: int, system: str, multiple: int) -> tuple[Tensor, list[int]]:
    """Return planes and what each weighs; -1, 0 and 1 are numbers of two's complement."""
    weights = [1 << s for s in range(bits)]
    if system in ("twos", "ternary"):
        codes = (codes + (system == "ternary")) ^ weights[-1]
        weights[-1] = -weights[-1]
    return planes_of(codes, bits, multiple), weights
