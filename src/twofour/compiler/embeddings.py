"""Embedding tables in bfloat16 or in whole numbers of 8 bits with a scale a row, where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from twofour.compiler.computing import dtype_name
from twofour.compiler.plan import LayerPlan
from twofour.compiler.unpacked import WeightedLayer
from twofour.errors import CompileError, one_of
from twofour.layers import obstacle
from twofour.measure.distance import distance
from twofour.packing import Packed, dense_of, pack
from twofour.patterns import DENSE
from twofour.patterns.base import is_finite, non_finite

KINDS = ("bfloat16", "int8")
"""What tables can be kept in; None: as the model has them."""


@dataclass(eq=False)
class Table:
    """The rows of an embedding as they are kept; modules that share a table share this.

    Attributes:
        held: bfloat16 (entries, width), or packed as "dense" in int8, with a scale of each row.
    """

    held: Packed | Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:
        """The numbers (entries, width), and the scales (entries, 1) of whole ones."""
        if isinstance(self.held, Tensor):
            return self.held, None
        return self.held.values.view(self.held.header.shape), self.held.scales

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return sum(part.nbytes for part in self.parts if part is not None)

    def source(self) -> Packed | Tensor:
        """Return the table as a file holds it."""
        return self.held

    def stored(self) -> Packed | Tensor:
        """Return the same."""
        return self.held


class CompiledEmbedding(WeightedLayer):
    """An nn.Embedding for inference, whatever keeps its table; it answers in the model's own type.

    Args:
        name: Name of the layer in its model, for messages.
        dtype: Of the model's table, and of the answer.
        scales: Of rows of whole numbers, float32 (entries, 1).
    """

    scales: Tensor | None

    def __init__(self, name: str, dtype: torch.dtype, scales: Tensor | None) -> None:
        super().__init__()
        self.name, self.weight_dtype, self.reads = name, dtype, (dtype,)  # it answers in it, whatever its model is in
        self.register_buffer("scales", scales, persistent=False)

    def scaled(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return rows as they are kept in the answer's type, those of whole numbers times their scales."""
        rows = rows.to(self.weight_dtype)
        return rows if self.scales is None else rows * embedding(places, self.scales).to(self.weight_dtype)


class TableEmbedding(CompiledEmbedding):
    """An nn.Embedding for inference whose table is its own, kept in fewer bits.

    Args:
        name: Name of the layer in its model, for messages.
        table: Its rows.
        dtype: Of the model's table, and of the answer.
    """

    prepared: Table
    rows: Tensor

    def __init__(self, name: str, table: Table, dtype: torch.dtype) -> None:
        rows, scales = table.parts
        super().__init__(name, dtype, scales)
        self.prepared = table
        self.register_buffer("rows", rows, persistent=False)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the table."""
        return tuple(self.rows.shape)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of these numbers: (...) -> (..., width), in the dtype of the model's table."""
        return self.scaled(embedding(input, self.rows), input)

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        return f"{self.rows.shape[0]}, {self.rows.shape[1]}, table={self.rows.dtype}"


def kind_of_tables(embeddings: Any) -> str:
    """Return what tables are to be kept in, "" where they stay as they are.

    Raises:
        CompileError: It is nothing of the kind.
    """
    named = dtype_name(embeddings)
    one_of("the type of embeddings is not known", named, (None, *KINDS), CompileError, "leave it out to keep tables")
    return named or ""


@dataclass(frozen=True)
class Tables:
    """The tables of a model that are kept in fewer bits.

    Attributes:
        kind: One of `KINDS`, or "" for none.
        made: The layers that take the places of embeddings, by their names.
        left: Why other embeddings stay, by their names.
        said: What the plan says of them.
    """

    kind: str
    made: Mapping[str, TableEmbedding]
    left: Mapping[str, str]
    said: str = ""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        kind: str,
        replaced: Collection[str] = (),
        stored: Mapping[str, Packed | Tensor] | None = None,
    ) -> Tables:
        """Write the tables of a model in fewer bits.

        Args:
            model: Any module; its weights are not read where `stored` has them.
            kind: One of `KINDS`, or "" for none.
            replaced: Layers of it that get weights of their own: a head that is tied to a table may be one.
            stored: What a file holds, by the names of parameters; it tells which head has a weight of its own.

        Raises:
            CompileError: There is no table.
            PatternError: One holds NaN or infinity.
        """
        found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding) and name}
        if not kind:
            return cls(kind, {}, {})
        if not found:
            raise CompileError(
                f'embeddings="{kind}" needs an embedding',
                got="a model without any nn.Embedding inside",
                wanted="a model that looks rows up in a table",
                remedy="leave `embeddings` out",
            )
        left = {
            name: why
            for name, module in found.items()
            if (why := looks_up_otherwise(module) or _reader(model, name, kind, replaced, stored))
        }
        made: dict[str, TableEmbedding] = {}
        tables: dict[int, Table] = {}
        for name, module in found.items():
            if name not in left:
                weight = module.weight.detach() if stored is None else stored[f"{name}.weight"]
                table = tables.setdefault(id(module.weight), _table(name, weight, kind))
                made[name] = TableEmbedding(name, table, module.weight.dtype)
        return cls(kind, made, left, _said(kind, made, found, left, stored))

    def moved(self, fast: nn.Module, model: nn.Module, answers: Callable[[], Sequence[Any]], dtype: str) -> str:
        """Say by how much the answer on the example differs from that with the model's own tables, "" for no table.

        In another type than the model's own the layers' roundings fall otherwise behind other tables, by as much as
        they are off at all: nothing is measured there.

        Args:
            fast: The compiled model.
            model: The one that was given.
            answers: Runs the example through `fast`.
            dtype: Computing type of the layers.
        """
        if not self.made:
            return ""
        if any(dtype_name(one.weight_dtype) != dtype for one in self.made.values()):
            return f"; the error on the example counts them and the layers' {dtype} together"
        found = answers()
        with _with_tables_of(fast, model, self.made):
            want = answers()
        off = distance(found, want)
        return f"; they alone move the answer on the example by {off:.1e} of its norm"


