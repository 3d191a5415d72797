"""Tables that a head is tied to: kept once, in the order that the head's product reads, where that returns rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import embedding

from twofour.compiler.embeddings import CompiledEmbedding, TableEmbedding, looks_up_otherwise
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.prepared import PreparedWeights
from twofour.compiler.replaceable import LayerWeight
from twofour.errors import KernelError
from twofour.graph.base import aten
from twofour.kernels.rows_operator import look_up
from twofour.native.surroundings import memoryless, unreadable
from twofour.packing import Packed

LEAST_SHARED = 1 << 18
"""Numbers of a table from which it is kept once: a graph takes in an embedding with what follows it, and not this."""

COMPARED = 1 << 12
"""Rows that are compared at once."""


class Lookup(nn.Module):
    """Rows of a weight, as one of its layouts has them.

    Args:
        prepared: The weight.
        place: The layout's place in `prepared.layouts`.
        width: Inputs of the weight.
    """

    def __init__(self, prepared: PreparedWeights, place: int, width: int) -> None:
        super().__init__()
        self.prepared, self.place, self.width = prepared, place, width

    def forward(self, places: Tensor) -> Tensor:
        """Return rows: int64 (...) -> (..., in), in the layout's type."""
        return look_up(self.prepared.at(self.place), places, self.width)


class HeadEmbedding(CompiledEmbedding):
    """An nn.Embedding for inference whose rows stand in the weight of a head that is tied to it.

    Args:
        name: Name of the layer in its model, for messages.
        lookup: The head's weight.
        shape: Of the table.
        dtype: Of the answer.
        scales: Of rows of whole numbers, float32 (entries, 1).
    """

    prepared: PreparedWeights

    def __init__(
        self, name: str, lookup: Lookup, shape: tuple[int, ...], dtype: torch.dtype, scales: Tensor | None
    ) -> None:
        super().__init__(name, dtype, scales)
        self.prepared, self.place, self._shape = lookup.prepared, lookup.place, shape
        self.placed = lookup.prepared.device

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the table."""
        return self._shape

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of these numbers: (...) -> (..., width), in the dtype of the model's table.

        Raises:
            IndexError: One is no row of the table.
            RuntimeError: They are neither int64 nor int32.
            KernelError: The numbers are no plain tensor of whole ones.
        """
        try:
            rows = look_up(self.prepared.at(self.place), input, self._shape[1])
        except KernelError as error:
            if unreadable(input) is None and memoryless(input) is None and not self._has(input):
                embedding(input, torch.empty(1, 1, dtype=torch.float32, device="cpu"))  # raises, in torch's own words
            raise error.for_layer(self.name) from None
        return self.scaled(rows, input)

    def _has(self, places: Tensor) -> bool:
        if places.dtype not in (torch.int64, torch.int32):
            return False
        return not places.numel() or (int(places.min()) >= 0 and int(places.max()) < self._shape[0])

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        return f"{self._shape[0]}, {self._shape[1]}, rows of {self.prepared.layouts[self.place]}"


@dataclass(frozen=True)
class HeadTable:
    """A table that its head's weight holds to the bit.

    Attributes:
        names: Of the embeddings that look it up.
        head: Name of the head.
        table: Its rows as the embeddings have them now, (entries, width).
        scales: Of whole numbers.
        dtype: Of what the embeddings answer.
        lookup: The head's weight.
    """

    names: tuple[str, ...]
    head: str
    table: Tensor
    scales: Tensor | None
    dtype: torch.dtype
    lookup: Lookup

    def held_by(self, fast: nn.Module) -> bool:
        """Whether the head is the compiled one still."""
        head = fast.get_submodule(self.head)
        return isinstance(head, CompiledLinear) and head.prepared is self.lookup.prepared

    @property
    def said(self) -> str:
        """What the plan says of it."""
        names = " and ".join(f"`{name}`" for name in self.names)
        size = self.table.nbytes / 1e6
        return (
            f"{names} and `{self.head}` are tied and kept once: rows are looked up in the head's weight ({size:.2f} MB)"
        )


def head_tables(
    model: nn.Module,
    fast: nn.Module,
    weights: Mapping[str, LayerWeight],
    stored: Mapping[str, Packed | Tensor] | None = None,
) -> tuple[HeadTable, ...]:
    """Find the tables that the weights of compiled heads hold to the bit, in a layout that returns rows.

    Args:
        model: The one that was given.
        fast: The compiled one; its embeddings have their values.
        weights: What its compiled layers were made of.
        stored: What a file holds, by the names of parameters; it tells what is tied.
    """
    heads = {id(entry.source): name for name, entry in weights.items() if entry.axis == 1 and entry.geometry is None}
    tied: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding) and name:
            own = module.weight if stored is None else stored.get(f"{name}.weight")
            if (head := heads.get(id(own))) is not None:
                tied.setdefault(head, []).append(name)
    found = (_shared(fast, head, names) for head, names in tied.items())
    return tuple(one for one in found if one is not None)


