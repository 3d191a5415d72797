"""Language models of few bits on one thread, in tokens a second, beside int8 and float32.

Ternary weights and 8-bit inputs are BitNet b1.58's (Ma et al. 2024, arXiv 2402.17764). All are compiled, and torch's
float32 stands beside them. `gpt` reads 64 tokens at once through four layers of width 128: the net that
`experiments/run.py low-bits shakespeare` trains has three such. `bitnet-decode` makes one token behind 128 others
through four of the 24 layers of BitNet's 700M model (width 1536, table 7 there), without embedding and head: the time
of a token grows with the layers. Random weights: time does not ask for trained ones. First and last layer have 8 bits.
The compiled answer is compared with that of 64-bit whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import twofour
from cases.bits import widths_of
from cases.columns import headed
from cases.records import machine_line
from models import Subject
from models.llama import LlamaStep
from twofour import measure, quantization
from twofour.errors import DataError, MeasureError
from twofour.measure import Record
from twofour.measure.distance import distance

WIDTHS = ("w1.58a8",)
INT8, FLOAT, EAGER, OURS = "twofour int8", "twofour float32", "torch float32", "twofour"
LAYERS, CONTEXT = 4, 128
LARGEST_ERROR = 0.02
"""A graph rounds what stands between layers otherwise in the last bit, so that a few inputs become the next code."""


class GptBlock(nn.Module):
    """Causal attention and a perceptron of four times the width, each behind a LayerNorm (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def gpt() -> Subject:
    """Return four layers of width 128 on 64 tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(*(GptBlock(128, 4) for _ in range(LAYERS))).eval().requires_grad_(False)
    return Subject("gpt", f"random weights, {LAYERS} layers, no head", model, (torch.randn(1, 64, 128),), 1, 64)


def bitnet_decode() -> Subject:
    """Return one step of BitNet 700M's layers: width 1536, 16 heads, 4096 hidden units."""
    torch.manual_seed(0)
    model = LlamaStep(LAYERS, 1536, 4096, 16, 16).eval().requires_grad_(False)
    cache = torch.randn(2, LAYERS, 1, 16, CONTEXT, 96)
    inputs = torch.randn(1, 1, 1536), torch.tensor([CONTEXT]), cache[0].clone(), cache[1].clone()
    return Subject("bitnet-decode", f"random weights, {LAYERS} of 24 layers, context {CONTEXT}", model, inputs, 1, 1)


NETS: dict[str, Callable[[], Subject]] = {"gpt": gpt, "bitnet-decode": bitnet_decode}


def cells(nets: Sequence[str], widths: Sequence[str] = WIDTHS) -> list[dict[str, object]]:
    """List the cells.

    Raises:
        DataError: A net or a pair of widths is not known.
    """
    if unknown := [name for name in nets if name not in NETS]:
        raise DataError(f"the net {unknown[0]!r} is not known", got=unknown[0], wanted=", ".join(NETS))
    for text in widths:
        widths_of(text)
    facts = {"case": "bits-lm", "threads": 1}
    return [{**facts, "model": name, "dtype": text} for name in nets for text in widths]


class Bench:
    """Measures cells, keeping the compiled controls of the net it is at."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.at = seconds, ""
        self.peers: dict[str, Callable[[], Any]] = {}

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        name, text = str(cell["model"]), str(cell["dtype"])
        subject = NETS[name]()
        with torch.inference_mode():
            if self.at != name:
                self.peers = _controls(subject)
                self.at = name
            return measure.compare(
                {OURS: _ternary(subject, text), **self.peers},
                baseline=(INT8, FLOAT, EAGER),
                seconds=self.seconds,
                threads=1,
                clock="thread",
                noise=True,
                meta={**cell, "tokens": subject.tokens, "note": subject.note},
            )


def _controls(subject: Subject) -> dict[str, Callable[[], Any]]:
    made = {
        name: twofour.compile(subject.model, subject.inputs, dtype=dtype)
        for name, dtype in ((INT8, "int8"), (FLOAT, "float32"))
    }
    return {name: partial(model, *subject.inputs) for name, model in (*made.items(), (EAGER, subject.model))}


def _ternary(subject: Subject, text: str) -> Callable[[], Any]:
    """Return a call of the net in few bits, compiled, after comparing its answer with that of whole numbers."""
    found = widths_of(text)
    assert found.inputs is not None
    model = twofour.quantize(NETS[subject.name]().model, found.weights.name, found.inputs.name)
    fast = twofour.compile(model, subject.inputs)
    with quantization.in_whole_numbers(model):
        want = _first(model(*subject.inputs))
    got = _first(fast(*subject.inputs))
    if (error := distance([got], [want])) > LARGEST_ERROR:
        raise MeasureError(f"{subject.name} is wrong and is not timed", got=f"an error of {error:.1e}, {text}")
    return partial(fast, *subject.inputs)


def _first(answer: Any) -> Tensor:
    return answer[0] if isinstance(answer, tuple) else answer


def show(records: Sequence[Record], console: Console) -> None:
    """Print a line per net and pair of widths: tokens a second of each, and the ratios to ours."""
    names = INT8, FLOAT, EAGER
    table = headed(("net", "widths", "tokens", OURS, *(cell for name in names for cell in (name, "ratio"))), words=2)
    for record in records:
        tokens, ours = int(str(record.meta["tokens"])), record.median(OURS)
        table.add_row(
            str(record.meta["model"]),
            str(record.meta["dtype"]),
            str(tokens),
            f"{tokens / ours:,.0f}/s",
            *(
                cell
                for name in names
                for cell in (f"{tokens / record.median(name):,.0f}/s", f"{record.median(name) / ours:.2f}x")
            ),
        )
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
