"""Products of whole numbers of 1 to 8 bits on one thread, against dots of bytes.

Every row of `bits_matmul` that takes a pair of widths, its float32 inputs rounded and packed inside the timing, against
the `bytes` row on 8 by 8 bits (w8a8), which rounds the same inputs, and against torch._int_mm, which is handed whole
numbers: it pays for no rounding and scales nothing. "w4a8/g64" has a scale for 64 inputs each, "w4/g64" float32 inputs
beside. Products of others are timed where they have the widths: ONNX Runtime's, torch's, llama.cpp's. Weights are
prepared outside the timing. The first rows of every answer are compared with 64-bit whole numbers before anything is
timed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from cases import ggml, int4pack, nbits
from cases.columns import headed
from cases.records import machine_line
from twofour import measure
from twofour.errors import DataError, MeasureError
from twofour.kernels import available
from twofour.kernels.base import Prepared
from twofour.kernels.bits_matmul import BitsMatmul, BitWeight, bits_matmul_reference
from twofour.kernels.problem import Problem
from twofour.measure import Record
from twofour.patterns import parse
from twofour.quantization.widths import Widths, encoding_of

WIDTHS = ("w1a1", "w1a2", "w2a2", "w1a8", "w1.58a8", "w2a8", "w4a4", "w4a8")
"""Pairs of widths; w1.58 is ternary."""

GROUPED = ("w2a8/g32", "w2a8/g128", "w3a8/g64", "w4a8/g32", "w4a8/g128", "w2/g32", "w4/g32", "w4/g128")
"""The same with groups, and weights alone."""

KEPT = ("w8a8/2:4", "w4a8/2:4", "w2a8/2:4", "w1.58a8/2:4")
"""Weights that keep two of four, on dense rows and on those that skip their zeros."""

SIZES = (
    "512x4096x4096", "4x4096x4096", "4x4096x4096:cold",
    "128x8192x2048", "512x2048x2048", "1x2048x2048", "1x8192x2048",
)  # fmt: skip
"""Tokens x outputs x inputs, and ":cold" for weights that come from memory; three of the last four are bitnet.cpp's."""

PUBLISHED = {("8192x2048", 128): 182.0, ("2048x2048", 512): 184.0, ("2048x2048", 1): 145.0}
"""GOP/s on one thread that bitnet.cpp publishes for ternary weights and 8 bits, (outputs x inputs, tokens): 23.53 ms,
23.34 ms and 58 us on an AMD EPYC 7V13 (github.com/microsoft/BitNet, src/README.md)."""

BYTES, INT_MM = "bytes w8a8", "torch._int_mm"
PEERS = (nbits, int4pack, ggml)
"""Each has a `NAME`, how tables call it, and `calls`."""
CHECKED = 2
"""Tokens whose answers are compared."""

Calls = list[Callable[[], Any]]


def cells(sizes: Sequence[str], widths: Sequence[str]) -> list[dict[str, object]]:
    """List the cells: all of one size together.

    Raises:
        DataError: A size or a pair of widths is none.
    """
    for text in sizes:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*(:cold)?", text):
            raise DataError(
                f"the size {text!r} is not known", got=text, wanted="tokens x outputs x inputs, 4x64x96:cold"
            )
    for text in widths:
        widths_of(text)
    found = []
    for size, text in ((size, text) for size in sizes for text in widths):
        numbers, _, state = size.partition(":")
        tokens, rows, columns = numbers.split("x")
        found.append(
            {
                "case": "bits", "dtype": text, "shape": f"{rows}x{columns}", "weights": state or "hot",
                "threads": 1, "tokens": int(tokens),
            }
        )  # fmt: skip
    return found


def widths_of(text: str) -> Widths:
    """Return what "w2a8" stands for.

    Raises:
        DataError: It is no pair of widths.
    """
    found = re.fullmatch(r"(w[\d.]+)(a\d+(?:/g[1-9]\d*|/2:4)?|/g[1-9]\d*)", text)
    if found is None:
        wanted = f"such as {', '.join((*WIDTHS, *GROUPED, *KEPT))}"
        raise DataError(f"the widths {text!r} are not known", got=text, wanted=wanted)
    weights, inputs = encoding_of(found[1], "weights"), found[2].partition("/")[0]
    assert weights is not None
    return Widths(weights, encoding_of(inputs or None, "activations"))


