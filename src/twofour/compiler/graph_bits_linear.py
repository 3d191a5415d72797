"""Linears of low bits in a graph: what stands behind one is done in its call, codes are handed to Linears.

Where all that reads a Linear's answer are Linears of low bits with one learned range, normalisation, activation and
their rounding are part of its call, and bytes of codes are what goes to memory. Elsewhere the answer is real, its
activation and a sum or product with another tensor part of the call.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from twofour.compiler.code_steps import UnfitError, coded_answer
from twofour.compiler.low_bits import LinearOfCodes
from twofour.compiler.low_bits_after import combined, movable, normalisation
from twofour.errors import KernelError
from twofour.graph.base import ACTIVATION_CALLS, activation_name, argument, aten, is_float32, place, value
from twofour.kernels.bits_matmul import BitsProblem
from twofour.kernels.epilogue import COMBINES, Epilogue
from twofour.kernels.problem import MaybeTensor, Problem

LINEAR_CODES = "Linears hand codes on"
"""What the plan calls it."""

_log = logging.getLogger("twofour.compiler")


@dataclass(frozen=True)
class Pointwise:
    """An operator on numbers, each by itself: `aten.<name>.<overload>(x, *arguments)`."""

    name: str
    overload: str
    arguments: tuple[Any, ...] = ()

    @classmethod
    def of(cls, node: fx.Node, at: fx.Node) -> Pointwise | None:
        """Return what a node makes of `at`, None where it does not take its numbers one by one."""
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace != "aten" or not node.args or node.args[0] is not at:
            return None
        name = target._schema.name.removeprefix("aten::").rstrip("_")
        own = getattr(getattr(aten, name, None), target._overloadname, None)
        if own is None or torch.Tag.pointwise not in own.tags or torch.Tag.nondeterministic_seeded in own.tags:
            return None
        given = tuple(argument(node, i, one.name, one.default_value) for i, one in enumerate(target._schema.arguments))[
            1:
        ]
        fixed = all(one is None or isinstance(one, bool | int | float | str) for one in given)
        return cls(name, target._overloadname, given) if fixed else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the operator's answer."""
        schema = getattr(getattr(aten, self.name), self.overload)._schema.arguments[1:]
        named = {one.name: given for one, given in zip(schema, self.arguments, strict=True) if one.kwarg_only}
        return getattr(getattr(aten, self.name), self.overload)(x, *self.arguments[: len(schema) - len(named)], **named)


@dataclass
class Behind:
    """What stands behind a Linear of low bits.

    Attributes:
        nodes: What its call can take over, in order.
        affine: A normalisation, the first of them: float32 (2, out).
        applied: The operators on numbers behind it.
        readers: The Linears of low bits that alone read the last one's answer; none where others do.
        combine: How the last node combines what stands before it with another tensor, "none" where it does not.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    affine: MaybeTensor = None
    applied: list[Pointwise] = field(default_factory=list)
    readers: tuple[fx.Node, ...] = ()
    combine: str = "none"


class BitsLinear(nn.Module):
    """A Linear of low bits inside a graph.

    Args:
        layer: Its product.
        problem: What is computed: that of the layer, or more.
        affine: Of the normalisation that is part of it.
        applied: The operators that are part of it.
    """

    by_token = True

    def __init__(
        self, layer: LinearOfCodes, problem: Problem, affine: MaybeTensor = None, applied: Sequence[Pointwise] = ()
    ) -> None:
        super().__init__()
        self.layer, self.problem, self.affine, self.applied = layer, problem, affine, tuple(applied)

    @property
    def label(self) -> str:
        """Return how the account names it, such as "linear of bits+gelu to codes"."""
        names = ["linear of bits", *["batch_norm"] * (self.affine is not None), *(one.name for one in self.applied)]
        names += [self.problem.epilogue.combine] * (self.problem.epilogue.combine != "none")
        hands_on = isinstance(self.problem, BitsProblem) and self.problem.answer is not None
        return "+".join(names) + (" to codes" if hands_on else "")

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the product and what is part of it.

        Args:
            x: float32 or bfloat16 (..., in), or rows of codes.
            other: Second operand of the epilogue, (..., out), where it has one.

        Returns:
            (..., out) in x's dtype, or rows of codes: uint8 (..., out + 1).

        Raises:
            KernelError: The input does not fit.
        """
        layer = self.layer
        if "forward" in layer.__dict__:  # `on_exact_activations`: nothing is rounded, codes neither
            return self._in_floats(layer(x), other)
        if self.problem is layer.problem:
            return layer(x)
        try:
            limits, steps = layer.prepared.steps.get(layer.dispatch_text) or layer.prepared.bound(layer.dispatch_text)
            run, weight, _ = steps[bisect_left(limits, math.prod(x.shape[:-1]))]
            return run(x.resolve_neg(), weight, layer.bias, self.problem, other)
        except KernelError as error:
            raise error.for_layer(layer.name) from None

    def _in_floats(self, y: Tensor, other: Tensor | None) -> Tensor:
        if self.affine is not None:
            y = y * self.affine[0] + self.affine[1]
        for apply in self.applied:
            y = apply(y)
        return y if other is None else COMBINES[self.problem.epilogue.combine](y, other)


