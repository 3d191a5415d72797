"""Records of `recurrent`, `block`, `blocks`, `bits`, `bits-nets` and `bits-lm` as Markdown for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cases import bits, bits_lm, bits_nets, block, processes, recurrent
from cases.blocks import EAGER, INDUCTOR, OURS
from fusion_tables import markdown
from twofour.measure import Record, geometric_mean


def of_recurrent(records: Sequence[Record]) -> str:
    """Return microseconds a step and the ratios of `recurrent.text_of`: above 1 it is faster than a peer."""
    names = list(dict.fromkeys(name for record in records for name in record.timings))
    names = [name for name in names if not name.endswith("(again)")]
    lines = [["layer, units x steps; microseconds a step", *names]]
    for record in records:
        label = f"{record.meta['model']} {record.meta['shape']} x {record.meta['tokens']}"
        lines.append([label, *(recurrent.text_of(record, name) for name in names)])
    return markdown(lines)


def of_block(records: Sequence[Record]) -> str:
    """Return the best dense time over that of blocks, and in brackets the best sparse peer's."""
    tokens = sorted({int(str(record.meta["tokens"])) for record in records})
    states = list(dict.fromkeys(str(record.meta["weights"]) for record in records))
    columns = [(state, count) for state in states for count in tokens]
    lines = [["weight, pattern", *(f"{count} tokens, {state}" for state, count in columns)]]
    found = {
        (r.meta["shape"], r.meta["pattern"], str(r.meta["weights"]), int(str(r.meta["tokens"]))): block.ratios(r)
        for r in records
    }
    for shape, pattern in dict.fromkeys((shape, pattern) for shape, pattern, *_ in found):
        ratios = [found.get((shape, pattern, *column)) for column in columns]
        cells = ("-" if one is None else f"{one[0]:.2f}" + (f" ({one[1]:.1f})" if one[1] else "") for one in ratios)
        lines.append([f"{shape}, {pattern}", *cells])
    return markdown(lines)


def of_fused(records: Sequence[Record]) -> str:
    """Return milliseconds of each, and torch's and Inductor's over ours, by process in brackets: above 1 is faster."""
    names = (EAGER, INDUCTOR, OURS)
    lines = [["operators, row length", *(f"{name}, ms" for name in names), *(f"{name} / ours" for name in names[:2])]]
    over: dict[str, list[float]] = {name: [] for name in names[:2]}
    for record in records:
        for name in over:
            over[name].append(record.median(name) / record.median(OURS))
        times = (f"{record.median(name) * 1e3:.2f}" for name in names)
        label = f"{record.meta['model']}, {record.meta['shape']}"
        lines.append([label, *times, *(_between(record, name, values[-1]) for name, values in over.items())])
    means = (f"**{geometric_mean(values):.2f}**" for values in over.values())
    return markdown([*lines, ["geometric mean", *[""] * len(names), *means]])


def _between(record: Record, peer: str, ratio: float) -> str:
    by_process = processes.ratios(record, OURS, peer)
    return f"{ratio:.2f}" + (f" ({by_process[0]:.2f}-{by_process[-1]:.2f})" if len(by_process) > 1 else "")


def of_bits(records: Sequence[Record]) -> str:
    """Return how many times as fast as the dots of bytes (w8a8) the fastest row of each pair of widths is."""
    sizes = list(dict.fromkeys((r.meta["tokens"], r.meta["shape"], r.meta["weights"]) for r in records))
    lines = [["widths", *(f"{tokens} x {shape}, {state}" for tokens, shape, state in sizes)]]
    found = {(r.meta["dtype"], (r.meta["tokens"], r.meta["shape"], r.meta["weights"])): r for r in records}
    for widths in dict.fromkeys(str(record.meta["dtype"]) for record in records):
        cells = []
        for size in sizes:
            record = found.get((widths, size))
            if record is None:
                cells.append("-")
                continue
            best = bits.fastest(record)
            ratio, design = record.median(bits.BYTES) / record.median(best), best.split("_")[2]
            also = (f", {peer} {its / record.median(best):.2f}" for peer, its in bits.peers(record).items())
            cells.append(f"{ratio:.2f} ({design}, {bits.giga_operations(record):.0f} GOP/s{''.join(also)})")
        lines.append([widths, *cells])
    return markdown(lines)


def of_nets(records: Sequence[Record]) -> str:
    """Return milliseconds of whole nets, and OpenVINO's over ours: above 1 ours is faster."""
    peers = bits_nets.INT8, bits_nets.FLOAT
    names = (bits_nets.OURS, *peers)
    lines = [["net, widths, images", *(f"{name}, ms" for name in names), *(f"{name} / ours" for name in peers)]]
    for record in records:
        times = (f"{record.median(name) * 1e3:.2f}" for name in names)
        ratios = (f"{record.median(name) / record.median(bits_nets.OURS):.2f}" for name in peers)
        lines.append([f"{record.meta['model']}, {record.meta['dtype']}, {record.meta['batch']}", *times, *ratios])
    return markdown(lines)


def of_language(records: Sequence[Record]) -> str:
    """Return tokens a second of language models, and ours over each other one: above 1 ours is faster."""
    peers = bits_lm.INT8, bits_lm.FLOAT, bits_lm.EAGER
    names = (bits_lm.OURS, *peers)
    lines = [
        ["net, widths, tokens of a call", *(f"{name}, tokens/s" for name in names), *(f"to {name}" for name in peers)]
    ]
    for record in records:
        tokens, ours = int(str(record.meta["tokens"])), record.median(bits_lm.OURS)
        rates = (f"{tokens / record.median(name):,.0f}" for name in names)
        ratios = (f"{record.median(name) / ours:.2f}" for name in peers)
        lines.append([f"{record.meta['model']}, {record.meta['dtype']}, {tokens}", *rates, *ratios])
    return markdown(lines)


TABLES: dict[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "recurrent": (
        "Microseconds a step; the time of the best float32 peer over it, then of its own type's.",
        of_recurrent,
    ),
    "block-float32": ("Best dense time over ours in float32, and the best sparse peer's.", of_block),
    "block-bfloat16": ("Best dense time over ours in bfloat16.", of_block),
    "block-int8": ("Best dense time over ours in int8.", of_block),
    "blocks-float32": ("Fused blocks of 4 million floats.", of_fused),
    "blocks-bfloat16": ("Fused blocks of 4 million numbers of bfloat16.", of_fused),
    "bits": (
        "Time of the dots of bytes (w8a8) over the fastest row's on the widths; MatMulNBits is ONNX Runtime's over it, "
        "torch int4 torch's (torchao's on x86), llama.cpp its types' of as many bits, with scales of their own blocks.",
        of_bits,
    ),
    "bits-nets": (
        "Whole nets of low bits, images of 28 x 28, against OpenVINO with weights of int8 and float32.",
        of_nets,
    ),
    "bits-lm": (
        "Transformers of low bits in tokens a second, and the rate over that of the same net in int8 and float32.",
        of_language,
    ),
}
"""Names of records -> what their table says, and what writes it."""
