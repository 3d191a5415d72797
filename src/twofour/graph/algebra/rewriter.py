"""The search: the place that saves most is rewritten first, until no rule saves anything any more.

Best first, on one graph, and no e-graph. A rule is taken only where the graph's cost falls, so that the search ends;
what several rules reach only together stands in one rule (a chain of products takes its best order at once, sums and
products are matched as their terms in any order). An e-graph would keep every form of every part instead, and then has
to extract a graph with shared parts from it, which is NP-hard and is done greedily too; on captured models, hundreds of
nodes with symbolic shapes, it finds the same rewrites in the suite of tests and costs seconds. So the simpler one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from twofour.capture import changes_in_place
from twofour.graph.algebra.builder import Builder
from twofour.graph.algebra.cost import Cost, Graph
from twofour.graph.algebra.expressions import Call
from twofour.graph.algebra.match import matches
from twofour.graph.algebra.rule import CLOSE, EXACT, HEADROOM, SAME_BITS, Candidate, Match, Rule
from twofour.graph.algebra.rules import ALL_RULES
from twofour.graph.algebra.vocabulary import read
from twofour.graph.base import aten, escapes, may_view, rewriting, same_axes, value

logger = logging.getLogger("twofour.graph")

MOST_PASSES = 50
"""Passes over a graph; each one applies every rewrite that does not touch another's nodes."""

MERGES = "merging weights needs a second copy of them, which memory='small' does not keep"


OVERFLOWS = "float16 ends at 65,504: what stayed below it might overflow"


@dataclass(frozen=True)
class Rewrite:
    """One use of a rule.

    Attributes:
        rule: Its name.
        node: Name of the node that was replaced.
        bound: The rule's error bound.
        saved: What the graph costs less.
        merges: Whether it computed a weight from others.
    """

    rule: str
    node: str
    bound: str
    saved: Cost
    merges: bool


