"""Attention of an int8 graph in whole numbers, where that takes less time and moves the model's answer little.

A row of int8 reads the bfloat16 that other rows read, finds the ranges of each head itself, and answers as they do: so
it is another kernel of the same call, which is chosen by its time, and kept by what it does to the answer on the
example.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from twofour import native
from twofour.compiler.terms import Terms
from twofour.graph import Program
from twofour.graph.base import argument, calls, value
from twofour.graph.operators import shape
from twofour.kernels.attention import attention_of_columns
from twofour.measure.chooser import race
from twofour.measure.distance import distance

IN_INT8 = "attention in int8"
"""What the account calls it: a rewrite that rounds."""

KINDS = ("bfloat16", "int8")
"""What attention is timed as."""

MORE = 1.1
"""How many times as far from the layers on exact activations the answer may be with attention in int8."""

LEAST = 2e-3
"""How much further besides: what bfloat16 is rounded by."""

_OPTIONS = {"mask": None, "scale": None, "causal": False, "unseen": 0.0, "bytes_scale": 0.0, "bytes_zero": 0}
"""Arguments of attention behind the columns of its operands, with their defaults."""


@dataclass(frozen=True)
class AttentionChoice:
    """What became of attention in int8.

    Attributes:
        count: How many calls compute so.
        said: What the plan says of it, "" of a graph whose attention reads no bfloat16.
    """

    count: int = 0
    said: str = ""


def choose_attention(
    module: fx.GraphModule, leaves: Sequence[Any], terms: Terms, exact: Callable[[], Sequence[Any]]
) -> AttentionChoice:
    """Let calls of attention that are faster so compute in int8, if the answer on the example is as near then.

    Two answers of static ranges are apart by what roundings tip, whatever moved them; so both are held against what the
    layers answer without those roundings.

    Args:
        module: The rewritten graph, its heads read in place; it is changed.
        leaves: The example.
        terms: What holds for every layer.
        exact: Returns what the layers answer on exact activations.
    """
    every = [n for n in calls(module.graph, attention_of_columns) if value(n.args[0]).dtype is torch.bfloat16]
    if not every:
        return AttentionChoice()
    times = [_times(node, terms) for node in every]
    chosen = [node for node, found in zip(every, times, strict=True) if found["int8"] < found["bfloat16"]]
    taken = _said(times, chosen, every)
    if not chosen:
        return AttentionChoice(0, f"in bfloat16: {taken}")
    want = exact()
    before = distance(Program(module)(*leaves), want)
    for node in chosen:
        _set(node, int8=True)
    after = distance(Program(module)(*leaves), want)
    moved = f"with it the answer on the example is {after:.1e} from that of exact activations, {before:.1e} without"
    if after <= MORE * before + LEAST:
        return AttentionChoice(len(chosen), f"{taken}; {moved}")
    for node in chosen:
        _set(node, int8=False)
    return AttentionChoice(0, f"in bfloat16: {taken}, but {moved}")


def _said(times: Sequence[dict[str, float]], chosen: Sequence[fx.Node], every: Sequence[fx.Node]) -> str:
    own, other = (sum(found[kind] for found in times) for kind in ("int8", "bfloat16"))
    part = "" if len(chosen) in (0, len(every)) else f" {len(chosen)} of {len(every)} calls,"
    return f"in int8{part} takes {own / other:.2f} of the time that it takes in bfloat16"


def _set(node: fx.Node, *, int8: bool) -> None:
    rest = (argument(node, 6 + place, name, default) for place, (name, default) in enumerate(_OPTIONS.items()))
    node.args = (*node.args[:6], *rest, int8)
    node.meta["label"] = IN_INT8 if int8 else "attention"


def _times(node: fx.Node, terms: Terms) -> dict[str, float]:
    """Return the seconds of one call of the example's sizes, by kind."""
    operands = node.args[:3]
    sizes = [shape(operand) for operand in operands]
    mask = argument(node, 6, "mask")
    masked = None if mask is None else (shape(mask), value(mask).dtype)
    alike = [operands.index(operand) for operand in operands]
    rows = [native.best("attention", dtype=kind).name for kind in KINDS]
    options = argument(node, 8, "causal", False), argument(node, 10, "bytes_scale", 0.0) != 0.0
    facts = repr((sizes, alike, node.args[3:6], masked, options, rows))
    key = terms.cache.key(f"attention/{hashlib.sha256(facts.encode()).hexdigest()[:16]}")

    def measure() -> tuple[dict[str, float], float]:
        draw = torch.Generator().manual_seed(0)
        drawn = [torch.randn(size, generator=draw, dtype=torch.float32, device="cpu").bfloat16() for size in sizes]
        hides = None if masked is None else torch.zeros(masked[0], dtype=torch.float32, device="cpu")
        if hides is not None and masked is not None and masked[1] is torch.bool:
            hides = hides == 0
        q, k, v = (drawn[index] for index in alike)
        begins, heads, width = cast(tuple[Any, Any, Any], node.args[3:6])
        answer: dict[str, Any] = {"causal": bool(options[0]), "bytes_scale": 0.01 * options[1]}
        answer["bytes_zero"] = 128 * options[1]
        kinds: dict[str, Callable[[], object]] = {
            kind: lambda int8=kind == "int8": attention_of_columns(
                q, k, v, begins, heads, width, hides, **answer, int8=int8
            )
            for kind in KINDS
        }
        return _raced(kinds)

    return terms.cache.times(key, KINDS, measure)


def _raced(kinds: dict[str, Callable[[], object]]) -> tuple[dict[str, float], float]:
    return race(kinds, seconds=0.2)