def group_of(text: str) -> int:
    """Return the inputs that share a scale in "w4a8/g64", 0 where all do."""
    return int(text.partition("/g")[2] or 0)


class Bench:
    """Measures cells, keeping the 8 by 8 bits of the size it is at."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at: tuple[object, ...] = ()
        self.bytes: dict[str, Calls] = {}

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        rows, columns = map(int, str(cell["shape"]).split("x"))
        tokens, cold = int(str(cell["tokens"])), cell["weights"] == "cold"
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1))
        at = rows, columns, tokens, cold
        with torch.inference_mode():
            if self.at != at:
                self.bytes = {}  # the copies of the last size are freed before the next ones are made
                self.bytes, self.at = _baselines(x, rows, cold), at
            text = str(cell["dtype"])
            how: dict[str, Any] = {"group": group_of(text), "kept": text.endswith("/2:4")}
            candidates = _candidates(widths_of(text), x, rows, cold, **how) | self.bytes
            peers = tuple(name for name in candidates if peer_of(name))
            return measure.compare(
                candidates,
                baseline=(*peers, BYTES, INT_MM),
                seconds=self.seconds,
                threads=1,
                clock="thread",
                pin=True,
                weights=measure.copies_for_cold(rows * columns) if cold else "hot",
                noise=True,
                meta=cell,
            )


def _baselines(x: Tensor, rows: int, cold: bool) -> dict[str, Calls]:
    eight = _candidates(widths_of("w8a8"), x, rows, cold, design="bytes")
    fastest = max(eight, key=lambda name: next(row.level for row in _rows() if row.name == name))
    generator = torch.Generator().manual_seed(0)
    given, weight = (
        torch.randint(-127, 128, size, generator=generator, dtype=torch.int8) for size in (x.shape, (rows, x.shape[1]))
    )
    copies = measure.copies_for_cold(weight.numel()).copies if cold else 1
    # a weight (out, in) as a Linear holds it, its transpose a view: what torch is fastest with
    held = [weight.clone().t() for _ in range(copies)]
    return {BYTES: eight[fastest], INT_MM: [partial(torch.ops.aten._int_mm.default, given, w) for w in held]}


def _rows() -> list[BitsMatmul]:
    rows = [row for row in available("bits_matmul") if isinstance(row, BitsMatmul)]
    return [row for row in rows if row.isa != "scalar"] or rows


def _candidates(
    widths: Widths, x: Tensor, rows: int, cold: bool, design: str = "", group: int = 0, kept: bool = False
) -> dict[str, Calls]:
    """Return every row and peer that takes these widths on a random weight, after checking its answer."""
    weight = random_weight(widths, rows, x.shape[1], group, kept=kept)
    problem = Problem(rows, quantization=widths.range())
    want = bits_matmul_reference(x[:CHECKED], weight, None, problem.quantization)
    found: dict[str, Calls] = {}
    prepared: dict[str, list[Prepared]] = {}
    for row in _rows():
        refused = row.refuses_weight(weight, problem.quantization)
        if refused or not row.serves(len(x)) or (design and design not in row.name):
            continue
        if row.layout not in prepared:
            first = row.prepare(weight)
            copies = measure.copies_for_cold(first.nbytes).copies if cold else 1
            prepared[row.layout] = [first, *(first.copy() for _ in range(copies - 1))]
        answer = row.run(x, prepared[row.layout][0], None, problem)[:CHECKED]
        far = (answer - want).norm() > 1e-6 * want.norm() if widths.inputs is None else not torch.equal(answer, want)
        if far:
            raise MeasureError(
                f"{row.name} is wrong and is not timed", got=f"other sums than 64-bit ones, {widths.name}"
            )
        found[row.name] = [partial(row.run, x, held, None, problem) for held in prepared[row.layout]]
    if not design and not kept:
        copies = measure.copies_for_cold(weight.codes.numel() * weight.levels.bits // 8).copies if cold else 1
        for peer in PEERS:
            for kind, call in peer.calls(weight, x, rounded=widths.inputs is not None, copies=copies):
                found.setdefault(f"{peer.NAME} {kind}".strip(), []).append(call)
    return found


def peer_of(name: str) -> str:
    """Return how tables call the peer that a candidate is of, "" for a row of ours and the baselines of all widths."""
    return next((peer.SHORT for peer in PEERS if name.startswith(peer.NAME)), "")


def peers(record: Record) -> dict[str, float]:
    """Return the seconds of each peer that was timed, in its fastest form, by how tables call it."""
    found: dict[str, float] = {}
    for name in record.timings:
        if peer := peer_of(name):
            found[peer] = min(found.get(peer, float("inf")), record.median(name))
    return found


def random_weight(widths: Widths, rows: int, columns: int, group: int = 0, *, kept: bool = False) -> BitWeight:
    """Return a weight of random codes, with a scale for so many inputs each, 0 for all of an output; `kept`: 2:4.

    Raises:
        DataError: 2:4 is asked of widths that have no zero, or of inputs that are no fours.
    """
    scales = (rows, columns // group) if group else (rows,)
    generator = torch.Generator().manual_seed(0)
    most = widths.weights.largest_code
    codes = torch.randint(0, most + 1, (rows, columns), generator=generator, dtype=torch.uint8)
    if kept:
        if not widths.levels.fits_bytes or columns % 4:
            raise DataError(
                f"{widths.name} over {columns} inputs is not 2:4", got=widths.name, wanted="levels with zero, fours"
            )
        keep = parse("2:4").project(torch.rand(codes.shape, generator=generator))
        codes = torch.where(keep, codes, -widths.levels.beta).to(torch.uint8)
    return BitWeight(codes, widths.levels, torch.rand(scales, generator=generator) + 0.5)


def fastest(record: Record) -> str:
    """Return the row that is fastest on the cell's own widths."""
    return min(
        (name for name in record.timings if name not in (BYTES, INT_MM) and not peer_of(name)), key=record.median
    )