@dataclass
class Handed:
    """Which Linears hand codes to which, and why others do not.

    Attributes:
        codes: Of each call that hands codes on: name of its Linear, bits, and the names of those that read them.
        why_not: A sentence for each that could not.
    """

    codes: list[tuple[str, int, tuple[str, ...]]] = field(default_factory=list)
    why_not: list[str] = field(default_factory=list)

    def reason(self, name: str) -> str:
        """Return what the plan says of a layer behind its reason."""
        read: dict[int, dict[str, None]] = {}
        for one, bits, readers in self.codes:
            if one == name:
                read.setdefault(bits, {}).update(dict.fromkeys(readers))
        said = (f"codes of {bits} bits to {', '.join(f'`{one}`' for one in readers)}" for bits, readers in read.items())
        return f"; hands {' and '.join(said)}" if read else ""


def place_bits_linears(
    module: fx.GraphModule, products: Mapping[fx.Node, LinearOfCodes], *, hand_on: bool = True
) -> Handed:
    """Let Linears of low bits run on their products, with what stands behind them; returns which hand codes on.

    Args:
        module: The graph; it is changed.
        products: The kept nodes of such Linears.
        hand_on: Whether a call may do more than its layer.
    """
    found, handed = {node: _behind(module, node, products) if hand_on else Behind() for node in products}, Handed()
    problems: dict[fx.Node, Problem] = {node: product.problem for node, product in products.items()}
    taken: set[fx.Node] = set()  # of two Linears that one node adds up, one takes it
    for node, behind in found.items():
        if behind.readers and (problem := _to_codes(node, behind, products, handed)) is not None:
            problems[node] = problem
        elif hand_on:
            found[node] = behind = _activated(module, node, taken)
            if behind.nodes:
                taken.add(behind.nodes[-1])
                name = next(iter(_activations(behind)), "none")
                problems[node] = BitsProblem(*_given(problems[node], Epilogue(name, behind.combine)))
    for node, behind in found.items():
        if getattr(problems[node], "answer", None) is not None:
            for reader in behind.readers:
                given = problems[reader]
                problems[reader] = BitsProblem(*_given(given), coded=True, answer=getattr(given, "answer", None))
    for index, (node, behind) in enumerate(found.items()):
        _place(module, node, behind, BitsLinear(products[node], problems[node], behind.affine, behind.applied), index)
    return handed


def _given(problem: Problem, epilogue: Epilogue | None = None) -> tuple[Any, ...]:
    return problem.rows, epilogue or problem.epilogue, problem.quantization


def _behind(module: fx.GraphModule, node: fx.Node, products: Mapping[fx.Node, LinearOfCodes]) -> Behind:
    """Return what stands behind a Linear up to the Linears that read it, or to what is no operator on numbers."""
    found, at = Behind(), node
    while is_float32(at):
        users = list(at.users)
        if users and all(one in products and one.args[0] is at for one in users):
            found.readers = tuple(users)
            break
        if len(users) != 1:
            break
        after = users[0]
        first = not found.applied and found.affine is None and value(at).ndim == 2  # of more axes channels are not last
        if first and (affine := normalisation(module, after, at)) is not None:
            found.affine = affine
        elif (apply := Pointwise.of(after, at)) is not None:
            found.applied.append(apply)
        elif not _is_nothing(after, at):
            break
        found.nodes.append(after)
        at = after
    return found if movable(module, node, found.nodes) else Behind(readers=() if found.nodes else found.readers)


