"""Outliers of a normalisation's answer are smoothed before int8 rounds it: by channel, folded into what stands around.

A few channels of an activation may be a hundred times as wide as the others, and one scale rounds them all. Xiao et
al. 2023 (SmoothQuant, arXiv 2211.10438), equation 4, divide channel j by s_j = max|X_j|^a / max|W_j|^(1 - a) and
multiply the weights' columns by it, which is the same product. Here a is searched for each normalisation on the data,
by the error of what its layers answer, and s is taken only where that is less.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.calibration.batches import items, read
from twofour.compiler.against_dense import Replaced
from twofour.compiler.computing import Computing
from twofour.compiler.norm_readers import Readers
from twofour.compiler.plan import Plan
from twofour.compiler.replaceable import attention_parts, is_linear, refusal
from twofour.compiler.terms import Terms
from twofour.errors import CompileError
from twofour.kernels.quantization import Quantization
from twofour.layers import is_hugging_face_conv1d
from twofour.measure.distance import distance

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""What is tried; 0.5 is the paper's choice for most models."""

BATCHES = 16
"""Batches that errors are compared on, the first of the data; ranges are taken from all."""

ROWS = 128
"""Rows of each normalisation's answer by which errors are compared, of as many batches as there are."""

WORTH = 0.8
"""Part of the error before that smoothing must leave at most: less is within what other data would find."""

SAME = 1e-4
"""Relative difference of a model's answers in float32 beyond which a fold changed what it computes."""


@dataclass(eq=False)
class _Group:
    """A normalisation and the layers that read its answer.

    Attributes:
        name: Of the normalisation.
        norm: The module.
        readers: The layers by name.
        most: float32 (width,), the largest size of each channel of its answer on the data.
        rows: Some of its answers (count, width).
        alpha: What was chosen, None for nothing.
        before: Relative error of the layers' answers in int8 as they are.
        after: The same with the scales of `alpha`.
        why: What speaks against scales, "" for nothing.
    """

    name: str
    norm: Any
    readers: dict[str, Any]
    most: Tensor
    rows: list[Tensor] = field(default_factory=list)
    alpha: float | None = None
    before: float = 0.0
    after: float = 0.0
    why: str = ""

    def weights(self) -> Tensor:
        """Return the weights of the layers (all their outputs, width)."""
        return torch.cat([_rows_of(layer).float() for layer in self.readers.values()])

    def scales(self, alpha: float) -> Tensor:
        """Return s (width,) by equation 4; channels without a value or a weight keep 1.

        In a model of short floats they are powers of two, by which products are exact.
        """
        wide = self.weights().abs().amax(0)
        found = self.most.pow(alpha) / wide.pow(1 - alpha)
        if any(part.dtype in (torch.bfloat16, torch.float16) for part in self.parameters()):
            found = found.log2().round().exp2()  # exact in short types, which would round other scales' products
        return torch.where((self.most > 0) & (wide > 0) & torch.isfinite(found) & (found > 0), found, 1.0)

    def fold(self, model: nn.Module) -> None:
        """Divide what the normalisation of a copy of the model answers, and multiply the columns that read it."""
        assert self.alpha is not None
        scales = self.scales(self.alpha)
        norm, layers = self._inside(model)
        for part in (norm.weight, getattr(norm, "bias", None)):
            if part is not None:
                part.div_(scales.to(part.dtype))
        for layer in layers:
            layer.weight.mul_((scales[:, None] if is_hugging_face_conv1d(layer) else scales).to(layer.weight.dtype))

    def unfold(self, model: nn.Module) -> None:
        """Give a copy of the model the values back that it had."""
        norm, layers = self._inside(model)
        for part, value in zip(_parameters(norm, layers), self.parameters(), strict=True):
            part.copy_(value)

    def parameters(self) -> list[Tensor]:
        """Return what `fold` writes to, of the model itself."""
        return _parameters(self.norm, self.readers.values())

    def _inside(self, model: nn.Module) -> tuple[Any, list[Any]]:
        return model.get_submodule(self.name), [model.get_submodule(name) for name in self.readers]

    def search(self) -> None:
        """Choose alpha by the error on the rows that were kept; none where it does not help."""
        x, w = torch.cat(self.rows)[:ROWS], self.weights()
        want = x @ w.T
        off = {alpha: _error(x / s, w * s, want) for alpha in ALPHAS for s in [self.scales(alpha)]}
        self.before, best = _error(x, w, want), min(off, key=off.__getitem__)
        if off[best] <= WORTH * self.before:
            self.alpha, self.after = best, off[best]


