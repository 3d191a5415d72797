"""Attention of an int8 graph in whole numbers, where that takes less time and moves the model's answer little.

A row of int8 reads the bfloat16 that other rows read, finds the ranges of each head itself, and answers as they do: so
it is another kernel of the same call, which is chosen by its time, and kept by what it does on the example, to the
answers of each call and to the model's. A weight is a byte, so that many small ones beside one large one are lost, the
more of them the longer a sequence is: what was judged holds for as many keys as the example has; of more, calls run in
bfloat16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from twofour import native
from twofour.compiler.terms import Terms
from twofour.graph import Program
from twofour.graph.base import argument, calls, value
from twofour.graph.operators import shape
from twofour.kernels.attention import attention_of_columns
from twofour.kernels.attention.cpu import one_for_all
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

MOST_OFF = 0.06
"""How far the answers of one head in one sequence of the example may be from those in bfloat16, relative to them.

Normal numbers, sharp scores too, are 0.01 to 0.04 off, real MiniLM 0.045 at most; of 128 keys of which one stands so
far above the others that they are lost, 0.07 to 0.2.
"""

SHORTER = (0.75, 0.5, 0.25)
"""Parts of the example's length at which the kinds are timed as well: bfloat16 stays below where int8 wins."""

OPTIONS = {"mask": None, "scale": None, "causal": False, "unseen": 0.0, "bytes_scale": 0.0, "bytes_zero": 0}
"""Arguments of attention behind the columns of its operands, with their defaults."""


@dataclass(frozen=True)
class AttentionChoice:
    """What became of attention in int8.

    Attributes:
        count: How many calls compute so.
        said: What the plan says of it, "" of a graph whose attention reads no bfloat16.
        limits: What else, of the lengths that it is for.
        taken: What part of the time it takes, of calls that compute so.
    """

    count: int = 0
    said: str = ""
    limits: str = ""
    taken: str = ""

    @property
    def text(self) -> str:
        """All that the plan says."""
        return "; ".join(filter(None, (self.taken, self.said, self.limits)))


def choose_attention(
    module: fx.GraphModule,
    leaves: Sequence[Any],
    terms: Terms,
    exact: Callable[[], Sequence[Any]],
    *,
    handed: bool = False,
) -> AttentionChoice:
    """Let calls of attention that are faster so compute in int8, if the answer on the example is as near then.

    Two answers of static ranges are apart by what roundings tip, whatever moved them; so both are held against what the
    layers answer without those roundings.

    Args:
        module: The rewritten graph, its heads read in place; it is changed.
        leaves: The example.
        terms: What holds for every layer.
        exact: Returns what the layers answer on exact activations.
        handed: Whether products may write bytes for it (`attention_bytes`): it is timed on those then.
    """
    every = [n for n in calls(module.graph, attention_of_columns) if value(n.args[0]).dtype is torch.bfloat16]
    if not every:
        return AttentionChoice()
    off = judged(module, every, leaves, lambda _: off_in_int8)
    alike = [node for node in every if off[node] is not None]
    if not alike:
        return AttentionChoice(0, f"in bfloat16: {_HIDING}")
    times = [_times(node, terms, handed=handed) for node in alike]
    faster = [node for node, found in zip(alike, times, strict=True) if found["int8"] < found["bfloat16"]]
    chosen = [node for node in faster if off[node] <= MOST_OFF]
    taken = _said(times, chosen or faster, every)
    if not faster:
        return AttentionChoice(0, f"in bfloat16: {taken}")
    worst = f"a head's answers on the example are off by up to {max(off[node] for node in chosen or faster):.1e}"
    if not chosen:
        return AttentionChoice(0, f"in bfloat16: {taken}, but {worst}, and {MOST_OFF} is the most")
    want = exact()
    before = distance(Program(module)(*leaves), want)
    for node in chosen:
        _set(node, int8=(_least(node, terms), shape(node.args[1])[1]))
    after = distance(Program(module)(*leaves), want)
    moved = f"with it the answer on the example is {after:.1e} from that of exact activations, {before:.1e} without"
    if after <= MORE * before + LEAST:
        return AttentionChoice(len(chosen), f"{moved}; {worst}", _limits(chosen), taken)
    for node in chosen:
        _set(node, int8=False)
    return AttentionChoice(0, f"in bfloat16: {taken}, but {moved}")