def _activations(behind: Behind) -> list[str]:
    return [activation_name(one) for one in behind.nodes if one.target in ACTIVATION_CALLS]


def _is_nothing(node: fx.Node, at: fx.Node) -> bool:
    """Tell whether a node answers what it is given, as dropout does outside training."""
    return node.target is aten.dropout.default and node.args[0] is at and not argument(node, 2, "train", False)


def _activated(module: fx.GraphModule, node: fx.Node, taken: Collection[fx.Node]) -> Behind:
    """Return what the call of a real answer takes over: an activation, a sum or product, dropout before them."""
    found, at = Behind(), node
    passed: list[fx.Node] = []
    while len(at.users) == 1 and is_float32(at) and found.combine == "none":
        last = next(iter(at.users))
        passed.append(last)
        if last.target in ACTIVATION_CALLS and not found.applied and (apply := Pointwise.of(last, at)) is not None:
            more = Behind([*passed], None, [apply])
        elif last not in taken and (other := combined(last, at)) is not None:
            more = Behind([*passed], None, found.applied, combine=other[0])
        elif _is_nothing(last, at):
            at = last
            continue
        else:
            break
        if not movable(module, node, more.nodes):
            break
        found, at = more, last
    return found


def _to_codes(
    node: fx.Node, behind: Behind, products: Mapping[fx.Node, LinearOfCodes], handed: Handed
) -> BitsProblem | None:
    """Return the problem of a Linear that hands codes on, None where it does not, which `handed` says why."""
    product, readers = products[node], [products[one] for one in behind.readers]
    names = tuple(one.name for one in readers)
    try:
        after, *others = {one.problem.quantization for one in readers}
        if others or after.dynamic:
            raise UnfitError("inputs of several ranges" if others else "inputs without a learned step")
        if product.problem.quantization.real:
            raise UnfitError("its own inputs are floats")
        known = _activations(behind)
        formula = known[0] if len(behind.applied) == len(known) == 1 else "none"
        answer = coded_answer(behind.applied, after, _bound(product, behind.affine), behind.affine, formula)
    except UnfitError as error:
        handed.why_not.append(f"codes of `{product.name}` to {', '.join(f'`{one}`' for one in names)}: {error}")
        _log.info("%s hands no codes to %s: %s", product.name, ", ".join(names), error)
        return None
    handed.codes.append((product.name, after.bits, names))
    return BitsProblem(*_given(product.problem, Epilogue(answer.activation)), answer=answer)


def _bound(product: LinearOfCodes, affine: MaybeTensor) -> float:
    """Return the greatest magnitude of an answer, infinite where each token has its own range."""
    quantization = product.problem.quantization
    bias = product.bias if product.bias is not None else torch.zeros(1, dtype=torch.float32, device="cpu")
    if not bool(bias.isfinite().all()):
        raise UnfitError("its bias is not finite")
    if quantization.x_scale is None:
        return math.inf
    weights = product.restored().real().double().abs().sum(1)
    most = weights * (quantization.x_scale * quantization.factor * quantization.most) + bias.double().abs()
    if affine is not None:
        most = most * affine[0].double().abs() + affine[1].double().abs()
    return 1.001 * most.max().item()


def _place(module: fx.GraphModule, node: fx.Node, behind: Behind, layer: BitsLinear, index: int) -> None:
    """Let one call, in the place of the last node, stand for a Linear and what it takes over."""
    taken = [node, *behind.nodes]
    end, args, problem = taken[-1], node.args[:1], layer.problem
    if behind.combine != "none":
        args = *args, next(one for one in end.args if one is not taken[-2])
    if isinstance(problem, BitsProblem) and problem.answer is not None:
        seen = value(end)
        end.meta["val"] = seen.new_empty((*seen.shape[:-1], problem.rows + 1), dtype=torch.uint8)
    end.args, end.kwargs = args, {}
    place(module, end, f"bits_linear_{index}", layer)
    for one in reversed(taken[:-1]):
        module.graph.erase_node(one)