def _error(x: Tensor, w: Tensor, want: Tensor) -> float:
    """Return the relative error of x w^T where both are rounded to 8 bits: x by its range, w by that of each row."""
    low, high = (extreme.item() for extreme in x.aminmax())
    if low == high == 0.0:
        return 0.0
    ranged = Quantization.of_range(min(low, 0.0), max(high, 0.0))
    assert ranged.x_scale is not None
    step = w.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    rounded = ((x / ranged.x_scale).round() + ranged.x_zero).clamp(0, 255) - ranged.x_zero
    return distance([(rounded * ranged.x_scale) @ ((w / step).round() * step).T], [want])


def _parameters(norm: Any, layers: Iterable[Any]) -> list[Tensor]:
    own = [part for part in (norm.weight, getattr(norm, "bias", None)) if part is not None]
    return [*own, *(layer.weight for layer in layers)]


def _rows_of(layer: Any) -> Tensor:
    weight = layer.weight.detach()
    return weight.t() if is_hugging_face_conv1d(layer) else weight


@dataclass(frozen=True)
class Smoothed:
    """A model for int8, and what was done for it.

    Attributes:
        model: The one that was given, or a copy with folded scales: the same function.
        data: What can be read in place of the data that were given.
        groups: What was looked at.
    """

    model: nn.Module
    data: Iterable[Any] | None
    groups: Sequence[_Group] = ()

    def take_back(self, fast: nn.Module) -> None:
        """Take scales out again, of the compiled model too, where none of the layers that read them is compiled."""
        for group in self._folded():
            if not any(isinstance(fast.get_submodule(name), Replaced) for name in group.readers):
                group.unfold(self.model)
                group.unfold(fast)
                group.why = "the layers that read it are dense again"

    def noted(self, plan: Plan) -> Plan:
        """Return the plan with what was smoothed, and what was left and why."""
        names = [f"`{g.name}` {g.alpha} {g.before:.1e} {g.after:.1e}" for g in self._folded()]
        reasons = dict.fromkeys(g.why for g in self.groups if g.why)
        left = [f"{', '.join(f'`{g.name}`' for g in self.groups if g.why == why)}: {why}" for why in reasons]
        beside = f"left {'; '.join(left)}" if left else ""
        if names:
            found = f"outliers smoothed (alpha, error of their layers before and after): {', '.join(names)}"
            return plan.with_note(f"{found}; {beside}" if beside else found)
        if beside:
            return plan.with_note(f"outliers: not smoothed; {beside}")
        return plan.with_note(f"outliers: none, of {len(self.groups)} normalisations") if self.groups else plan

    def _folded(self) -> list[_Group]:
        return [group for group in self.groups if group.alpha is not None and not group.why]


def looks_for_outliers(smooth: object, terms: Terms, data: object) -> bool:
    """Return whether outliers are looked for.

    Raises:
        CompileError: `smooth` is neither "auto" nor a bool, or True without int8 and data.
    """
    dtype = terms.computing.dtype
    possible = dtype == "int8" and data is not None
    if smooth not in ("auto", True, False) or (smooth is True and not possible):
        raise CompileError(
            "outliers cannot be smoothed so",
            got=f"smooth={smooth!r}, dtype={dtype!r}, {'no data' if data is None else 'data'}",
            wanted='"auto", True or False; True with dtype="int8" and data',
            remedy='leave it out, or pass dtype="int8" and data= too: it is done where it lowers the error',
        )
    return bool(smooth) and possible


