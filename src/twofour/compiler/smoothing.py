"""Outliers of a normalisation's answer are smoothed before int8 rounds it: by channel, folded into what stands around.

A few channels of an activation may be a hundred times as wide as the others, and one scale rounds them all. Xiao et
al. 2023 (SmoothQuant, arXiv 2211.10438), equation 4, divide channel j by s_j = max|X_j|^a / max|W_j|^(1 - a) and
multiply the weights' columns by it, which is the same product. Here a is searched for each normalisation on the data,
by the error of what its layers answer, and s is taken only where that is less.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from twofour import calls
from twofour.calibration.batches import items, read
from twofour.compiler.replaceable import is_linear
from twofour.compiler.terms import Terms
from twofour.errors import CompileError
from twofour.kernels.quantization import Quantization
from twofour.layers import is_hugging_face_conv1d
from twofour.measure.distance import distance

logger = logging.getLogger("twofour.compiler")

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""What is tried; 0.5 is the paper's choice for most models."""

BATCHES = 16
"""Batches that scales are taken from, the first of the data; ranges are taken from all."""

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
    """

    name: str
    norm: Any
    readers: dict[str, Any]
    most: Tensor
    rows: list[Tensor] = field(default_factory=list)
    alpha: float | None = None
    before: float = 0.0
    after: float = 0.0

    def weights(self) -> Tensor:
        """Return the weights of the layers (all their outputs, width)."""
        return torch.cat([_rows_of(layer).float() for layer in self.readers.values()])

    def scales(self, alpha: float) -> Tensor:
        """Return s (width,) by equation 4; channels without a value or a weight keep 1."""
        wide = self.weights().abs().amax(0)
        found = self.most.pow(alpha) / wide.pow(1 - alpha)
        return torch.where((self.most > 0) & (wide > 0) & torch.isfinite(found) & (found > 0), found, 1.0)

    def fold(self, scales: Tensor) -> None:
        """Divide what the normalisation answers, and multiply the columns that read it."""
        for part in (self.norm.weight, getattr(self.norm, "bias", None)):
            if part is not None:
                part.div_(scales.to(part.dtype))
        for layer in self.readers.values():
            layer.weight.mul_((scales[:, None] if is_hugging_face_conv1d(layer) else scales).to(layer.weight.dtype))

    def parameters(self) -> list[Tensor]:
        """Return what `fold` writes to."""
        own = [part for part in (self.norm.weight, getattr(self.norm, "bias", None)) if part is not None]
        return [*own, *(layer.weight for layer in self.readers.values())]

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


def _rows_of(layer: Any) -> Tensor:
    weight = layer.weight.detach()
    return weight.t() if is_hugging_face_conv1d(layer) else weight


@dataclass(frozen=True)
class Smoothed:
    """A model for int8, and what was done for it.

    Attributes:
        model: The one that was given, or a copy with folded scales: the same function.
        data: What can be read in place of the data that were given.
        said: What the plan says, "" where nothing was looked at.
    """

    model: nn.Module
    data: Iterable[Any] | None
    said: str = ""


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


def smoothed(model: nn.Module, data: Any) -> Smoothed:
    """Return a model whose outliers are smoothed where that lowers the error of int8 on the data.

    Args:
        model: In evaluation mode; it stays as it is.
        data: As for static ranges.
    """
    source = items(data)
    first = list(islice(source, BATCHES))
    again = chain(first, source)
    if not first:
        return Smoothed(model, again)
    inputs = [read(model, item).inputs for item in first]
    layers = {name: module for name, module in model.named_modules() if is_linear(module)}
    groups, elsewhere = _groups(model, layers, inputs)
    for group in groups:
        group.search()
    wanted = [group for group in groups if group.alpha is not None]
    made, folded = _folded(model, wanted, inputs[0]) if wanted else (model, [])
    return Smoothed(made, again, _said(folded, elsewhere + len(wanted) - len(folded), len(groups) - len(wanted)))


def _groups(model: nn.Module, layers: Mapping[str, Any], inputs: Sequence[Any]) -> tuple[list[_Group], int]:
    """Return the normalisations whose answers `layers` alone read, and how many others there are that some read."""
    norms = {name: module for name, module in model.named_modules() if _is_norm(module)}
    answers: dict[tuple[int, int, int], tuple[str, Tensor]] = {}
    groups: dict[str, _Group] = {}
    each = -(-ROWS // len(inputs))

    def answered(name: str, module: nn.Module, _: Any, __: Any, y: Any) -> None:
        if isinstance(y, Tensor) and y.numel() and y.shape[-1] == module.weight.numel():  # pyright: ignore
            answers[_place(y)] = name, y  # kept, so that its memory is no other's
            if name in groups:
                groups[name].most = torch.maximum(groups[name].most, _most(y))
                groups[name].rows.append(_some(y, each))

    def reads(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = calls.first_input(args, kwargs)
        found = answers.get(_place(x)) if isinstance(x, Tensor) and name in layers else None
        if found is not None:
            norm, y = found
            new = _Group(norm, norms[norm], {}, _most(y), [_some(y, each)])
            groups.setdefault(norm, new).readers[name] = module

    watched = [*norms.items(), *layers.items()]
    elsewhere = _Elsewhere(answers, {id(layer.weight) for layer in layers.values()})
    for index, batch in enumerate(inputs):
        hooks = partial(elsewhere.unseen, reads), partial(elsewhere.unseen, answered)
        with calls.observing(watched, *hooks), nullcontext() if index else elsewhere:
            calls.call(model, batch)
        answers.clear()
    alone = [group for name, group in groups.items() if name not in elsewhere.found]
    return [group for group in alone if bool(torch.isfinite(group.most).all())], len(groups) - len(alone)


class _Elsewhere(TorchFunctionMode):
    """Notes the normalisations whose answer something computes with that is no product by a layer's weight.

    Args:
        answers: Their answers by where they lie.
        weights: Ids of the layers' weights.
    """

    def __init__(self, answers: Mapping[tuple[int, int, int], tuple[str, Tensor]], weights: Collection[int]) -> None:
        super().__init__()
        self.answers, self.weights, self.found = answers, weights, set[str]()
        self.paused = False

    def unseen(self, look: Callable[..., None], *args: Any) -> None:
        """Call what looks at answers itself."""
        self.paused = True
        try:
            look(*args)
        finally:
            self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and look at what it read: views of an answer are the answer."""
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and self.answers and not self.paused:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            product = any(id(leaf) in self.weights for leaf in read)
            for name, y in () if product else filter(None, (self.answers.get(_place(leaf)) for leaf in read)):
                if made.data_ptr() != y.data_ptr():
                    self.found.add(name)
        return made


