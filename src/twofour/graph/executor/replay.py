"""A recorded run as a native program: its memory planned, one call of Python for all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from twofour import native
from twofour.graph.executor.memory import Lifetime, offsets
from twofour.graph.executor.recorder import Event, FoldedError, Place, Recorder, RefusedError

TYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.bool, torch.int64)
"""As native/type.h numbers them; what is not here is one more."""

QUANTIZED = (torch.quint8, torch.qint8, torch.qint32)
"""dtypes that torch's functions hand each other, as oneDNN's int8 products read; nothing native reads their memory."""

Fields = tuple[int, int, list[int], list[int]]


@dataclass(frozen=True)
class Calls:
    """What one run of a model does.

    Attributes:
        native: Calls of this package's kernels, made from native code on descriptors.
        torch: Calls of torch's functions, made from native code on tensors.
        python: Tensors made over others for functions of torch; or statements of the Python program, where that runs.
        folded: Calls of the Python program whose results are kept, since no input has a part in them.
        intermediate_bytes: All that is written between inputs and outputs, each tensor counted once.
        arena_bytes: Memory in which those of the kernels stand, planned by their lifetimes.
        allocated_bytes: What functions of torch allocate for their results in one run.
        through: What does not run native, by its name, with how often.
        reason: Why the Python program runs, "" where the native one does.
    """

    native: int = 0
    torch: int = 0
    python: int = 0
    folded: int = 0
    intermediate_bytes: int = 0
    arena_bytes: int = 0
    allocated_bytes: int = 0
    through: tuple[tuple[str, int], ...] = ()
    reason: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready fields."""
        return {**self.__dict__, "through": dict(self.through)}

    def __str__(self) -> str:
        if self.reason:
            return f"{self.python} calls from Python: {self.reason}"
        rest = ", ".join(f"{name} {count}" for name, count in self.through)
        folded = f", {self.folded} folded" if self.folded else ""
        listed = f"{self.native} native calls, {self.torch} of torch{f' ({rest})' if rest else ''}{folded}"
        arena, allocated = self.arena_bytes / 1e6, self.allocated_bytes / 1e6
        planned = f"{arena:.2f} MB planned, {allocated:.2f} MB allocated by torch"
        return f"{listed}; {self.intermediate_bytes / 1e6:.2f} MB between them in {planned}"


class Replay:
    """A recorded run, to be run again on inputs that lie as those did.

    Args:
        recorder: What was recorded.
        leaves: The inputs of the recorded run.
        outputs: Its outputs.

    Raises:
        RefusedError: It holds what cannot be replayed.
    """

    def __init__(self, recorder: Recorder, leaves: Sequence[Any], outputs: Sequence[Any]) -> None:
        if recorder.error:
            raise recorder.error
        if any(recorder.is_folded(one) for one in outputs):
            raise FoldedError("an output was made of constants")  # a caller may write into it
        writer = _Writer(recorder, leaves, outputs)
        self.outputs = writer.outputs
        self.arena_bytes, self.rooms, self.values = writer.arena_bytes, writer.rooms, writer.values
        self.inputs = slice(1, 1 + len(leaves))
        self.native = writer.executor()
        self.calls = writer.calls()

    def run(self, leaves: Sequence[Any], arena: Arena) -> tuple[Any, ...] | None:
        """Return the outputs, or None where a function of torch answered with another size than when recorded."""
        values = arena.values(self).copy()
        values[self.inputs] = leaves
        if not self.native.run(values):
            return None
        return tuple([values[index] if index >= 0 else values[~index][...] for index in self.outputs])


class Arena:
    """Memory of one run at a time, and the tensors in it that functions of torch are handed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        with torch.inference_mode(False):
            self.buffer = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cpu")
        self._values: dict[int, tuple[Replay, list[Any]]] = {}

    def values(self, replay: Replay) -> list[Any]:
        """Return the values a run of `replay` starts from: its constants, and tensors in this arena."""
        found = self._values.get(id(replay))
        if found is None:
            values = list(replay.values)
            with torch.inference_mode(False):
                values[0] = self.buffer[: max(replay.arena_bytes, 1)]
                for index, begin, place in replay.rooms:
                    values[index] = _tensor(self.buffer, begin, place)
            found = self._values[id(replay)] = replay, values
        return found[1]

    def forget(self, kept: Sequence[Replay]) -> None:
        """Drop the tensors of programs that are not kept."""
        ids = {id(replay) for replay in kept}
        self._values = {key: value for key, value in self._values.items() if key in ids}


def _tensor(buffer: Tensor, begin: int, place: Place) -> Tensor:
    width = place.dtype.itemsize
    last = sum((size - 1) * stride for size, stride in zip(place.shape, place.strides, strict=True))
    flat = buffer[begin : begin + (last + 1) * width].view(place.dtype)
    return flat.as_strided(place.shape, place.strides)


class _View:
    """A tensor over the memory of another one."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], ahead: int) -> None:
        self.shape, self.strides, self.ahead = shape, strides, ahead

    def __call__(self, base: Tensor) -> Tensor:
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.ahead)