@dataclass
class Outcome:
    """What was rewritten, and what would have saved something and was not, with why."""

    done: list[Rewrite] = field(default_factory=list)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Return how often each rule was used."""
        names = [entry.rule for entry in self.done]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    @property
    def bounds(self) -> dict[str, str]:
        """Return the error bound of each rule that was used."""
        return {entry.rule: entry.bound for entry in self.done}

    @property
    def not_done(self) -> tuple[str, ...]:
        """Return a line for each rule and reason."""
        found: dict[tuple[str, str], list[str]] = {}
        for (rule, node), why in self.refused.items():
            found.setdefault((rule, why), []).append(node)
        return tuple(f"{rule} ({len(nodes)}, `{nodes[0]}` first): {why}" for (rule, why), nodes in found.items())


def rewrite(
    module: fx.GraphModule, rules: Sequence[Rule] = ALL_RULES, *, kind: str = EXACT, merge: bool = True
) -> Outcome:
    """Rewrite a graph in place until no rule lowers its cost.

    Args:
        module: Operators of ATen on tensors as capture finds them, weights as attributes. `meta["sealed"]` of one says
            why it may not be merged, `meta["scalable"]` that it may yet be multiplied by numbers along one axis,
            `meta["held"]` returns its values where the attribute is not they, and `meta["bias"]` is what must be added
            to a product by it that is sealed.
        rules: Which may be used.
        kind: "exact" leaves out the rules that are only close.
        merge: Whether weights may be computed from others, which are kept beside them.

    Raises:
        FailedRuleError: A rule raised where none is expected to: while it looks, or when its replacement is made.
    """
    outcome = Outcome()
    if any(changes_in_place(node) for node in module.graph.nodes):
        outcome.refused["every rule", "graph"] = "the graph changes tensors in place"
        return outcome
    search = _Search(module, rules, kind, merge, outcome)
    for _ in range(MOST_PASSES):
        if not search.once():
            break
    module.graph.eliminate_dead_code()
    module.graph.lint()
    return outcome


class _Search:
    def __init__(self, module: fx.GraphModule, rules: Sequence[Rule], kind: str, merge: bool, outcome: Outcome) -> None:
        self.module, self.kind, self.merge, self.outcome = module, kind, merge, outcome
        self.impossible: set[tuple[str, fx.Node]] = set()
        self.finders = [rule for rule in rules if rule.find is not None]
        self.by_operation: dict[str, list[Rule]] = {}
        for rule in rules:
            if isinstance(rule.before, Call):
                self.by_operation.setdefault(rule.before.op, []).append(rule)

    def rules_at(self, node: fx.Node) -> list[Rule]:
        """Return the rules whose pattern begins with what a node computes, and those that look for themselves."""
        found = read(node) if node.op == "call_function" else None
        return [*(self.by_operation.get(found.op, ()) if found is not None else ()), *self.finders]

    def once(self) -> int:
        """Rewrite everything found in the graph as it is now, what saves most first; returns how many places."""
        found: list[tuple[Cost, Rule, Candidate]] = []
        for node in list(self.module.graph.nodes):
            for rule in self.rules_at(node):
                if (rule.name, node) in self.impossible:
                    continue
                with rewriting(rule.name):
                    worth = [(self.worth(rule, candidate), rule, candidate) for candidate in candidates(rule, node)]
                found += [(saved, rule, candidate) for saved, rule, candidate in worth if saved is not None]
        found.sort(key=lambda entry: -entry[0].seconds)
        touched: set[fx.Node] = set()
        count = 0
        for saved, rule, candidate in found:
            with rewriting(rule.name):
                count += self.applied(rule, candidate, saved, touched)
        return count

    def worth(self, rule: Rule, candidate: Candidate) -> Cost | None:
        """Return what a candidate saves, None where that is nothing or it may not be used; the outcome says why not."""
        builder = Builder(candidate.root)
        try:
            new = candidate.build(builder)
            if not isinstance(new, fx.Node) or not _stands_for(new, candidate.root, builder.nodes):
                return None
            saved = saving(builder, candidate.root, new)
            why = self.refusal(rule, candidate, builder) if saved.seconds > 0 else ""
        except Exception as error:  # whatever torch raises for shapes that do not fit, or fit for some sizes alone
            logger.debug("`%s` at `%s`: %s", rule.name, candidate.root, error)
            return None
        finally:
            builder.undo()
        if why:
            self.outcome.refused[rule.name, candidate.root.name] = why
        return None if why or saved.seconds <= 0 else saved

    def refusal(self, rule: Rule, candidate: Candidate, builder: Builder) -> str:
        """Return why a candidate that would save something is not used, "" where it may be."""
        if candidate.why_not:
            return candidate.why_not
        if rule.kind == CLOSE and self.kind != CLOSE:
            return 'it is only close: compile(..., rules="close") allows it'
        if why := builder.sealed() or (MERGES if builder.merged() and not self.merge else ""):
            return why
        return OVERFLOWS if value(candidate.root).dtype is torch.float16 and rule.bound != SAME_BITS else ""

    def applied(self, rule: Rule, candidate: Candidate, saved: Cost, touched: set[fx.Node]) -> bool:
        """Make a replacement unless an earlier one of this pass has changed its surroundings."""
        root = candidate.root
        if touched & {root, *candidate.inner, *root.users}:
            return False
        builder = Builder(root)
        new: Any = candidate.build(builder)
        if touched & {new, *(source for node in builder.nodes for source in node.all_input_nodes)} - {*builder.nodes}:
            builder.undo()  # it reads what has been replaced
            return False
        gone = _dying(root, new)
        merges = bool(builder.merged())
        root.replace_all_uses_with(new, delete_user_cb=lambda user: user not in builder.nodes)
        if why := builder.fold(2.0**HEADROOM):
            new.replace_all_uses_with(root, delete_user_cb=lambda user: user not in builder.nodes)
            builder.undo()
            self.impossible.add((rule.name, root))
            self.outcome.refused[rule.name, root.name] = why
            return False
        new = builder.placed.get(new, new)
        _reshape_views(new, root)
        touched |= {*gone, *builder.nodes, new, root}
        self.outcome.done.append(Rewrite(rule.name, root.name, rule.bound, saved, merges))
        for node in gone:
            self.outcome.refused = {key: why for key, why in self.outcome.refused.items() if key[1] != node.name}
            self.module.graph.erase_node(node)
        return True


def candidates(rule: Rule, node: fx.Node) -> Iterator[Candidate]:
    """Yield the replacements that a rule offers at a node."""
    found = value(node)
    if node.op != "call_function" or not isinstance(found, Tensor) or not node.users or not _of_type(rule, found):
        return
    if rule.find is not None:
        yield from rule.find(node)
        return
    assert not isinstance(rule.before, str), rule
    for match in matches(rule.before, node):
        why_not = rule.where(match) if rule.where is not None else ""
        yield Candidate(node, match.inner, lambda builder, match=match: _written(rule, builder, match), why_not)


def _written(rule: Rule, builder: Builder, match: Match) -> fx.Node:
    assert not isinstance(rule.after, str), rule
    new = builder.write(rule.after, match)
    for term in match.rest:
        new = builder.op(match.joined, new, term)
    return new


def _of_type(rule: Rule, found: Tensor) -> bool:
    floats = found.dtype.is_floating_point
    return rule.dtypes == "any" or floats == (rule.dtypes == "floats")


def _stands_for(new: fx.Node, root: fx.Node, made: Sequence[fx.Node]) -> bool:
    """Tell whether a value has the type and size of another's place, and may stand where the caller sees it."""
    x, y = value(new), value(root)
    same = x.dtype == y.dtype and x.device == y.device and same_axes(x.shape, y.shape)
    # What the caller is given must stay a tensor of its own: not an input, not a weight, not another output.
    own = new.op == "call_function" and not may_view(new) and not escapes(new)
    return (
        same and (new in made or own or not escapes(root)) and (_same_strides(x, y) or not _strides_matter(new, root))
    )