def smoothed(model: nn.Module, data: Any, computing: Computing) -> Smoothed:
    """Return a model whose outliers are smoothed where that lowers the error of int8 on the data.

    Args:
        model: In evaluation mode; it stays as it is.
        data: As for static ranges; an iterator is read once and kept.
        computing: How the compiled layers write their weights.
    """
    data = list(data) if isinstance(data, Iterator) else data
    groups = _groups(model, data, computing)
    for group in groups:
        if not group.why:
            group.search()
    wanted = [group for group in groups if group.alpha is not None and not group.why]
    batches = [read(model, item).inputs for item in islice(items(data), BATCHES)]
    return Smoothed(_folded(model, wanted, batches) if wanted else model, data, groups)


def _groups(model: nn.Module, data: Any, computing: Computing) -> list[_Group]:
    """Return the normalisations whose answers layers read, each with the reason that it is left for, if any."""
    norms = {name: module for name, module in model.named_modules() if _is_norm(module)}
    readers = Readers(model, norms, {name: module for name, module in model.named_modules() if is_linear(module)})
    most: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    each = -(-ROWS // max(1, sum(1 for _ in islice(items(data), BATCHES))))

    def answered(name: str, y: Tensor) -> None:
        most[name] = torch.maximum(most[name], _most(y)) if name in most else _most(y)
        if len(rows.setdefault(name, [])) < BATCHES:
            rows[name].append(_some(y, each))

    for item in items(data):
        readers.run(read(model, item).inputs, answered)
    groups = [_Group(name, norms[name], layers, most[name], rows[name]) for name, layers in readers.of.items()]
    inside = attention_parts(model)
    for group in groups:
        refused = ((name, refusal(layer, name in inside, computing)) for name, layer in group.readers.items())
        dense = next((f"`{name}` stays dense: {why}" for name, why in refused if why), "")
        finite = bool(torch.isfinite(group.most).all())
        group.why = readers.obstacle(group.name) or dense or ("" if finite else "its answer is not finite on the data")
    return groups


def _is_norm(module: nn.Module) -> bool:
    """Tell whether a module may be a normalisation: a gain for each channel, perhaps a shift, and nothing inside."""
    own = {name: part for name, part in module._parameters.items() if part is not None}
    flat = all(part.ndim == 1 and part.is_floating_point() for part in own.values())
    return "weight" in own and own.keys() <= {"weight", "bias"} and flat and not module._modules and not module._buffers


def _most(y: Tensor) -> Tensor:
    """Return the largest size of each channel."""
    return y.detach().float().reshape(-1, y.shape[-1]).abs().amax(0)


def _some(y: Tensor, count: int) -> Tensor:
    """Return some rows of an answer, evenly spaced, and those of the largest values: outliers are few."""
    rows = y.detach().float().reshape(-1, y.shape[-1])
    spaced = rows[:: max(1, len(rows) // count)][:count]
    return torch.cat([rows[rows.abs().amax(1).argmax()][None], spaced])[:count].clone()


def _folded(model: nn.Module, groups: Sequence[_Group], batches: Sequence[Any]) -> nn.Module:
    """Return a copy with the scales folded in where that leaves the model's answers as they were; else groups say so.

    What a normalisation computes need not be a product with its gain: Gemma's adds one to it.
    """
    changed = {id(part) for group in groups for part in group.parameters()}
    shared = {id(p): p for p in chain(model.parameters(), model.buffers()) if id(p) not in changed}
    made = copy.deepcopy(model, dict(shared))

    def same() -> bool:
        pairs = ([calls.output_leaves(calls.call(m, calls.fresh(x))) for m in (made, model)] for x in batches)
        return all(distance(found, want) <= SAME for found, want in pairs)

    for group in groups:
        group.fold(made)
    if same():
        return made
    for group in groups:
        group.unfold(made)
    for group in groups:
        group.fold(made)
        if not same():
            group.unfold(made)
            group.why = f"with scales the model's answers differ by more than {SAME:g}"
    return made if any(not group.why for group in groups) else model