def _is_norm(module: nn.Module) -> bool:
    """Tell whether a module may be a normalisation: a gain for each channel, perhaps a shift, and nothing inside."""
    own = {name: part for name, part in module._parameters.items() if part is not None}
    flat = all(part.ndim == 1 and part.is_floating_point() for part in own.values())
    return "weight" in own and own.keys() <= {"weight", "bias"} and flat and not module._modules and not module._buffers


def _place(x: Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.numel(), x.shape[-1] if x.ndim else 0


def _most(y: Tensor) -> Tensor:
    """Return the largest size of each channel."""
    return y.detach().float().reshape(-1, y.shape[-1]).abs().amax(0)


def _some(y: Tensor, count: int) -> Tensor:
    """Return some rows of an answer, evenly spaced, and those of the largest values: outliers are few."""
    rows = y.detach().float().reshape(-1, y.shape[-1])
    spaced = rows[:: max(1, len(rows) // count)][:count]
    return torch.cat([rows[rows.abs().amax(1).argmax()][None], spaced])[:count].clone()


def _folded(model: nn.Module, groups: Sequence[_Group], batch: Any) -> tuple[nn.Module, list[_Group]]:
    """Return a copy with the scales folded in, and the groups where that leaves the model's answers as they were.

    Others read what such a normalisation answers too: a residual sum behind BERT's, say.
    """
    changed = {id(part) for group in groups for part in group.parameters()}
    shared = {id(p): p for p in chain(model.parameters(), model.buffers()) if id(p) not in changed}
    made = copy.deepcopy(model, dict(shared))
    want = calls.output_leaves(calls.call(made, calls.fresh(batch)))

    def same() -> bool:
        return distance(calls.output_leaves(calls.call(made, calls.fresh(batch))), want) <= SAME

    own = [_in(made, group) for group in groups]
    held = _tried(own, same)
    if held is None:
        held = [group for group in own if _tried([group], same)]
    return (made, held) if held else (model, [])


def _in(made: nn.Module, group: _Group) -> _Group:
    """Return a group with the modules of a copy."""
    readers = {name: made.get_submodule(name) for name in group.readers}
    return _Group(
        group.name, made.get_submodule(group.name), readers, group.most, [], group.alpha, group.before, group.after
    )


def _tried(groups: list[_Group], same: Callable[[], bool]) -> list[_Group] | None:
    """Fold the scales of groups; take them back and return None where that changes the model's answers."""
    before = [(part, part.clone()) for group in groups for part in group.parameters()]
    for group in groups:
        assert group.alpha is not None
        group.fold(group.scales(group.alpha))
    if same():
        return groups
    for part, value in before:
        part.copy_(value)
    return None


def _said(groups: Sequence[_Group], read_elsewhere: int, level: int) -> str:
    if not groups and not read_elsewhere:
        return f"outliers: none, of {level} normalisations" if level else ""
    names = [f"`{g.name}` {g.alpha} {g.before:.1e} {g.after:.1e}" for g in groups]
    beside = f"{read_elsewhere} others cannot be: their answers are read elsewhere too" if read_elsewhere else ""
    if not names:
        return f"outliers: not smoothed, {beside}"
    found = ", ".join(names)
    return f"outliers smoothed (alpha, error of their layers before and after): {found}" + (
        f"; {beside}" if beside else ""
    )
