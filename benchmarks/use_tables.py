"""Records of models in use as Markdown for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cases import embeddings, generate, lengths, peak, provider, repetition, shrunk, sweep
from fusion_tables import markdown
from twofour.measure import Record


def of_embeddings(records: Sequence[Record]) -> str:
    """Return sentences a second of every engine, how many times torch's in brackets, and Spearman on STS-B."""
    names = dict.fromkeys(name for record in records for name in record.timings if not name.endswith("(again)"))
    heads = [f"{record.meta['sentences']}, {record.threads} thread{'s'[: record.threads > 1]}" for record in records]
    lines = [["engine; sentences a second", *heads, "Spearman x 100"]]
    for name in names:
        lines.append([name, *(embeddings.speed(record, name) for record in records), embeddings.quality(records, name)])
    return markdown(lines)


def of_generate(records: Sequence[Record]) -> str:
    """Return tokens a second of every engine, and how many times the best dense one's."""
    names = list(dict.fromkeys(name for record in records for name in record.timings if not name.endswith("(again)")))
    lines = [["model; tokens a second", *names]]
    for record in records:
        label = f"{record.meta['model']}, {record.meta['dtype']}, {record.threads} thread{'s'[: record.threads > 1]}"
        rates = (generate.rate(record, name) if name in record.timings else None for name in names)
        lines.append([label, *("-" if one is None else f"{one[0]:.1f} ({one[1]:.2f})" for one in rates)])
    return markdown(lines)


def of_shrunk(records: Sequence[Record]) -> str:
    """Return milliseconds, the promised and the measured share of the dense model's time, and 2:4 over OpenVINO."""
    return markdown([["model, budget of time", *shrunk.HEADS], *(shrunk.line(record) for record in records)])


def of_ragged(records: Sequence[Record]) -> str:
    """Return milliseconds of every candidate, and how many times the fastest runtime's."""
    names = list(dict.fromkeys(name for record in records for name in record.timings if not name.endswith("(again)")))
    lines = [["lengths, real tokens; ms", *names]]
    for record in records:
        best = min(record.undisturbed(name) for name in record.baseline)
        share = int(str(record.meta["tokens"])) / int(str(record.meta["places"]))
        times = (record.undisturbed(name) for name in names)
        lines.append([f"{record.meta['lengths']}, {share:.0%}", *(f"{1e3 * t:.1f} ({t / best:.2f})" for t in times)])
    return markdown(lines)


def of_lengths(records: Sequence[Record]) -> str:
    """Return the best runtime at every size of a call, and ours over it, dense and 2:4."""
    return markdown([[*lengths.HEADS], *(lengths.line(record) for record in records)])


def of_provider(records: Sequence[Record]) -> str:
    """Return milliseconds with and without the provider, and the ratio in Python and from C."""
    return markdown([[*provider.HEADS], *(provider.line(record) for record in records)])


def of_repetition(records: Sequence[Record]) -> str:
    """Return seconds an epoch of every arm, the dense arm's over them, and the metric; then what chose their ways."""
    rows = [line for record in records for line in repetition.lines(record)]
    trial = "; ".join(repetition.tried(record) for record in records)
    return f"{markdown([[*repetition.HEADS], *rows])}\n\nForward and backward pass of the first batches: {trial}."


def of_sweep(records: Sequence[Record]) -> str:
    """Return the best dense runtime of every model, and ours over it, dense and 2:4."""
    return markdown([[*sweep.HEADS], *(sweep.line(record) for record in records)])


def _sweep(dtype: str) -> tuple[str, Callable[[Sequence[Record]], str]]:
    said = (
        f"Shapes in use that nothing here was tuned for, random weights, by the default call, in {dtype}: times over "
        "the best of torch, `torch.compile`, ONNX Runtime and OpenVINO (lower is better), and which of ours was slower "
        "than that by more than two runs of the same engine differ."
    )
    return said, of_sweep


def of_peak(records: Sequence[Record]) -> str:
    """Return megabytes that serving takes, in brackets the most in a call."""
    return markdown(peak.lines(records))


def _repetition(task: str, dtype: str, metric: str) -> tuple[str, Callable[[Sequence[Record]], str]]:
    said = (
        f"A whole repetition of {task} in {dtype}, one thread, the arms a slice of steps each in turn on the same "
        "batches: seconds an epoch with the batches' making, the dense arm's over them, the same slice by slice "
        f"(median, quartiles), what came before the first step, and {metric}."
    )
    return said, of_repetition


TABLES: dict[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "embeddings": (
        "`SentenceTransformer.encode` of MiniLM, 512 texts, batches of 32; in brackets how many times torch's rate. "
        "2:4 is pruned in one shot.",
        of_embeddings,
    ),
    "generate": (
        "`generate()`, 32 tokens behind a prompt of 16; in brackets how many times the rate of the best dense engine. "
        "OpenVINO and ONNX Runtime run the step in a bare loop, without the prompt and transformers' own work; "
        "a table without their columns was taken before they were peers.",
        of_generate,
    ),
    "lengths": (
        "MiniLM's embeddings, float32, one thread, compiled once by the default call with one sequence of 128 tokens: "
        "times over the best of torch, ONNX Runtime and OpenVINO (lower is better). At one size those are built for "
        "it; over the random ones their sizes are free.",
        of_lengths,
    ),
    "peak": (
        "What a process grew by to serve a model, batch 1, one thread, after 20 calls, in brackets the most in a call: "
        "libraries are loaded before, malloc is as it comes. ONNX Runtime and OpenVINO read a file of theirs, ours is "
        "compiled there, or loaded from a file of ours.",
        of_peak,
    ),
    "provider": (
        "MiniLM's 2:4 ONNX files in ONNX Runtime, its CPU provider alone and with libtwofour's before it, one thread; "
        "MB that making each session left in memory.",
        of_provider,
    ),
    "ragged": (
        "MiniLM, 8 sequences padded to 128 tokens, float32, one thread; in brackets over the fastest runtime's time.",
        of_ragged,
    ),
    **{
        f"repetition-{name}-{dtype}": _repetition(task, dtype, metric)
        for dtype in ("float32", "bfloat16")
        for name, task, metric in (
            ("cifar10", "ResNet-20 on CIFAR-10", "top-1 accuracy"),
            ("stsb", "MiniLM on the STS Benchmark", "Spearman's correlation times 100"),
        )
    },
    **{f"sweep-{dtype}": _sweep(dtype) for dtype in ("float32", "bfloat16", "int8")},
    "shrunk-float32": (
        "Shrunk to a share of the compiled time, then 2:4; channels by magnitude: time alone is measured.",
        of_shrunk,
    ),
}
"""Names of records -> what their table says, and what writes it."""