class _Nested:
    """A function whose tensors stand inside lists."""

    def __init__(self, function: Callable[..., Any], spec: Any, listed: int) -> None:
        self.function, self.spec, self.listed = function, spec, listed

    def __call__(self, *leaves: Any) -> Any:
        if self.listed:  # a list and what follows it, as `cat` takes them: ten times faster
            return self.function(list(leaves[: self.listed]), *leaves[self.listed :])
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


class _Writer:
    """Writes the native program: values are numbered, the arena first, inputs behind it, then what is met."""

    def __init__(self, recorder: Recorder, leaves: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.recorder, self.leaves = recorder, list(leaves)
        self.values: list[Any] = [None, *[None] * len(leaves)]
        self.rooms: list[tuple[int, int, Place]] = []  # value, where it begins in the arena, how it lies there
        self.lines: list[tuple[Any, list[int], Any, list[int]]] = []
        self.buffers: dict[int, Place] = {}  # value -> how it lies
        self.bases: dict[int, int] = {}  # memory -> value
        self.places: list[tuple[int, int, Fields]] = []
        self._place_index: dict[Place, int] = {}
        self._known: dict[Any, int] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and (place := recorder.place(leaf)) is not None:
                self.bases[place.memory], self.buffers[1 + index] = 1 + index, place
        placed = [recorder.place(one) if isinstance(one, Tensor) else None for one in outputs]
        recorder.require_written(placed)
        self.escaping = {place.memory for place in placed if place is not None}
        self.begins, self.arena_bytes = self._planned()
        for event in recorder.events:
            self._write(event)
        self.outputs = [self._output(one, place) for one, place in zip(outputs, placed, strict=True)]

    def executor(self) -> Any:
        """Return the native program."""
        buffers = [(value, _fields(p)) for value, p in self.buffers.items() if p.dtype not in QUANTIZED]
        if self.arena_bytes:
            buffers.append((0, (TYPES.index(torch.uint8), 1, [self.arena_bytes], [1])))
        calls = [(*line, dropped) for line, dropped in zip(self.lines, self._dropped(), strict=True)]
        return native.extension().Executor(buffers, self.places, calls, len(self.values), 1 + len(self.leaves))

    def calls(self) -> Calls:
        """Return what one run does."""
        events, memories = self.recorder.events, self.recorder.memories
        others = [event.name for event in events if not event.native and not self._is_room(event)]
        between = [m for i, m in enumerate(memories) if m.kind in ("room", "result") and i not in self.escaping]
        return Calls(
            native=sum(event.native for event in events),
            torch=len(others),
            python=sum(isinstance(callee, _View) for callee, *_ in self.lines),
            folded=self.recorder.folded,
            intermediate_bytes=sum(m.nbytes for m in between),
            arena_bytes=self.arena_bytes,
            allocated_bytes=sum(m.nbytes for m in between if m.kind == "result"),
            through=tuple(Counter(others).most_common()),
        )

    def _output(self, given: Any, place: Place | None) -> int:
        """Return the value of an output; ~ it for a view of a constant, of which each call gets a tensor of its own."""
        for index, leaf in enumerate(self.leaves):
            if leaf is given:
                return 1 + index
        if place is not None:
            return self._tensor(place)
        if isinstance(given, Tensor) and not self.recorder.holds(given):
            return ~self._value(given[...])  # the caller has `given`, and may change how it looks
        return self._literal(given)

    def _is_room(self, event: Event) -> bool:
        memories = self.recorder.memories
        return any(place is not None and memories[place.memory].kind == "room" for place in event.results)

    def _planned(self) -> tuple[dict[int, int], int]:
        """Give each memory that is no output a place in the arena, for as long as calls touch it."""
        spans: dict[int, Lifetime] = {}
        memories = self.recorder.memories
        for line, event in enumerate(self.recorder.events):
            if self._is_room(event):
                continue
            for memory in event.touches - self.escaping:
                if memories[memory].kind == "room":
                    first = spans[memory].first if memory in spans else line
                    spans[memory] = Lifetime(memories[memory].nbytes, first, line)
        begins, nbytes = offsets(list(spans.values()))
        return dict(zip(spans, begins, strict=True)), nbytes

    def _write(self, event: Event) -> None:
        if event.native:
            operands = [self._operand(one) for one in event.args]
            self.lines.append((event.callee, operands, None, []))
            return
        if self._is_room(event) and not any(p is not None and p.memory in self.escaping for p in event.results):
            return
        function = getattr(event.callee, "_op", event.callee)
        nested = any(map(_is_container, (*event.args, *event.kwargs.values())))
        if nested and any(_is_tensor(leaf) for leaf in tree_flatten((event.args, dict(event.kwargs)))[0]):
            leaves, spec = tree_flatten((event.args, dict(event.kwargs)))
            first, *rest = event.args
            simple = isinstance(first, list | tuple) and not event.kwargs and not any(map(_is_container, rest))
            flat = simple and not any(map(_is_container, first))
            function, names = _Nested(event.callee, spec, len(first) if flat else 0), None
            arguments = [self._argument(leaf) for leaf in leaves]
        else:
            arguments = [self._argument(one) for one in (*event.args, *event.kwargs.values())]
            names = tuple(event.kwargs) or None
        if len(arguments) > 24:
            raise RefusedError(f"`{event.name}` takes more than 24 arguments")
        results = []
        for place in event.results:
            results.append(-1 if place is None else self._value(None))
            if place is not None:
                self._known[place] = results[-1]
                if place.memory not in self.bases:
                    self.bases[place.memory], self.buffers[results[-1]] = results[-1], place
        if event.several and len(results) == 1:
            raise RefusedError(f"`{event.name}` answers with a sequence of one")
        self.lines.append((function, arguments, names, results if any(r >= 0 for r in results) else []))

    def _operand(self, given: Any) -> int:
        """Return a native operand: a place, none, or a constant."""
        if given is None:
            return -1
        if isinstance(given, Tensor):
            return -2 - self._literal(given)
        if given not in self._place_index:
            value, offset = self._base(given)
            self._place_index[given] = len(self.places)
            self.places.append((value, offset, _fields(given)))
        return self._place_index[given]

    def _base(self, place: Place) -> tuple[int, int]:
        """Return the value in whose memory a place is, and how many bytes behind its first number."""
        if place.memory in self.begins:
            return 0, self.begins[place.memory] + place.offset
        if place.memory not in self.bases:
            raise RefusedError("memory is read that nothing wrote")
        value = self.bases[place.memory]
        return value, place.offset - self.buffers[value].offset

    def _argument(self, given: Any) -> int:
        return self._tensor(given) if isinstance(given, Place) else self._literal(given)

    def _tensor(self, place: Place) -> int:
        """Return the value that is a tensor at this place when the program runs."""
        if place in self._known:
            return self._known[place]
        value, offset = self._base(place)
        index = self._value(None)
        if value == 0:
            self.rooms.append((index, offset, place))
        else:
            base = self.buffers[value]
            if base == place:
                return self._known.setdefault(place, value)
            if base.dtype is not place.dtype or offset < 0:
                raise RefusedError("a tensor is read as numbers of another type, or before its beginning")
            view = _View(place.shape, place.strides, offset // place.dtype.itemsize)
            self.lines.append((view, [value], None, [index]))
        self._known[place] = index
        return index

    def _literal(self, given: Any) -> int:
        key = "literal", id(given)
        if key not in self._known:
            self._known[key] = self._value(given)  # which keeps it, so that nothing else gets its identity
        return self._known[key]

    def _value(self, given: Any) -> int:
        self.values.append(given)
        return len(self.values) - 1

    def _dropped(self) -> list[list[int]]:
        """Return for each line the values that are needed no longer after it."""
        last: dict[int, int] = {}
        made = {value for _, _, _, results in self.lines for value in results if value >= 0}
        for index, (callee, arguments, _, results) in enumerate(self.lines):
            recorded = isinstance(callee, native.extension().RecordedCall)
            used = [self.places[one][0] for one in arguments if one >= 0] if recorded else arguments
            for value in (*used, *results):
                last[value] = index
        found: list[list[int]] = [[] for _ in self.lines]
        for value, line in last.items():
            if value in made and value not in self.outputs:
                found[line].append(value)
        return found


def _is_container(one: Any) -> bool:
    return isinstance(one, list | tuple | dict)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | Place)


def _fields(place: Place) -> Fields:
    number = TYPES.index(place.dtype) if place.dtype in TYPES else len(TYPES)
    return number, place.dtype.itemsize, list(place.shape), list(place.strides)
