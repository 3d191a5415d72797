"""Which shapes and patterns each runtime accepts: one table, whose rows for our CPU kernels are read from theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from twofour.checker.weights import RECURRENT
from twofour.kernels import convolutions, sparse_products
from twofour.kernels.base import Row
from twofour.packing import encodings
from twofour.packing.encodings import GROUPS
from twofour.patterns import parse

FAMILIES = ("block", "hybrid")
"""Patterns of rows that take all of a kind, as the kernel table names them: `Pattern.family`."""


@dataclass(frozen=True)
class Rule:
    """What one runtime asks of a sparse weight of one type.

    Attributes:
        runtime: Name for the reader.
        dtypes: Types the rule holds for.
        rows: The number of outputs must be a multiple of this.
        columns: The reduction axis must be a multiple of this.
        pattern: Pattern that the runtime's kernels want; "block" and "hybrid" for all of their kind.
        kinds: Layer kinds that the runtime runs sparse; the empty tuple means every kind.
        source: Where the numbers come from.
        worth: Rows and columns from which on the runtime's sparse kernels tend to beat its dense ones; 0: not known.
        hints: What else to know of a kind.
    """

    runtime: str
    dtypes: str
    rows: int
    columns: int
    pattern: str
    kinds: tuple[str, ...]
    source: str
    worth: int = 0
    hints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """What a rule says about one weight.

    Attributes:
        runtime: Name of the runtime.
        dtypes: Types the verdict holds for.
        aligned: The kind and the shape are accepted.
        ready: Aligned, and the weight obeys the pattern as it is.
        reason: Why not, or what is met.
        source: Where the rule comes from.
    """

    runtime: str
    dtypes: str
    aligned: bool
    ready: bool
    reason: str
    source: str


_LINEAR = ("linear",)
_PRODUCTS = ("linear", "hf_conv1d", "attention_in", "attention_out", "gemm", "matmul")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_TORCH = "torch 2.13 sparse/semi_structured.py, _DTYPE_SHAPE_CONSTRAINTS"
_TENSORRT = (
    "TensorRT developer guide, structured sparsity: in every 4 input channels of an output and a kernel position"
)


def _ours(table: Iterable[Row], kinds: tuple[str, ...], hints: Mapping[str, str] | None = None) -> Iterator[Rule]:
    """Yield the rules of our sparse kernels on a CPU: types with the same pattern and multiples share one."""
    types: dict[tuple[str, str, int], dict[str, None]] = {}
    for row in table:
        if row.sparse and row.device == "cpu" and row.dtype != "any":
            # Scales of groups ask for whole groups; blocks bring their own sizes.
            least = parse(row.pattern).group if row.form is not None else 1
            columns = min(encodings.get(row.dtype).groups, default=least)
            types.setdefault((row.operation, row.pattern, columns), {})[row.dtype] = None
    order = [encoding.name for encoding in encodings.known()]
    for (operation, pattern, columns), there in types.items():
        dtypes = " ".join(sorted(there, key=order.index))
        source = f"kernels/{operation}: the rest is padded inside"
        if columns >= min(GROUPS):
            source = f"kernels/{operation}: {columns} inputs or more share a scale"
        said = dict.fromkeys(kinds, hints[pattern]) if hints and pattern in hints else {}
        yield Rule("twofour CPU", dtypes, 1, columns, pattern, kinds, source, hints=said)


RULES: tuple[Rule, ...] = (
    Rule("torch cuSPARSELt", "float16 bfloat16", 16, 16, "2:4", _LINEAR, _TORCH),
    Rule("torch cuSPARSELt", "int8 float8", 32, 32, "2:4", _LINEAR, _TORCH),
    Rule("torch CUTLASS", "float16 bfloat16", 32, 64, "2:4", _LINEAR, _TORCH),
    Rule("torch CUTLASS", "int8", 16, 128, "2:4", _LINEAR, _TORCH),
    # For 4-byte values torch's own conversion writes 1:2, the form of tf32.
    Rule("torch CUTLASS", "float32", 32, 32, "1:2", _LINEAR, f"{_TORCH}; _semi_structured_conversions.py"),
    Rule(
        "TensorRT",
        "float16 int8",
        1,
        4,
        "2:4",
        (*_PRODUCTS, *_CONVOLUTIONS),
        f"{_TENSORRT}; 256 channels: NVIDIA/TensorRT#3849",
        worth=256,
        hints={"matmul": "TensorRT 8 took Gemm alone (NVIDIA/TensorRT#2271), 10.3 takes MatMul (onnxsim#1764)"},
    ),
    *_ours(sparse_products(), (*_PRODUCTS, *RECURRENT)),
    *_ours(convolutions(), ("conv1d", "conv2d"), {"block": "blocks have kernels for 1x1 convolutions alone"}),
)
"""The rules of all runtimes. Recurrent layers run the products of the kernel table, so its rows are theirs too."""


def fits(kind: str, rows: int, columns: int, satisfies: Collection[str], broken: int = 0) -> tuple[Fit, ...]:
    """Judge a weight of `kind` with `rows` outputs and a reduction axis of `columns` by every runtime's rules.

    A rule for other kinds is left out where its runtime has one for `kind`, one for other patterns where the weight
    meets another of its runtime and types, and one for blocks or hybrids where it is
    none.

    Args:
        kind: Kind of weight.
        rows: Outputs.
        columns: Reduction axis.
        satisfies: Patterns that its values obey.
        broken: How many of them are NaN or infinite.
    """
    served = {rule.runtime for rule in RULES if kind in rule.kinds}
    found = [
        (rule, _fit(rule, kind, rows, columns, satisfies, broken))
        for rule in RULES
        if kind in rule.kinds or not rule.kinds or rule.runtime not in served
        if rule.pattern not in FAMILIES or _obeys(rule, satisfies)
    ]
    met = {(rule.runtime, rule.dtypes) for rule, _ in found if _obeys(rule, satisfies)}
    return tuple(fit for rule, fit in found if _obeys(rule, satisfies) or (rule.runtime, rule.dtypes) not in met)


def _obeys(rule: Rule, satisfies: Collection[str]) -> bool:
    """Whether a weight of these patterns has the one that a rule wants."""
    return any(rule.pattern in (name, parse(name).family) for name in satisfies)


def _fit(rule: Rule, kind: str, rows: int, columns: int, satisfies: Collection[str], broken: int) -> Fit:
    even = rows % rule.rows == columns % rule.columns == 0
    served = not rule.kinds or kind in rule.kinds
    aligned = served and even
    ready = aligned and _obeys(rule, satisfies) and not broken
    reason = f"({rows}, {columns}) is {'' if even else 'not '}a multiple of ({rule.rows}, {rule.columns})"
    if not served:
        reason = f"has no sparse {kind}"
    if aligned and broken:
        reason += f"; {broken} values are NaN or infinite"
    elif aligned and not ready:
        reason += f"; the values are not {rule.pattern}"
    if aligned and min(rows, columns) < rule.worth:
        reason += f"; its dense kernels tend to win below {rule.worth} channels"
    if aligned and kind in rule.hints:
        reason += f"; {rule.hints[kind]}"
    return Fit(rule.runtime, rule.dtypes, aligned, ready, reason, rule.source)
