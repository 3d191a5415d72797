"""A recorded run as plain data: calls by name, tensors as places in numbered memory, nothing of this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from twofour.errors import ExportError
from twofour.graph.executor.memory import ALIGNMENT, Lifetime, offsets
from twofour.graph.executor.recorder import ROOMS, Event, Place, Recorder
from twofour.graph.executor.replay import TYPES


@dataclass(frozen=True)
class Lying:
    """A tensor in one of a program's memories.

    Attributes:
        memory: "arena", "input" or "constant".
        index: Which input, or which of the file's constants; 0 of the arena.
        offset: Bytes from the beginning of it.
        dtype: Type of its numbers.
        shape: Its sizes.
        strides: In numbers.
    """

    memory: str
    index: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call: its name, its arguments but for the operands, as the border writes them, and its operands as places."""

    name: str
    arguments: bytes
    operands: tuple[int, ...]


@dataclass
class Program:
    """What one set of input shapes runs.

    Attributes:
        inputs: Names, and the example's tensors.
        outputs: Names, and the place where each is left.
        arena: Bytes that calls write into.
        places: Tensors that calls name by their index.
        calls: In their order.
    """

    inputs: list[tuple[str, Tensor]]
    outputs: list[tuple[str, int]] = field(default_factory=list)
    arena: int = 0
    places: list[Lying] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


@dataclass
class _Extent:
    storage: Any
    begin: int
    end: int


