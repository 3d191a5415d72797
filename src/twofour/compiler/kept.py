"""What stays in memory of the weights of a compiled model: the layouts that its example reads, each weight once.

The others are for other token counts, and of layers whose rows a product of a graph has too. They are made by the first
call that wants them (`PreparedWeights.at`), and stay from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MethodType
from typing import Any

from torch import nn

from twofour import native
from twofour.compiler.conv import CompiledConv
from twofour.compiler.decoder import Decoding
from twofour.compiler.decoding import memory_of, with_bytes_beside
from twofour.compiler.fused_matmuls import ProductLayer
from twofour.compiler.graph_conv import ConvLayer
from twofour.compiler.head_tables import HeadEmbedding, keep_once
from twofour.compiler.layer import CompiledLinear, MeasuredLayer
from twofour.compiler.plan import LayerPlan, Plan
from twofour.compiler.prepared import Ledger, Origin, PreparedWeights, RowsOf
from twofour.compiler.terms import Terms
from twofour.compiler.unfolded import Unfolded
from twofour.compiler.whole_model import WholeModel
from twofour.graph import Executor
from twofour.graph.executor.recorder import tensors_in
from twofour.kernels.base import Prepared
from twofour.native import pages
from twofour.packing import Packed

logger = logging.getLogger("twofour.compiler")

IN_PROJ = ".in_proj_weight"
"""What the product of an attention is named by, behind the attention's name."""

WHOLE = ("hybrid", "block")
"""Patterns of kernels whose weights are no rows one below the other."""


def keep_what_runs(fast: nn.Module, plan: Plan) -> Plan:
    """Give up the layouts of a model that its example does not read; return the plan with the bytes that stay.

    Args:
        fast: The compiled model, its engine chosen.
        plan: What was decided for it.
    """
    plan = _without_others(fast, plan)
    pages.gather(tensors_in(fast))
    native.release_free_memory()
    return plan


def tables_once(fast: nn.Module, plan: Plan, terms: Terms) -> Plan:
    """Let embeddings look their rows up in the weights of heads that they are tied to; return the plan that says so.

    Args:
        fast: The compiled model, its engine chosen.
        plan: What was decided for it.
        terms: They have the tables that were found before.
    """
    if plan.account is not None and plan.account.engine == "inductor":  # whose code reads the tables
        return plan
    main, steps = _runners(fast)
    read = tensors_in([program.python.names for one in (main, *steps) for program in _programs(one)])
    notes = list(keep_once(fast, terms.tables, read))
    for runner in (main, *steps) if notes else ():
        if isinstance(runner, WholeModel):
            runner.look_again()
    return plan.with_note(*notes)


def _runners(fast: nn.Module) -> tuple[Any, list[WholeModel]]:
    """Return what runs plain calls, and what runs those with a cache."""
    forward = vars(fast).get("forward")
    if not isinstance(forward, Decoding):
        return forward, []
    return forward.inner, [one for one in (forward.step, forward.prompt) if one is not None]


def _without_others(fast: nn.Module, plan: Plan) -> Plan:
    engine = plan.account.engine if plan.account else "layers"
    held = _Held.of(fast, plan, layers_run=engine != "graph")
    if engine != "inductor":  # whose code has the weights that it was made for
        held.give_up()
        for program in held.programs:
            program.forget(held.freed)  # recordings for other token counts read them
    entries = tuple(replace(entry, bytes_after=entry.bytes_after - held.saved(entry)) for entry in plan.layers)
    plan = replace(plan, layers=entries)
    ledger = Ledger(plan.bytes_before, plan.bytes_after, plan.memory)
    for weights in held.weights():
        weights.ledger = ledger
    plan = with_bytes_beside(fast, plan)
    if ledger.said:
        logger.warning("%s", ledger.text)
        return plan.with_note(ledger.text)
    if freed := sum(held.freed.values()):
        later = f"layouts of {freed / 1e6:.2f} MB, for other token counts and for layers outside of the graph, are made"
        return plan.with_note(f"{later} when a call first wants them")
    return plan