def _same_strides(x: Tensor, y: Tensor) -> bool:
    axes = [axis for axis, size in enumerate(x.shape) if not same_axes((size,), (1,))]
    return same_axes([x.stride(axis) for axis in axes], [y.stride(axis) for axis in axes])


_VIEWS = (aten.view.default, aten._unsafe_view.default)
_NEED_STRIDES = (*_VIEWS, aten.view.dtype, aten.view_as_complex.default, aten.as_strided.default)
_OF_THEIR_OWN = (aten.linear.default, aten.layer_norm.default)
"""What lays its result out in the same way whatever it reads."""


def _strides_matter(new: fx.Node, root: fx.Node) -> bool:
    """Tell whether the caller, or a call that needs strides, reads the root or what may have taken its strides."""
    reshaped = value(root).is_contiguous() and not value(new).is_contiguous()  # see `_reshape_views`
    seen: set[fx.Node] = set()
    waiting = list(root.users)
    while waiting:
        user = waiting.pop()
        if user in seen or user.target in _OF_THEIR_OWN:
            continue
        seen.add(user)
        copies = reshaped and user in root.users and user.target in _VIEWS
        if user.op == "output" or (user.target in _NEED_STRIDES and not copies):
            return True
        waiting += user.users
    return False


def saving(builder: Builder, root: fx.Node, new: fx.Node) -> Cost:
    """Return what the graph costs less when `new` takes the root's place."""
    made, gone = set(builder.nodes), set(_dying(root, new))
    edge = {source for node in (*made, *gone) for source in node.all_input_nodes} - made - gone
    edge |= set() if new in made else {new}
    before = Graph(without=made)
    after = Graph(without=gone, instead={new: root}, constant=builder.constant)
    return before.cost(gone | edge) - after.cost(made | edge)


def _dying(root: fx.Node, new: fx.Node) -> list[fx.Node]:
    """Return the nodes that nobody reads once `new` has replaced the root, readers first; what others read stays."""
    gone: dict[fx.Node, None] = {root: None}
    waiting = [root]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            known = source in gone or source is new or source.op != "call_function"
            if not known and all(user in gone for user in source.users):
                gone[source] = None
                waiting.append(source)
    return list(gone)


def _reshape_views(new: fx.Node, root: fx.Node) -> None:
    """Let views of a value whose memory lies in another order now copy where they must."""
    if value(new).is_contiguous() or not value(root).is_contiguous():
        return
    for user in new.users:
        if user.target in _VIEWS:
            user.target = aten.reshape.default
