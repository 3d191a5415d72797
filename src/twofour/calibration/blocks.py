"""The repeated blocks of a model: a list of layers in which the output of each is the input of the next.

Block by block, memory stays at one block's activations and statistics, and each block sees what the pruned ones before
it put out (Frantar and Alistarh 2023, SparseGPT, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibration.batches import Batch, to_device
from twofour.calibration.inputs import caller
from twofour.calls import call, observing
from twofour.layers import PrunableWeight

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Stop(BaseException):
    """Ends a call of the model once everything wanted of it was seen; no `except Exception` of the model catches it."""


@dataclass(frozen=True)
class Chain:
    """Blocks whose outputs feed the next.

    Attributes:
        name: Name of the list in the model.
        blocks: The blocks in order.
        slot: Where a block takes the output of the one before: a position, or the name of an argument.
    """

    name: str
    blocks: tuple[nn.Module, ...]
    slot: int | str = 0

    def owner(self, weight: PrunableWeight) -> int | None:
        """Return the number of the block that holds the weight, or None."""
        for number, block in enumerate(self.blocks):
            if any(module is weight.module for module in block.modules()):
                return number
        return None


def find(model: nn.Module, weights: Sequence[PrunableWeight]) -> Chain | None:
    """Return the list of modules that cuts at least half of the prunable values into the smallest pieces, if any."""
    sizes = {id(weight.module): 0 for weight in weights}
    for weight in weights:
        sizes[id(weight.module)] += weight.parameter.numel()
    best: tuple[int, Chain] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        inside = [sum(sizes.get(id(part), 0) for part in block.modules()) for block in module]
        if sum(count > 0 for count in inside) < 2 or 2 * sum(inside) < sum(sizes.values()):
            continue
        if best is None or max(inside) < best[0]:
            best = max(inside), Chain(name, tuple(module))
    return best[1] if best else None


@dataclass
class Survey:
    """What a call of the dense model on each batch shows.

    Attributes:
        calls: For each batch the names of the weights whose layers were called, at each call.
        chain: The chain with its slot, or None where the blocks do not feed each other on every batch.
        before: Names of the weights whose layers were called before the first block.
        reason: Why there is no chain, if one was looked at.
    """

    calls: list[list[str]]
    chain: Chain | None
    before: frozenset[str] = frozenset()
    reason: str = ""

    @property
    def order(self) -> tuple[str, ...]:
        """The names in the order of the first calls."""
        return tuple(dict.fromkeys(name for called in self.calls for name in called))

    def once(self, weights: Sequence[PrunableWeight]) -> bool:
        """Whether every batch called the layers of all these weights once each, in their order."""
        names = [weight.name for weight in weights]
        wanted = set(names)
        return all([name for name in called if name in wanted] == names for called in self.calls)


def survey(
    model: nn.Module, weights: Sequence[PrunableWeight], batches: Sequence[Batch], device: torch.device
) -> Survey:
    """Run every batch and see in which order layers are called and whether the blocks found form a chain.

    Every one, because a model may take another way through its layers for each: an early exit, an expert, a second
    round. It costs one forward pass over the data.
    """
    candidate = find(model, weights)
    watch = _Watch(candidate) if candidate else None
    before: set[str] = set()
    calls: list[list[str]] = []

    def note(name: str, *_: Any) -> None:
        calls[-1].append(name)
        if watch is None or watch.seen < 0:
            before.add(name)

    layers = [(weight.name, caller(model, weight)) for weight in weights]
    with observing(layers, note), watch.hooked() if watch is not None else nullcontext():
        for number, batch in enumerate(batches, 1):
            calls.append([])
            if watch is not None:
                watch.begin(number)
            call(model, to_device(batch.inputs, device))
            if watch is not None:
                watch.end()
    if candidate is None or watch is None:
        return Survey(calls, None)
    chain = None if watch.reason else Chain(candidate.name, candidate.blocks, watch.slot)
    return Survey(calls, chain, frozenset(before), watch.reason)


class _Watch:
    """Checks during calls that each block's input is the output of the one before, all else equal, in the same slot.

    Attributes:
        chain: The blocks.
        seen: Number of the last block that the present call has reached; -1 before the first.
        slot: See `Chain`.
        reason: What was found against the chain, or "".
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.seen = -1
        self.slot: int | str = 0
        self.reason = ""
        self._batch = 0
        self._slotted = False
        self._output: Tensor | None = None
        self._first: Call = ((), {})
        self._versions: list[int] = []

    def hooked(self) -> AbstractContextManager[None]:
        return observing(enumerate(self.chain.blocks), self._enter, self._leave)

    def begin(self, batch: int) -> None:
        """Expect a call of the model on the batch of this number, from 1."""
        self._batch, self.seen = batch, -1
        self._output, self._first = None, ((), {})

    def end(self) -> None:
        """See whether the call reached every block."""
        if self.seen + 1 < len(self.chain.blocks):
            self._object(f"only {self.seen + 1} of its {len(self.chain.blocks)} blocks were called")
        self._output, self._first = None, ((), {})

    def _object(self, reason: str) -> None:
        self.reason = self.reason or f"{reason} (batch {self._batch})"

    def _enter(self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        expected, self.seen = self.seen + 1, number
        self._versions = versions(args, kwargs)
        if number != expected:
            self._object("its blocks are not called once each, in order")
        elif number == 0:
            self._first = (args, kwargs)
        else:
            self._compare(args, kwargs)

    def _leave(self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._output = hidden(output)
        if versions(args, kwargs) != self._versions:
            self._object("a block changes its input in place")

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        here, first = dict(_entries(args, kwargs)), dict(_entries(*self._first))
        slot = next((key for key, value in here.items() if value is self._output and value is not None), None)
        if slot is None or slot not in first or (self._slotted and slot != self.slot):
            self._object("a block's input is not the output of the one before")
            return
        self.slot, self._slotted = slot, True
        if here.keys() != first.keys() or not all(same(here[key], first[key]) for key in here if key != slot):
            self._object("its blocks are called with different arguments")


def _entries(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return how often each tensor among the arguments was changed in place."""
    return [value._version for _, value in _entries(args, kwargs) if isinstance(value, Tensor)]


def hidden(output: Any) -> Tensor | None:
    """Return what a block hands to the next: its output, or the first entry of a tuple."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same, tensors by their values."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return isinstance(a, int | float | str | type(None)) and a == b


def inputs_of(model: nn.Module, block: nn.Module, inputs: Any) -> Call:
    """Run the model up to `block` and return the arguments the block is called with."""
    found: list[Call] = []

    def catch(_: None, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise Stop

    with suppress(Stop), observing([(None, block)], catch):
        call(model, inputs)
    assert found, "the first block was called in the survey"
    return found[0]


def handed_on(chain: Chain, arguments: Call, output: Any) -> Call:
    """Return the arguments of the next block: those of this one with its output in their place."""
    args, kwargs = arguments
    tensor = hidden(output)
    assert tensor is not None, "the survey saw a tensor"
    if isinstance(chain.slot, int):
        return (*args[: chain.slot], tensor, *args[chain.slot + 1 :]), kwargs
    return args, {**kwargs, chain.slot: tensor}