def heads(model: nn.Module, fast: nn.Module, layers: Sequence[LayerPlan]) -> Iterator[str]:
    """Say of each layer that is tied to a table what the weight takes that it keeps beside it.

    One that stays torch's own, beside a table that stays as it is, has none: its product reads the table. Nor has one
    in whose weight the rows are looked up (`head_tables`).

    Args:
        model: The one that was given.
        fast: The compiled one.
        layers: Of its plan.
    """
    modules, sizes = (
        dict(fast.named_modules(remove_duplicate=False)),
        {layer.name: layer.bytes_after for layer in layers},
    )
    named = [name for name, module in modules.items() if isinstance(module, CompiledEmbedding | nn.Embedding)]
    held = {name: model.get_submodule(name)._parameters.get("weight") for name in reversed(named)}
    tables = {id(weight): name for name, weight in held.items() if weight is not None}
    for name, module in model.named_modules():
        table = next((tables[id(p)] for p in module._parameters.values() if id(p) in tables), "")
        if not table or not sizes.get(name):
            continue
        own, weight = modules[name]._parameters.get("weight"), modules[table]._parameters.get("weight")
        once = getattr(modules[name], "prepared", None) is getattr(modules[table], "prepared", weight)
        if not once and (own is None or own is not weight):
            yield f"`{name}` is tied to the table `{table}` and keeps a weight of its own: {sizes[name] / 1e6:.2f} MB"


def looks_up_otherwise(module: nn.Embedding) -> str:
    """Return why an embedding is not replaced for what its module is, "" where it may be."""
    if type(module) is not nn.Embedding:
        return f"{type(module).__name__} may look its rows up in a way of its own"
    if module.max_norm is not None:
        return "max_norm changes its rows at each call"
    if reason := obstacle(module, base=nn.Embedding):
        return reason
    if not module.weight.is_floating_point():
        return f"its rows are {module.weight.dtype}"
    return ""


def _reader(
    model: nn.Module, table: str, kind: str, replaced: Collection[str], stored: Mapping[str, Packed | Tensor] | None
) -> str:
    """Say which other layer reads a table and gets no weight of its own, "" where none does."""
    own = model.get_submodule(table)._parameters["weight"] if stored is None else stored[f"{table}.weight"]
    both = stored is None or _is_of(own, kind)  # a file's head has the table as it is written
    for name, other in model.named_modules(remove_duplicate=False):
        if (both and name in replaced) or type(other) is nn.Embedding:
            continue
        held = other._parameters.items()
        read = (p if stored is None else stored.get(f"{name}.{part}".lstrip(".")) for part, p in held)
        if any(one is own for one in read):
            return f"`{name}` reads it too"
    return ""


def _is_of(weight: Any, kind: str) -> bool:
    """Tell whether a file holds a weight as a table of this kind."""
    if isinstance(weight, Packed):
        return (weight.header.pattern, weight.header.dtype) == ("dense", kind)
    return dtype_name(weight.dtype) == kind


def _table(name: str, weight: Packed | Tensor, kind: str) -> Table:
    if isinstance(weight, Packed) and _is_of(weight, kind):
        return Table(weight)  # of a file: rounding again could move it
    dense = dense_of(weight)
    if not is_finite(dense):
        raise non_finite("a table", dense).for_layer(name)
    return Table(pack(dense.float().contiguous(), DENSE, "int8") if kind == "int8" else dense.bfloat16())


def _said(
    kind: str,
    made: Mapping[str, TableEmbedding],
    found: Mapping[str, nn.Embedding],
    left: Mapping[str, str],
    stored: object,
) -> str:
    tables = {id(one.prepared): name for name, one in made.items()}.values()
    before, after = (
        (sum(size) for size in zip(*((found[n].weight.nbytes, made[n].prepared.nbytes) for n in tables), strict=True))
        if made
        else (0, 0)
    )
    off = [] if stored is not None else [_off(found[name].weight.detach(), made[name].prepared) for name in tables]
    error = f", off by up to {max(off):.1e} of a table's norm" if off else ""
    why = "".join(f"; `{name}` stays: {reason}" for name, reason in left.items())
    return f"embeddings in {kind}: {len(tables)} tables of {before / 1e6:.2f} MB take {after / 1e6:.2f} MB{error}{why}"


def _off(weight: Tensor, table: Table) -> float:
    return distance([dense_of(table.held).float()], [weight.float()])


@contextmanager
def _with_tables_of(fast: nn.Module, model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let a compiled model look rows up in the tables of another one inside."""
    places = [(fast.get_submodule(name.rpartition(".")[0]), name) for name in names]
    own = {name: fast.get_submodule(name) for name in names}
    for owner, name in places:
        setattr(owner, name.rpartition(".")[2], model.get_submodule(name))
    try:
        yield
    finally:
        for owner, name in places:
            setattr(owner, name.rpartition(".")[2], own[name])