def keep_faster(module: fx.GraphModule, terms: Terms, choice: AttentionChoice) -> AttentionChoice:
    """Set calls that were timed on bytes but got none back to bfloat16, where they are slower in int8 without.

    Args:
        module: The rewritten graph, bytes handed to attention (`attention_bytes`); it is changed.
        terms: What holds for every layer.
        choice: What became of attention in int8.

    Returns:
        The same, with the times that hold.
    """
    every = calls(module.graph, attention_of_columns)
    chosen = [node for node in every if isinstance(argument(node, 12, "int8"), tuple)]
    without = [node for node in chosen if argument(node, 13, "steps") is None]
    if not without:
        return choice
    times = {node: _times(node, terms, handed=node not in without) for node in chosen}
    slower = [node for node in without if times[node]["int8"] >= times[node]["bfloat16"]]
    kept = [node for node in chosen if node not in slower]
    if not kept:
        choice = AttentionChoice(
            0, f"in bfloat16: no bytes are handed to it, and {_said(list(times.values()), [], [])}"
        )
    else:
        limits = choice.limits
        if len(slower) == len(without):
            limits = limits.removesuffix(f"; the others {_limits(chosen)}")
        taken = _said([times[node] for node in kept], kept, list(every))
        choice = replace(choice, count=len(kept), limits=limits, taken=taken)
    for node in slower:
        _set(node, int8=False)
    return choice


_HIDING = "in int8 a head has one range, and its masks hide other keys from one query than from another"


def judged(
    module: fx.GraphModule,
    every: Iterable[fx.Node],
    leaves: Sequence[Any],
    judge: Callable[[fx.Node], Callable[..., Any]],
) -> dict[fx.Node, Any]:
    """Return what is found of each call on the example by its judge, which is given the call's arguments."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    found: dict[fx.Node, Any] = {}

    def watched(node: fx.Node, judge: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def call(*given: Any, **named: Any) -> torch.Tensor:
            found[node] = judge(*given, **named)
            return attention_of_columns(*given, **named)

        return call

    for node in every:
        copies[node].target = watched(node, judge(node))
    Program(fx.GraphModule(module, graph))(*leaves)
    return found


def off_in_int8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    begins: tuple[int, int, int],
    sizes: tuple[int, int, int],
    width: int,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    *_: Any,
    **__: Any,
) -> float | None:
    """Return how far a call is off in int8, relative to it in bfloat16: the largest of a sequence's head.

    Args:
        q: (batch, queries, columns), bfloat16; arguments as in `attention_of_columns`, what follows counts for nothing.
        k: As there.
        v: As there.
        begins: As there.
        sizes: As there.
        width: As there.
        mask: As there.
        scale: As there.
        causal: As there.

    Returns:
        The largest ||in int8 - in bfloat16|| / ||in bfloat16||; None where queries see different keys.
    """
    if causal or not one_for_all(mask):
        return None
    given = q, k, v, begins, sizes, width, mask, scale
    return off_by_heads(attention_of_columns(*given), attention_of_columns(*given, int8=True), width)


def off_by_heads(want: torch.Tensor, got: torch.Tensor, width: int) -> float:
    """Return the largest ||got - want|| / ||want|| of a sequence's head, of answers (batch, queries, heads * width)."""
    want, got = (t.float().unflatten(-1, (-1, width)) for t in (want, got))
    size = torch.linalg.vector_norm(want, dim=(1, 3))
    off = torch.linalg.vector_norm(got - want, dim=(1, 3)) / size.clamp(min=torch.finfo(torch.float32).tiny)
    return float(off.nan_to_num(torch.inf).max()) if off.numel() else 0.0


def _limits(chosen: Sequence[fx.Node]) -> str:
    kept = sorted({argument(node, 12, "int8") for node in chosen})
    said = ", ".join(str(most) if least == most else f"{least} to {most}" for least, most in kept)
    return f"of {said} keys, judged on the example alone, and in bfloat16 of fewer or more"