def giga_operations(record: Record) -> float:
    """Return 10^9 additions and multiplications a second of the fastest row."""
    rows, columns = map(int, str(record.meta["shape"]).split("x"))
    return 2e-9 * rows * columns * int(str(record.meta["tokens"])) / record.median(fastest(record))


def show(records: Sequence[Record], console: Console) -> None:
    """Print a row per size and pair of widths: the fastest row, its ratios, and its operations a second."""
    heads = ("shape", "weights", "tokens", "widths", "fastest", "ms", f"{BYTES} ms", "ratio", f"{INT_MM} ms", "ratio")
    table = headed((*heads, "peer", "ms", "ratio", "GOP/s", "bitnet.cpp's"), words=5)
    for record in records:
        best = fastest(record)
        ours = record.median(best)
        against = [cell for name in (BYTES, INT_MM) for cell in (1e3 * record.median(name), record.median(name) / ours)]
        others = peers(record)
        peer = min(others, key=lambda name: others[name], default="")
        published = PUBLISHED.get((str(record.meta["shape"]), int(str(record.meta["tokens"]))))
        ternary = record.meta["dtype"] == "w1.58a8" and published is not None
        table.add_row(
            *(str(record.meta[key]) for key in ("shape", "weights", "tokens", "dtype")),
            best.removeprefix("bits_matmul_"),
            f"{1e3 * ours:.4f}",
            *(f"{number:.4f}" if index % 2 == 0 else f"{number:.2f}x" for index, number in enumerate(against)),
            *((peer, f"{1e3 * others[peer]:.4f}", f"{others[peer] / ours:.2f}x") if peer else "---"),
            f"{giga_operations(record):.1f}",
            f"{published:.0f}" if ternary else "",
        )
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
