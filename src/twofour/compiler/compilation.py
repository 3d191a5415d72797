"""What a compiled model was made with: the settings that its file carries, written and read in one place."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from twofour.compiler.choose import DEFAULT_TOKENS
from twofour.compiler.computing import Computing
from twofour.compiler.conv import CompiledConv
from twofour.compiler.embeddings import KINDS
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.plan import Plan
from twofour.errors import CompileError, FormatError, KernelError, cut
from twofour.graph import CLOSE, EXACT
from twofour.kernels.conv import Images
from twofour.kernels.nm_matmul import Quantization
from twofour.layers import compilation
from twofour.measure.travelling import MachineTimes, read_machines
from twofour.packing import encodings
from twofour.patterns.base import is_finite

logger = logging.getLogger("twofour.compiler")

KIND = "compiled"

MOST_TOKENS = 1 << 20
"""A file's token counts and sizes of images stay below it."""

SMOOTHED, MOST_LETTERS = "outliers smoothed", 1 << 14
"""How the line on smoothed outliers begins, and how long that of a file may be."""

MOST_COUNTS = 64
"""Token counts that a file may ask every layer to be measured at; `load` bounds the work they make."""


@dataclass(frozen=True)
class Compilation:
    """The settings of one compiled model; a file has them as JSON (docs/formats.md, section 2).

    Attributes:
        computing: Computing type and how weights are written; None of a file that was not compiled.
        memory: "fast" or "small".
        tokens: Token counts that every layer was measured at besides the example's.
        counts: Tokens that each Linear saw in the example.
        images: Images, height and width that each convolution saw in the example.
        ranges: Static input range of int8 layers.
        kept_dense: Layers that are dense since the whole model is faster so.
        machines: The times that kernels were chosen by.
        rules: Which rules of algebra a graph may be rewritten by, "exact" or "close".
        graph: The captured graph; of a file it is a stranger's, which `graph.stored.rebuild` checks.
        steps: Steps and sequences that each recurrent layer saw in the example.
        in_order: Whether convolutions answer in the memory order of their input, which the model asks for.
        answers: Least and greatest of each output of layers whose answers attention reads as bytes: float32
            (2, out), little-endian, as base64.
        embeddings: What tables of embeddings are kept in, "" where they are as the model has them.
        smoothed: The plan's line on outliers that were smoothed, "" where none were.
    """

    computing: Computing | None = None
    memory: str = "fast"
    tokens: tuple[int, ...] = tuple(DEFAULT_TOKENS)
    counts: Mapping[str, int] = field(default_factory=dict)
    images: Mapping[str, Images] = field(default_factory=dict)
    ranges: Mapping[str, Quantization] = field(default_factory=dict)
    kept_dense: tuple[str, ...] = ()
    machines: tuple[MachineTimes, ...] = ()
    rules: str = EXACT
    graph: Mapping[str, Any] | None = None
    steps: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    in_order: bool = False
    answers: Mapping[str, str] = field(default_factory=dict)
    embeddings: str = ""
    smoothed: str = ""

    @classmethod
    def of(cls, fast: nn.Module, plan: Plan, computing: Computing) -> Compilation:
        """Return the settings of a model that was compiled by a plan."""
        layers = list(fast.named_modules())
        quantized = [
            (name, module.problem.quantization)
            for name, module in layers
            if isinstance(module, CompiledLinear | CompiledConv)
        ]
        return cls(
            computing,
            plan.memory,
            plan.tokens,
            dict(plan.counts),
            {**plan.images, **{name: module.images for name, module in layers if isinstance(module, CompiledConv)}},
            {name: found for name, found in quantized if not found.dynamic},
            plan.kept_dense,
            plan.machines,
            plan.rules,
            plan.graph,
            dict(plan.steps),
            any(module.in_order for _, module in layers if isinstance(module, CompiledConv)),
            _answers(layers) if plan.account is not None and plan.account.engine == "graph" else {},
            plan.embeddings,
            next((note for note in plan.notes if note.startswith(SMOOTHED)), ""),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a file has them; what is empty is left out."""
        computing = self.computing or Computing()
        settings = {"kind": KIND, "memory": self.memory, "tokens": list(self.tokens), "dtype": computing.dtype}
        if computing.packed.groups:
            settings |= {"group": computing.group, "symmetric": computing.symmetric}
        more = {
            "counts": dict(self.counts),
            "kept_dense": list(self.kept_dense),
            "times": [machine.to_json() for machine in self.machines],
            "images": {name: list(images) for name, images in self.images.items()},
            "steps": {name: list(steps) for name, steps in self.steps.items()},
            "rules": "" if self.rules == EXACT else self.rules,
            "ranges": {name: [found.x_scale, found.x_zero] for name, found in self.ranges.items()},
            "graph": dict(self.graph or {}),
            "order": "input" if self.in_order else "",
            "answers": dict(self.answers),
            "embeddings": self.embeddings,
            "smoothed": self.smoothed,
        }
        return settings | {key: value for key, value in more.items() if value}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], file: Any) -> Compilation:
        """Read the settings of a file. They are advice: what is no such setting is left out, the tensors decide.

        Args:
            settings: A stranger's JSON.
            file: For messages.

        Raises:
            FormatError: The range of an int8 layer's input is impossible: without it the layer would answer otherwise.
        """
        dtype = encodings.find(settings.get("dtype"))
        return cls(
            _computing(settings),
            "small" if settings.get("memory") == "small" else "fast",
            _tokens(settings.get("tokens"), file),
            {name: n for name, n in _entries(settings, "counts") if type(n) is int and n > 0},
            {name: (n[0], n[1], n[2]) for name, n in _entries(settings, "images") if _are_sizes(n, 3)},
            dict(_ranges(settings, file)) if dtype is not None and dtype.rounds_inputs else {},
            tuple(name for name in _list(settings.get("kept_dense")) if isinstance(name, str)),
            read_machines(settings.get("times")),
            CLOSE if settings.get("rules") == CLOSE else EXACT,
            found if isinstance(found := settings.get("graph"), dict) else None,
            {name: (n[0], n[1]) for name, n in _entries(settings, "steps") if _are_sizes(n, 2)},
            settings.get("order") == "input",
            {name: text for name, text in _entries(settings, "answers") if isinstance(text, str)},
            found if (found := settings.get("embeddings")) in KINDS else "",
            _smoothed(settings.get("smoothed")),
        )


def _smoothed(text: object) -> str:
    """Return the line of a file, "" where it is none; nothing is done by it."""
    known = isinstance(text, str) and text.startswith(SMOOTHED) and text.isprintable()
    return cut(str(text), MOST_LETTERS) if known else ""


def _answers(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    return {
        name: base64.b64encode(module.answers.numpy().astype("<f4").tobytes()).decode()
        for name, module in layers
        if isinstance(module, CompiledLinear) and module.answers is not None
    }


def answers_of(text: str | None) -> Tensor | None:
    """Return the ranges of outputs that a file has (2, out), None of what is none: attention reads floats then."""
    try:
        numbers = np.frombuffer(base64.b64decode(text or "", validate=True), "<f4")
    except ValueError:
        return None
    ends = torch.from_numpy(numbers.astype(np.float32))
    if not ends.numel() or ends.numel() % 2 or not is_finite(ends):
        return None
    ends = ends.view(2, -1)
    return ends if bool((ends[0] <= ends[1]).all()) else None


def compilation_of(model: nn.Module) -> Compilation | None:
    """Return the settings of a compiled model, None of any other."""
    found = compilation(model)
    return found if isinstance(found, Compilation) else None


def _computing(settings: Mapping[str, Any]) -> Computing | None:
    fields = {key: settings[key] for key in ("dtype", "group", "symmetric") if key in settings}
    try:
        return Computing(**fields) if "dtype" in fields else None
    except (CompileError, TypeError):  # unknown or unhashable
        return None


def _tokens(found: Any, file: Any) -> tuple[int, ...]:
    counts = _list(found)
    if 0 < len(counts) <= MOST_COUNTS and all(type(n) is int and 0 < n < MOST_TOKENS for n in counts):
        return tuple(counts)
    if found is not None:
        limits = f"a file may ask for {MOST_COUNTS} below {MOST_TOKENS}; load(..., tokens=...) for any"
        logger.warning("%s: its %d token counts are not measured: %s", file, len(counts), limits)
    return tuple(DEFAULT_TOKENS)


def _are_sizes(found: Any, count: int) -> bool:
    return (
        isinstance(found, list) and len(found) == count and all(type(n) is int and 0 < n < MOST_TOKENS for n in found)
    )


def _ranges(settings: Mapping[str, Any], file: Any) -> Iterable[tuple[str, Quantization]]:
    for layer, found in _entries(settings, "ranges"):
        try:
            scale, zero = found
            if type(scale) is not float or type(zero) is not int:
                raise TypeError(type(scale), type(zero))
            yield layer, Quantization(scale, zero)
        except (KernelError, TypeError, ValueError) as error:
            raise FormatError(
                "an int8 layer has an impossible input range",
                got=f"{file}: `{layer}` has {cut(repr(found), 40)}",
                wanted="a scale, and the whole number from 0 to 255 that stands for zero",
                remedy="write the file again with twofour.save",
                code="settings-range",
            ) from error


def _entries(settings: Mapping[str, Any], key: str) -> Iterable[tuple[str, Any]]:
    found = settings.get(key)
    return found.items() if isinstance(found, dict) else ()


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []
