"""Blocks grown from the smallest intermediate results (DNNFusion, arXiv 2108.13342, listing 1), and put into the graph.

What a pair may be is table 3's to say (graph/mapping.py), with one difference: a red cell whose second operator reduces
rows is measured, as the yellow ones are. What the paper refuses is to read a convolution's or a product's input through
an expansion, or to compute one inside another; those are no steps of a block, and a reduction over the rows of a block
reads each of its numbers once, in order.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from twofour.capture import changes_in_place
from twofour.graph.base import value
from twofour.graph.blocks.axes import UnfitError
from twofour.graph.blocks.candidate import Candidate
from twofour.graph.blocks.lowering import is_look, why_alone
from twofour.graph.blocks.times import APART, FUSED, Times, pays
from twofour.graph.mapping import Fusion, MappingType, combine
from twofour.graph.operators import NO_ROW, find, mapping_of, numel

logger = logging.getLogger("twofour.compiler")

SLOWER = "one by one they are faster"
"""Why operators that could be a block are none."""

SINGLE = "no neighbour to fuse with"


@dataclass
class Blocks:
    """What became of a graph's operators.

    Attributes:
        labels: Of the blocks, in the order they were made.
        fused: Operators in them.
        alone: Why others are in none, and how many of them.
    """

    labels: list[str] = field(default_factory=list)
    fused: int = 0
    alone: Counter[str] = field(default_factory=Counter)

    def text(self) -> str:
        """Return it as one line of the plan, "" where nothing was looked at."""
        if not self.labels and not self.alone:
            return ""
        total = self.fused + sum(self.alone.values())
        why = "; ".join(f"{reason} {count}" for reason, count in self.alone.most_common())
        return f"{len(self.labels)} fused blocks of {self.fused} of {total} operators" + (
            f"; alone: {why}" if why else ""
        )


def fuse_blocks(module: fx.GraphModule, times: Times, *, singles: bool = False) -> Blocks:
    """Make blocks of a graph's operators.

    Args:
        module: The graph, its products with their kernels; it is changed.
        times: What decides where the table leaves it open, and whether a block stays.
        singles: Make blocks of single operators too, where no function of torch is to be called.
    """
    planner = _Planner(module, times, 1 if singles else 2)
    for seed in planner.seeds():
        if seed not in planner.taken:
            planner.take(seed)
    planner.count_singles()
    module.graph.eliminate_dead_code()  # views that blocks take of their operands themselves
    module.graph.lint()
    return planner.found


class _Planner:
    """One pass over a graph; `taken` holds nodes that are in a block, or that a block was tried with in vain."""

    def __init__(self, module: fx.GraphModule, times: Times, least: int) -> None:
        self.module, self.times, self.least = module, times, least
        self.taken: set[fx.Node] = set()
        self.found = Blocks()
        self.refused: dict[fx.Node, str] = {}
        self.why = {node: why_alone(node) for node in module.graph.nodes if node.op == "call_function"}
        self.segments: dict[fx.Node, int] = {}
        self._number()
        for node in module.graph.nodes:
            if node.op == "call_function" and self._counts(node) and (self.why[node] or find(node) is None):
                self.found.alone[self.why[node] or NO_ROW] += 1

    def _counts(self, node: fx.Node) -> bool:
        """Whether a node is an operator of torch's that makes something."""
        row = find(node)
        return isinstance(node.target, torch._ops.OpOverload) and (row is None or row.writes)

    def _number(self) -> None:
        """Number the nodes, and the stretches between those that change a tensor: no block reaches over one."""
        segment = 0
        self.order = {node: index for index, node in enumerate(self.module.graph.nodes)}
        for node in self.order:
            segment += changes_in_place(node)
            self.segments.setdefault(node, segment)

    def seeds(self) -> list[fx.Node]:
        """Return where blocks begin: One-to-One operators by the size of what they make, then the others."""
        found = [node for node in self.order if self._free(node) and not is_look(node)]
        return sorted(
            found, key=lambda node: (mapping_of(node) is not MappingType.ONE_TO_ONE, numel(node), self.order[node])
        )

    def _free(self, node: fx.Node) -> bool:
        # What `put` has added is not known and is not taken again.
        return node not in self.taken and self.why.get(node) == "" and find(node) is not None

    def take(self, seed: fx.Node) -> None:
        """Grow a block from a seed and put it into the graph, where that pays."""
        grown = self._grow(seed)
        if grown is None or len(grown) < self.least:
            return  # another seed may still find it
        seconds = self.times.seconds(grown)
        self.taken.update(grown.nodes)
        if seconds[FUSED] > seconds[APART]:
            self.found.alone[SLOWER] += len(grown)
            text = f"{1e6 * seconds[FUSED]:.1f} against {1e6 * seconds[APART]:.1f} us"
            logger.info("%s stays %d operators: %s, %s", grown.block.label, len(grown), SLOWER, text)
            return
        self.found.labels.append(grown.block.label)
        self.found.fused += len(grown)
        put(self.module, grown, f"block_{len(self.found.labels)}")
        self._number()

    def count_singles(self) -> None:
        """Count what no block took."""
        for node in self.order:
            if self._free(node) and self._counts(node) and not is_look(node):
                self.found.alone[self.refused.get(node, SINGLE)] += 1

    def _grow(self, seed: fx.Node) -> Candidate | None:
        """Return the largest block that grows from a seed."""
        try:
            block = Candidate.of([seed])
        except UnfitError as error:
            self.refused[seed] = str(error)
            return None
        mapping = mapping_of(seed) or MappingType.MANY_TO_MANY
        slower: set[fx.Node] = set()
        again = True
        while again:  # a branch that left joins again, or a tensor that did not fit does in a larger domain
            again = False
            for node, after in self._neighbours(block):
                group = [node] if after else self._looked_through(node)
                if slower.intersection(group) or node in block.nodes:
                    continue
                larger = self._joined(block, group)
                if larger is None:
                    continue
                decision = self._decided(block, mapping, group[-1], after, larger)
                if decision is None:
                    slower.update(group)
                    continue
                block, mapping, again = larger, decision, True
        return self._trimmed(block)

    def _neighbours(self, block: Candidate) -> Iterator[tuple[fx.Node, bool]]:
        """Yield what reads the block's results, then what makes its operands; whether it is after the block."""
        for after in (True, False):
            for node in block.nodes:
                near: Iterable[fx.Node] = node.users if after else node.all_input_nodes
                yield from ((other, after) for other in near if other not in block.nodes and self._free(other))

    def _looked_through(self, node: fx.Node) -> list[fx.Node]:
        """Return views and, at the end, what they look at: one without the other is no operand of a block's."""
        group = [node]
        while is_look(group[-1]) and self._free(source := group[-1].all_input_nodes[0]):
            group.append(source)
        return group

    def _joined(self, block: Candidate, group: Sequence[fx.Node]) -> Candidate | None:
        """Return the block with nodes more, None where they fit no block."""
        nodes = sorted({*block.nodes, *group}, key=self.order.__getitem__)
        apart = any(self.segments[node] != self.segments[block.nodes[0]] for node in group)
        if apart or not self._is_convex(nodes):
            return None
        try:
            return Candidate.of(nodes)
        except UnfitError as error:
            self.refused[group[-1]] = str(error)
            return None

    def _is_convex(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether no path leaves the nodes and enters them again: then one call can stand for them."""
        inside, last = set(nodes), self.order[nodes[-1]]
        waiting = [user for node in nodes for user in node.users if user not in inside]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user in inside:
                    return False
                if user not in seen and self.order[user] < last:
                    seen.add(user)
                    waiting.append(user)
        return True

    def _decided(
        self, block: Candidate, mapping: MappingType, node: fx.Node, after: bool, larger: Candidate
    ) -> MappingType | None:
        """Return the type of a block with a node more, None where it does not pay."""
        if is_look(node):
            return mapping
        own = mapping_of(node) or MappingType.MANY_TO_MANY
        cell = combine(mapping, own) if after else combine(own, mapping)
        open_to_doubt = cell.fusion is not Fusion.ALWAYS or larger.repeats > block.repeats
        if open_to_doubt and not pays(self.times, larger, [block, Candidate.of([node])]):
            self.refused[node] = SLOWER
            return None
        return cell.mapping or MappingType.MANY_TO_MANY

    def _trimmed(self, block: Candidate) -> Candidate:
        """Return a block without views that nothing in it reads."""
        nodes = list(block.nodes)
        while idle := [n for n in nodes if is_look(n) and not any(user in nodes for user in n.users)]:
            nodes = [node for node in nodes if node not in idle]
        return block if len(nodes) == len(block.nodes) else Candidate.of(nodes)


def put(module: fx.GraphModule, candidate: Candidate, name: str) -> None:
    """Let a block, held by the graph's module under `name`, stand for its nodes."""
    graph, nodes = module.graph, candidate.nodes
    module.add_submodule(name, candidate.block)
    behind = _move_readers(nodes)
    with graph.inserting_after(behind):
        new = graph.call_module(name, tuple(candidate.sources))
    outputs = candidate.lowered.answers
    answers = {output: new for output in outputs}
    new.meta = {"val": value(outputs[0]) if len(outputs) == 1 else tuple(map(value, outputs))}
    last = new
    if len(outputs) > 1:
        for index, output in enumerate(outputs):
            with graph.inserting_after(last):
                last = graph.call_function(operator.getitem, (new, index))
            last.meta = {"val": value(output)}
            answers[output] = last
    inside = set(nodes)
    for node in nodes:
        outer = [user for user in node.users if user not in inside and user is not new]
        if outer and node not in answers:  # a view of one of the answers
            with graph.inserting_after(last):
                last = graph.node_copy(node, lambda source: answers[source])
            answers[node] = last
        for user in outer:
            user.replace_input_with(node, answers[node])
    for node in reversed(nodes):
        graph.erase_node(node)


def _move_readers(nodes: Sequence[fx.Node]) -> fx.Node:
    """Move what depends on a convex set of nodes behind the last of them; returns that."""
    reached, last = set(nodes), nodes[-1]
    moved, node = [], nodes[0]
    while node is not last:
        node = node.next
        if node not in reached and any(source in reached for source in node.all_input_nodes):
            reached.add(node)
            moved.append(node)
    for node in reversed(moved):
        last.append(node)
    return last