def _shared(fast: nn.Module, head: str, names: list[str]) -> HeadTable | None:
    """Return a table with its head, None where they are not kept once."""
    layer, modules = fast.get_submodule(head), [fast.get_submodule(name) for name in names]
    if not isinstance(layer, CompiledLinear) or not layer.on_cpu:
        return None
    first = modules[0]
    table, scales = (first.rows, first.scales) if isinstance(first, TableEmbedding) else (_own(first), None)
    if table is None or table.numel() < LEAST_SHARED:
        return None
    for module in modules[1:]:
        other = module.rows if isinstance(module, TableEmbedding) else _own(module)
        if other is None or other.data_ptr() != table.data_ptr():
            return None
    for place, held in enumerate(layer.prepared.weights):
        if held.kernel.looks_up and held.kernel.dtype == str(table.dtype).removeprefix("torch."):
            lookup = Lookup(layer.prepared, place, table.shape[1])
            if _alike(lookup, table, scales):
                dtype = first.weight_dtype if isinstance(first, TableEmbedding) else table.dtype
                return HeadTable(tuple(names), head, table, scales, dtype, lookup)
    return None


def _own(module: nn.Module) -> Tensor | None:
    """Return the table of a plain embedding, None of one that looks its rows up in a way of its own."""
    if not isinstance(module, nn.Embedding) or looks_up_otherwise(module):
        return None
    return module.weight.detach()


def _alike(lookup: Lookup, table: Tensor, scales: Tensor | None) -> bool:
    """Tell whether a weight holds the rows of a table, to the bit, and their scales."""
    held = lookup.prepared.at(lookup.place)
    steps = held.kernel.scales(held)
    if (steps is None) != (scales is None) or (scales is not None and not torch.equal(steps, scales)):
        return False
    rows = torch.arange(len(table), device="cpu").split(COMPARED)
    return all(torch.equal(lookup(places), table[int(places[0]) : int(places[-1]) + 1]) for places in rows)


def look_up_in_heads(module: fx.GraphModule, fast: nn.Module, tables: Iterable[HeadTable]) -> int:
    """Let a graph look rows up in the weights of heads; returns at how many places."""
    known = {one.table.data_ptr(): one for one in tables if one.held_by(fast)}
    count = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.embedding.default) if known else ():
        weight = node.args[0]
        own = getattr(module, str(weight.target), None) if weight.op == "get_attr" else None
        found = known.get(own.data_ptr()) if isinstance(own, Tensor) else None
        if found is None or (own.shape, own.dtype) != (found.table.shape, found.table.dtype):  # pyright: ignore
            continue
        name = f"lookup_{count}"
        module.add_submodule(name, found.lookup)
        with module.graph.inserting_before(node):
            new = module.graph.call_module(name, (node.args[1],))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        count += 1
        if not weight.users:
            module.graph.erase_node(weight)
    return count


def keep_once(fast: nn.Module, tables: Iterable[HeadTable], read: Iterable[Tensor]) -> Iterator[str]:
    """Let embeddings look their rows up in the weights of heads, and give up their tables; says which.

    Args:
        fast: The compiled model, its engine chosen.
        tables: What `head_tables` found.
        read: What graphs of it read: a table among them stays.
    """
    addresses = {tensor.data_ptr() for tensor in read if tensor.layout is torch.strided}
    for one in tables:
        if not one.held_by(fast) or one.table.data_ptr() in addresses or _others(fast, one):
            continue
        made = HeadEmbedding(one.names[0], one.lookup, tuple(one.table.shape), one.dtype, one.scales)
        made.take_settings(fast.get_submodule(one.names[0]))
        made.weight_reads = cast(CompiledLinear, fast.get_submodule(one.head)).weight_reads
        for name in one.names:
            owner, _, attribute = name.rpartition(".")
            setattr(fast.get_submodule(owner), attribute, made.eval())
        yield one.said


def _others(fast: nn.Module, table: HeadTable) -> bool:
    """Tell whether something else of the model holds a table."""
    held = (
        tensor
        for name, module in fast.named_modules(remove_duplicate=False)
        for tensor in module._parameters.values()
        if name not in table.names and tensor is not None
    )
    return any(type(tensor) is nn.Parameter and tensor.data_ptr() == table.table.data_ptr() for tensor in held)
