"""Which shapes and patterns each runtime accepts: one table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


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
    """

    runtime: str
    dtypes: str
    rows: int
    columns: int
    pattern: str
    kinds: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Fit:
    """What a rule says about one weight.

    Attributes:
        runtime: Name of the runtime.
        dtypes: Types the verdict holds for.
        aligned: The kind and the shape are accepted.
        ready: Aligned, and the weight obeys the pattern as it is.
        reason: Why not, or what is met.
    """

    runtime: str
    dtypes: str
    aligned: bool
    ready: bool
    reason: str


_LINEAR = ("linear",)
_PRODUCTS = ("linear", "hf_conv1d", "attention_in", "attention_out")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_TORCH = "torch 2.13 sparse/semi_structured.py, _DTYPE_SHAPE_CONSTRAINTS"
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
        "TensorRT 8 developer guide, structured sparsity",
    ),
    Rule("twofour CPU", "float32", 1, 4, "2:4", _PRODUCTS, "kernels/nm_matmul: rows and tokens are padded inside"),
)


def fit(rule: Rule, kind: str, rows: int, columns: int, satisfies: Collection[str]) -> Fit:
    """Judge a weight of `kind` with `rows` outputs and a reduction axis of `columns` by one rule."""
    reason = f"({rows}, {columns}) is a multiple of ({rule.rows}, {rule.columns})"
    aligned = False
    if rule.kinds and kind not in rule.kinds:
        reason = f"has no sparse {kind}"
    elif rows % rule.rows or columns % rule.columns:
        reason = f"({rows}, {columns}) is not a multiple of ({rule.rows}, {rule.columns})"
    else:
        aligned = True
    ready = aligned and rule.pattern in satisfies
    if aligned and not ready:
        reason += f"; the values are not {rule.pattern}"
    return Fit(rule.runtime, rule.dtypes, aligned, ready, reason)