@dataclass
class _Held:
    """The weights of a compiled model, and what of them its example reads.

    Attributes:
        layers: The compiled Linears and convolutions by name.
        products: Those of the whole model's graph.
        others: Those of the graphs of calls with a cache.
        programs: All graphs.
        wanted: Places of the layouts that are read, by the id of a weight; of one that none reads there is no entry.
        before: The prepared weights that each held at first, by its id.
        freed: Bytes of those that none holds any more, by their tensors' ids.
        beside: Bytes of what layers keep to be made again, by their names.
        own: The memory of the model's own tensors, which stays where a product that reads it is given up.
    """

    layers: Mapping[str, CompiledLinear | CompiledConv]
    products: list[ProductLayer | ConvLayer]
    others: list[ProductLayer | ConvLayer]
    programs: list[Executor]
    wanted: dict[int, set[int]] = field(default_factory=dict)
    before: dict[int, list[Prepared]] = field(default_factory=dict)
    freed: dict[int, int] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)
    own: frozenset[int] = frozenset()

    @classmethod
    def of(cls, fast: nn.Module, plan: Plan, *, layers_run: bool) -> _Held:
        """Look at a model; `layers_run`: its layers are what runs the example."""
        whole, steps = _runners(fast)
        layers = {
            name: module for name, module in fast.named_modules() if isinstance(module, CompiledLinear | CompiledConv)
        }
        programs = [program for one in (whole, *steps) for program in _programs(one)]
        beside = [program for one in steps for program in _programs(one)]
        found = cls(layers, list(_products(_programs(whole))), list(_products(beside)), programs)
        found.own = frozenset(map(memory_of, (*fast.parameters(), *fast.buffers())))
        for product in (*found.products, *found.others):
            found._want(product, product.tokens if isinstance(product, ProductLayer) else 1)
        for name, layer in layers.items() if layers_run else ():
            found._want(layer, plan.counts.get(name, 1 if isinstance(layer, CompiledConv) else None))
        for table in (module for module in fast.modules() if isinstance(module, HeadEmbedding)):
            found.wanted.setdefault(id(table.prepared), set()).add(table.place)
        return found

    def _want(self, layer: MeasuredLayer, tokens: int | None) -> None:
        places = self.wanted.setdefault(id(layer.prepared), set())
        if tokens is not None:
            places.add(layer.dispatch.at(tokens)[1])

    def weights(self) -> Collection[PreparedWeights]:
        """Return all weights, those of products last, each once."""
        every = (*self.layers.values(), *self.products, *self.others)
        return {id(layer.prepared): layer.prepared for layer in every}.values()

    def give_up(self) -> None:
        """Leave out of each weight the layouts that are not read, of one that is in a product all."""
        names = {id(layer.prepared): name for name, layer in self.layers.items()}
        every = self.weights()
        self.before = {id(weights): weights.held for weights in every}
        for weights in every:
            if id(weights) in self.wanted:
                weights.keep(_with_one_like_first(weights, self.wanted[id(weights)]))
            else:
                name = names[id(weights)]
                if (origin := self._origin(name)) is not None:
                    self.beside[name] = origin.nbytes
                weights.keep(_with_one_like_first(weights, ()) if origin is None else (), origin)
        alive = {id(one.tensor) for weights in every for one in weights.held}
        known = {id(one.tensor): one for held in self.before.values() for one in held}
        gone = {place: one for place, one in known.items() if place not in alive}
        self.freed = {place: one.nbytes for place, one in gone.items() if memory_of(one.tensor) not in self.own}

    def _origin(self, name: str) -> Origin | None:
        """Return the rows of a product that are a layer's weight to the bit, None where there are none."""
        layer = self.layers[name]
        if isinstance(layer, CompiledConv):
            folded = [one for one in self.products if isinstance(one, ConvLayer) and one.name == name]
            return Unfolded.of(layer, folded[0].prepared, folded[0].scale) if folded else None
        for product in (*self.products, *self.others):
            if not isinstance(product, ProductLayer) or name not in product.sources:
                continue
            sources = product.sources
            if all(source in self.layers for source in sources):
                rows = [self.layers[source].problem.rows for source in sources]
                found = _rows(layer, product, [0, *accumulate(rows)][sources.index(name)])
                if found is not None:
                    return found
        return None

    def saved(self, entry: LayerPlan) -> int:
        """Return the bytes by which an entry of the plan is smaller."""
        own = [layer for layer in (self.layers.get(entry.name),) if layer is not None]
        named = [product for product in self.products if product.name in (entry.name, entry.name + IN_PROJ)]
        held = {id(one.tensor) for layer in (*own, *named) for one in self.before.get(id(layer.prepared), ())}
        return sum(self.freed.get(one, 0) for one in held) - self.beside.get(entry.name, 0)


def _rows(layer: CompiledLinear, product: ProductLayer, begin: int) -> RowsOf | None:
    """Return a layer's rows of a product; its scales are kept where the product has others."""
    weights = layer.prepared
    first = weights.first()
    if not weights.like(first, product.prepared) or weights.kernels[first].pattern in WHOLE:
        return None
    rows = product.prepared, begin, begin + layer.out_features, len(product.sources) == 1
    if not product.divided:
        return RowsOf(*rows)
    stored = weights.stored()
    if not isinstance(stored, Packed) or stored.scales is None or stored.zeros is not None:
        return None
    return RowsOf(*rows, stored.scales.clone())


def _with_one_like_first(weights: PreparedWeights, places: Collection[int]) -> set[int]:
    """Return places with one of a layout that all others, and files, are made of: the smallest."""
    like = [index for index in range(len(weights.layouts)) if weights.like(index)]
    return set(places) if set(places) & set(like) else {*places, min(like, key=weights.size)}


def _programs(forward: Any) -> Iterator[Executor]:
    """Yield the programs of a whole model's forward: of plain batches, and of those with padding."""
    if isinstance(forward, WholeModel):
        yield forward.program
        if forward.ragged is not None:
            yield forward.ragged.program


def _products(programs: Iterable[Executor]) -> Iterator[ProductLayer | ConvLayer]:
    """Yield the products and convolutions of programs, each once; they may stand inside calls of several."""
    met = set[int]()
    for program in programs:
        bound = [one.__self__ if isinstance(one, MethodType) else one for one in program.python.names.values()]
        for module in (inner for one in bound if isinstance(one, nn.Module) for inner in one.modules()):
            if isinstance(module, ProductLayer | ConvLayer) and id(module) not in met:
                met.add(id(module))
                yield module