class Constants:
    """The memory of constants of all programs, each storage once, from the first byte read to the last."""

    def __init__(self) -> None:
        self._extents: dict[int, _Extent] = {}

    def note(self, tensor: Tensor) -> None:
        """Note that a tensor is read."""
        begin, end = _span(tensor)
        storage = tensor.untyped_storage()
        known = self._extents.setdefault(storage.data_ptr(), _Extent(storage, begin, end))
        known.begin, known.end = min(known.begin, begin), max(known.end, end)

    def place(self, tensor: Tensor) -> Lying:
        """Return where a noted tensor stands."""
        address = tensor.untyped_storage().data_ptr()
        index = list(self._extents).index(address)
        start = self._start(address)
        return Lying("constant", index, _span(tensor)[0] - start, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def blocks(self) -> list[bytes]:
        """Return the bytes of each constant; they stand to multiples of 64 as they do in this process."""
        return [self._block(address, extent) for address, extent in self._extents.items()]

    def _start(self, address: int) -> int:
        """Return where a constant begins, in bytes from its storage's beginning: at a multiple of 64 in memory."""
        first = address + self._extents[address].begin
        return first - first % ALIGNMENT - address

    def _block(self, address: int, extent: _Extent) -> bytes:
        start = self._start(address)
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(extent.storage)
        known = whole[max(start, 0) : extent.end].numpy().tobytes()
        return bytes(max(-start, 0)) + known


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor reaches over: the first, and the one after the last."""
    width, begin = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    last = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * width


def translated(
    recorder: Recorder,
    inputs: Mapping[int, str],
    leaves: Sequence[Any],
    outputs: Mapping[str, Tensor],
    constants: Constants,
) -> Program:
    """Return a recorded run as plain data.

    Args:
        recorder: What was recorded.
        inputs: Position of each tensor among the leaves -> its name.
        leaves: The inputs of the recorded run.
        outputs: Name -> tensor that the run answered with.
        constants: What is read besides is noted there: its places are known when all programs are translated.

    Raises:
        ExportError: It calls what libtwofour does not have.
    """
    _require_native(recorder.events)
    return _Translation(recorder, inputs, leaves, constants).program(outputs)


COPIES = ("to", "_to_copy", "contiguous", "flatten", "reshape", "clone", "float", "bool")
"""Functions of torch that copy numbers in the order of their shape, to another type or other strides."""


def _copies(event: Event) -> bool:
    """Tell whether a call of torch is a copy that libtwofour makes too."""
    if event.native or event.name.partition(".")[0] not in COPIES or len(event.results) != 1:
        return False
    source, made = event.args[0], event.results[0]
    if not isinstance(source, Place) or made is None or len(event.reads) != 1:
        return False
    known = source.dtype in TYPES and made.dtype in TYPES
    rounds = source.dtype.is_floating_point and not made.dtype.is_floating_point and made.dtype is not torch.bool
    return known and not rounds and (source.shape == made.shape or made.strides == _packed(made.shape))


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _require_native(events: Sequence[Event]) -> None:
    through = Counter(event.name for event in events if not (event.native or _makes_room(event) or _copies(event)))
    if not through:
        return
    raise ExportError(
        "the model calls functions of torch that libtwofour does not have",
        got=", ".join(f"{name} {count}" for name, count in through.most_common()),
        wanted="a graph whose every call is a kernel of twofour; `print(model.plan)` lists the others",
        remedy="compile with graph='native', which measures native kernels alone; report what is left",
    )


def _makes_room(event: Event) -> bool:
    return event.name.partition(".")[0] in ROOMS


class _Translation:
    def __init__(
        self, recorder: Recorder, inputs: Mapping[int, str], leaves: Sequence[Any], constants: Constants
    ) -> None:
        self.recorder, self.constants = recorder, constants
        self.made = Program([(name, leaves[index]) for index, name in inputs.items()])
        self.lines = [event for event in recorder.events if event.native or _copies(event)]
        self.numbers = {index: number for number, index in enumerate(inputs)}
        self._index: dict[Any, int] = {}
        self._held: list[Tensor] = []

    def program(self, outputs: Mapping[str, Tensor]) -> Program:
        placed = {name: self._known(one) for name, one in outputs.items()}
        self.recorder.require_written([one for one in placed.values() if isinstance(one, Place)])
        lasting = {place.memory for place in placed.values() if isinstance(place, Place)}
        self.begins, self.made.arena = self._planned(lasting)
        self.made.calls = [self._call(event) for event in self.lines]
        self.made.outputs = [(name, self._operand(place)) for name, place in placed.items()]
        return self.made

    def _call(self, event: Event) -> Call:
        if event.native:
            return Call(event.callee.name, event.callee.arguments(), tuple(self._operand(one) for one in event.args))
        source, made = event.args[0], event.results[0]
        assert isinstance(source, Place) and made is not None
        made = replace(
            made, shape=source.shape, strides=made.strides if made.shape == source.shape else _packed(source.shape)
        )
        return Call("copy", b"oat", (self._operand(source), self._operand(made)))

    def _known(self, tensor: Tensor) -> Place | Tensor:
        return self.recorder.place(tensor) or tensor

    def _planned(self, lasting: set[int]) -> tuple[dict[int, int], int]:
        """Give each memory that is written a place in the arena for as long as calls touch it, outputs to the end."""
        spans: dict[int, Lifetime] = {}
        for line, event in enumerate(self.lines):
            for memory in event.touches:
                if self.recorder.memories[memory].kind in ("room", "result"):
                    first = spans[memory].first if memory in spans else line
                    last = len(self.lines) if memory in lasting else line
                    spans[memory] = Lifetime(self.recorder.memories[memory].nbytes, first, last)
        begins, nbytes = offsets(list(spans.values()))
        return dict(zip(spans, begins, strict=True)), nbytes

    def _operand(self, given: Place | Tensor | None) -> int:
        if given is None:
            return -1
        key = given if isinstance(given, Place) else (id(given),)
        if key not in self._index:
            if isinstance(given, Tensor):
                self._held.append(given)  # so that nothing else gets its identity
                self.constants.note(given)
                self.made.places.append(given)  # type: ignore[arg-type]  # until all programs are known
            else:
                self.made.places.append(self._lying(given))
            self._index[key] = len(self.made.places) - 1
        return self._index[key]

    def _lying(self, place: Place) -> Lying:
        memory = self.recorder.memories[place.memory]
        if place.dtype not in TYPES:
            raise ExportError(
                "a program for libtwofour has no such numbers",
                got=str(place.dtype),
                wanted=", ".join(map(str, TYPES)),
                remedy="convert the inputs",
            )
        rest = place.dtype, place.shape, place.strides
        if memory.kind == "input":
            return Lying("input", self.numbers[memory.source], place.offset, *rest)
        return Lying("arena", 0, self.begins[place.memory] + place.offset, *rest)