def _said(times: Sequence[dict[str, float]], chosen: Sequence[fx.Node], every: Sequence[fx.Node]) -> str:
    own, other = (sum(found[kind] for found in times) for kind in ("int8", "bfloat16"))
    part = "" if len(chosen) in (0, len(every)) else f" {len(chosen)} of {len(every)} calls,"
    return f"in int8{part} takes {own / other:.2f} of the time that it takes in bfloat16"


def _least(node: fx.Node, terms: Terms) -> int:
    """Return the fewest keys of which int8 is the faster kind: the example's, or parts of it that were timed."""
    keys = shape(node.args[1])[1]
    least = keys
    for part in SHORTER:
        found = _times(node, terms, part)
        if int(keys * part) < 4 or found["int8"] >= found["bfloat16"]:
            break
        least = int(keys * part)
    return least


def _set(node: fx.Node, *, int8: bool | tuple[int, int]) -> None:
    rest = (argument(node, 6 + place, name, default) for place, (name, default) in enumerate(OPTIONS.items()))
    node.args = (*node.args[:6], *rest, int8)
    node.meta["label"] = IN_INT8 if int8 else "attention"


def _times(node: fx.Node, terms: Terms, part: float = 1.0, *, handed: bool = False) -> dict[str, float]:
    """Return the seconds of one call by kind: of the example's sizes, or of so small a part of its lengths.

    Where there is a mask it hides a quarter of the keys. `handed`: int8 reads bytes.
    """
    operands = node.args[:3]
    sizes = [(batch, max(1, int(rows * part)), columns) for batch, rows, columns in map(shape, operands)]
    mask = argument(node, 6, "mask")
    masked = None if mask is None else (shape(mask), value(mask).dtype)
    alike = [operands.index(operand) for operand in operands]
    rows = [native.best("attention", dtype=kind).name for kind in KINDS]
    options = argument(node, 8, "causal", False), argument(node, 10, "bytes_scale", 0.0) != 0.0
    facts = repr(("a last quarter hidden", sizes, alike, node.args[3:6], masked, options, rows, handed))
    key = terms.cache.key(f"attention/{hashlib.sha256(facts.encode()).hexdigest()[:16]}")

    def measure() -> tuple[dict[str, float], float]:
        draw = torch.Generator().manual_seed(0)
        drawn = [torch.randn(size, generator=draw, dtype=torch.float32, device="cpu").bfloat16() for size in sizes]
        hides = None if masked is None else _padding(sizes[1], masked[1])
        q, k, v = (drawn[index] for index in alike)
        begins, heads, width = cast(tuple[Any, Any, Any], node.args[3:6])
        answer: dict[str, Any] = {"causal": bool(options[0]), "bytes_scale": 0.01 * options[1]}
        answer["bytes_zero"] = 128 * options[1]
        rest = begins, heads, width, hides
        more: dict[str, Any] = {"int8": True}
        read = drawn
        if handed:  # what a unit of the scores is spreads them as those of normal numbers
            steps = torch.full((heads[0] // width + 2 * heads[2],), 1e-4, dtype=torch.float32, device="cpu")
            read, more = [t.view(torch.uint8)[..., ::2].contiguous() for t in drawn], {"steps": steps}
        one, two, three = (read[index] for index in alike)
        kinds: dict[str, Callable[[], object]] = {
            "bfloat16": lambda: attention_of_columns(q, k, v, *rest, **answer),
            "int8": lambda: attention_of_columns(one, two, three, *rest, **answer, **more),
        }
        return _raced(kinds)

    return terms.cache.times(key, KINDS, measure)


def _padding(sizes: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a mask of keys (batch, 1, 1, keys) that hides the last quarter."""
    seen = (torch.arange(sizes[1], device="cpu") < sizes[1] - sizes[1] // 4).expand(sizes[0], 1, 1, sizes[1])
    if dtype is torch.bool:
        return seen.contiguous()
    return torch.zeros(seen.shape, dtype=torch.float32, device="cpu").masked_fill(~seen, -torch.inf)


def _raced(kinds: dict[str, Callable[[], object]]) -> tuple[dict[str, float], float]:
    return race(kinds, seconds=0.2)
