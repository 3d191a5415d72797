"""Which shapes and patterns each runtime accepts: one table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rule:
    """What one runtime asks of a sparse weight of one type.

    Attributes:
        runtime: Name for the reader.
        dtypes: Types the rule holds for.
        rows: The number of outputs must be a multiple of this.
        columns: The reduction axis must be a multiple of this.
        pattern: Pattern that the runtime's kernels want.
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
    Rule(
        "twofour CPU", "float32 bfloat16 int8", 1, 4, "2:4", _PRODUCTS, "kernels/nm_matmul: the rest is padded inside"
    ),
    Rule("twofour CPU", "int4", 1, 32, "2:4", _PRODUCTS, "packing/encodings/int4.py: 32 inputs or more share a scale"),
    Rule("twofour CPU", "float32", 1, 4, "2:4", ("conv1d", "conv2d"), "kernels/nm_conv: the rest is padded inside"),
)


def fits(kind: str, rows: int, columns: int, satisfies: Collection[str], broken: int = 0) -> tuple[Fit, ...]:
    """Judge a weight of `kind` with `rows` outputs and a reduction axis of `columns` by every runtime's rules.

    A rule for other kinds is left out where its runtime has one for `kind`.

    Args:
        kind: Kind of weight.
        rows: Outputs.
        columns: Reduction axis.
        satisfies: Patterns that its values obey.
        broken: How many of them are NaN or infinite.
    """
    served = {rule.runtime for rule in RULES if kind in rule.kinds}
    return tuple(
        _fit(rule, kind, rows, columns, satisfies, broken)
        for rule in RULES
        if kind in rule.kinds or not rule.kinds or rule.runtime not in served
    )


def _fit(rule: Rule, kind: str, rows: int, columns: int, satisfies: Collection[str], broken: int) -> Fit:
    even = rows % rule.rows == columns % rule.columns == 0
    served = not rule.kinds or kind in rule.kinds
    aligned = served and even
    ready = aligned and rule.pattern in satisfies and not broken
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
