"""What one run of a program calls: native functions and torch's, and the memory that they read and write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from twofour import native
from twofour.graph.base import KNOWN_SPACES

ROOMS = ("empty", "empty_like", "empty_strided", "new_empty")
"""Functions that make a tensor and write nothing into it."""

METADATA = (
    *("__get__", "__len__", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "type"),
    *("storage_offset", "data_ptr", "untyped_storage", "get_device", "has_names", "is_same_size", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_neg", "is_conj", "is_inference", "_is_zerotensor"),
)
"""What may be asked of a tensor: answers that its values have no part in."""

RANDOM = (
    *("rand", "normal", "dropout", "bernoulli", "multinomial", "poisson", "exponential_", "uniform_"),
    *("gamma", "dirichlet", "binomial", "rrelu", "geometric", "cauchy"),
)
"""Parts of the names of functions whose answers differ from call to call."""

RESHAPING = ("set_", "resize_", "resize_as_", "__set__")
"""Functions after which a tensor stands elsewhere."""

FOLDED_BYTES = 1 << 20
"""Largest result that is kept because it was made of constants alone."""


class RefusedError(Exception):
    """A program cannot be recorded, for the reason given."""


class FoldedError(RefusedError):
    """What was kept as a constant is written or answered: it has to be made in each run."""


@dataclass
class Memory:
    """A storage that a run reads or writes.

    Attributes:
        kind: "input" of the run, "constant" of the program, "folded" where it was made of constants and is kept, "room"
            to be written, or "result" of a function of torch.
        source: What stands for it: the input's index, the event that made it, or nothing.
        nbytes: Its size.
    """

    kind: str
    source: int
    nbytes: int


@dataclass(frozen=True)
class Place:
    """A tensor in memory that is not constant: where, and how it lies there.

    Attributes:
        memory: Index among the recording's.
        offset: Bytes from the start of the memory.
        dtype: Type of its numbers.
        shape: Its sizes.
        strides: In numbers.
    """

    memory: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class Event:
    """One call, its tensors as places or, where they are constants, as they are.

    Attributes:
        callee: What is called: a native call with everything but its operands, or a function of torch.
        native: Which of them.
        args: Operands of a native call, arguments of a function.
        kwargs: Arguments by name.
        results: Of a function: what it made, None for what was there before or is no tensor.
        several: Whether it answered with a sequence.
    """

    callee: Any
    native: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Place | None, ...] = ()
    several: bool = False

    @property
    def name(self) -> str:
        """What is called, as torch or the native table names it."""
        if isinstance(self.callee, OpOverload):
            return self.callee._schema.name.partition("::")[2]
        return str(getattr(self.callee, "name", "") or getattr(self.callee, "__name__", "a function"))

    @property
    def reads(self) -> list[Place]:
        """Places among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Place)]

    @property
    def touches(self) -> set[int]:
        """Memories that it reads or writes."""
        return {place.memory for place in (*self.reads, *self.results) if place is not None}


class Recorder(TorchFunctionMode):
    """Watches one run: torch's functions as a mode, native calls through `native.extension().record_calls`.

    Args:
        leaves: Inputs of the run.
        names: What the program refers to; the tensors in it are constants.
        fold: Keep what is made of constants alone, or of nothing.

    Attributes:
        events: What was called, without views and questions.
        memories: What stands behind the tensors.
        folded: Calls whose results are kept.
        error: Why it cannot be replayed, None where it can.
    """

    def __init__(self, leaves: Sequence[Any], names: Mapping[str, Any], *, fold: bool = True) -> None:
        super().__init__()
        self.folds, self.folded = fold, 0
        self.events: list[Event] = []
        self.memories: list[Memory] = []
        self.error: RefusedError | None = None
        self._names, self._constants = names, set[int]()
        self._index: dict[int, int] = {}
        self._opaque: list[Tensor] = []
        self._written = set[int]()
        self._refs: list[StorageWeakRef] = []  # while they live no storage gets the address of another
        try:
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    if self._known(leaf) is not None or self._constant(leaf):
                        raise RefusedError("inputs share memory with each other or with a weight")
                    self._add(leaf, "input", index)
                    self.place(leaf)
        except RefusedError as error:
            self.error = error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread's calls."""
        extension = native.extension()
        told = self._native
        extension.record_calls(told)
        try:
            with self:
                yield
        finally:
            extension.record_calls(None)

    def place(self, tensor: Tensor) -> Place | None:
        """Return where a tensor stands, or None for a constant.

        Raises:
            RefusedError: It is no plain tensor, or nobody knows where it comes from.
        """
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            if self._constant(tensor):
                return None
            raise RefusedError(f"a {type(tensor).__name__} of layout {tensor.layout} is not followed")
        if not tensor.is_cpu or not tensor.numel() or tensor.is_neg() or tensor.is_conj():
            raise RefusedError("a tensor is empty, not on the CPU, or negated when it is read")
        index = self._known(tensor)
        if index is None:
            if not self._constant(tensor):
                raise RefusedError("a tensor comes from outside of the graph")
            index = self._add(tensor, "constant", -1)
        if self.memories[index].kind in ("constant", "folded"):
            return None
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return Place(index, offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if not self.error and (name not in METADATA or isinstance(result, Tensor)):
            try:
                self._note(func, name, args, kwargs or {}, result)
            except RefusedError as error:
                self.error = error
            except Exception as error:  # a tensor of a kind never seen must not cost the call
                self.error = RefusedError(f"`{name}` cannot be followed: {type(error).__name__}: {error}")
        return result

    def _note(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        several = isinstance(result, tuple | list)
        results = list(result) if several else [result]
        if not all(one is None or isinstance(one, Tensor) for one in results):
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
                raise RefusedError(f"`{name}` asks for values of a tensor")
            return
        if any(isinstance(one, Tensor) and one.layout is not torch.strided for one in results):
            raise RefusedError(f"`{name}` answers in a layout of its library")  # oneDNN's weight for another size
        if name in RESHAPING:
            raise RefusedError(f"`{name}` gives a tensor other memory")
        checks = result is None and name.startswith("_assert") and not name.startswith("_assert_tensor_metadata")
        writes = _writes(func, name, kwargs)
        fresh = [isinstance(one, Tensor) and self._is_fresh(one) for one in results]
        if not writes and not checks and not any(fresh):
            return  # a view, or a question
        placed = _mapped(self, (args, kwargs))
        if writes:
            self._require_own(name, kwargs.get("out", args[0] if args else None))
        if name not in ROOMS:
            self.require_written(tree_leaves(placed))
        certain = not writes and not checks and _is_certain(func, name)
        if certain and not any(isinstance(leaf, Place) for leaf in tree_leaves(placed)) and self._fold(results):
            return
        made = [self._made(one, name) if new else None for one, new in zip(results, fresh, strict=True)]
        self.events.append(Event(func, False, placed[0], placed[1], tuple(made), several))

    def _made(self, tensor: Tensor, name: str) -> Place | None:
        if self._known(tensor) is None:
            self._add(tensor, "room" if name.partition(".")[0] in ROOMS else "result", len(self.events))
        return self.place(tensor)

    def _fold(self, results: Sequence[Any]) -> bool:
        """Keep what was made of constants alone, or of nothing; tells whether it is small enough for that."""
        tensors = [one for one in results if isinstance(one, Tensor)]
        opaque = [one for one in tensors if one.layout is not torch.strided]  # a weight that oneDNN has reordered
        strided = [one for one in tensors if one.layout is torch.strided]
        if not self.folds or sum(one.numel() * one.element_size() for one in strided) > FOLDED_BYTES:
            return False
        self._opaque += opaque
        for one in strided:
            if self._known(one) is None:
                self._add(one, "folded", -1)
        self.folded += 1
        return True

    def _require_own(self, name: str, target: Any) -> None:
        """Refuse a call that writes where inputs or constants stand."""
        for one in target if isinstance(target, tuple | list) else [target]:
            if self.is_folded(one):
                raise FoldedError(f"`{name}` writes into what was made of constants")
            place = self.place(one) if isinstance(one, Tensor) else None
            if place is None or self.memories[place.memory].kind == "input":
                raise RefusedError(f"`{name}` writes into an input or a constant")
            self._written.add(place.memory)

    def require_written(self, places: Iterable[Any]) -> None:
        """Refuse to read what no call has written: one that nobody told of must have done so."""
        for place in places:
            known = not isinstance(place, Place) or self.memories[place.memory].kind != "room"
            if not known and place.memory not in self._written:
                raise RefusedError("memory is read that was written by a call that was not seen")

    def is_folded(self, one: Any) -> bool:
        """Tell whether a value is a tensor that was made of constants alone."""
        known = self._known(one) if isinstance(one, Tensor) else None
        return known is not None and self.memories[known].kind == "folded"

    def _native(self, call: Any, tensors: list[Tensor | None], written: list[bool]) -> None:
        if self.error:
            return
        try:
            with torch._C.DisableTorchFunction():
                operands = tuple(None if one is None else self.place(one) or one for one in tensors)
                for one, writes in zip(tensors, written, strict=True):
                    if writes and one is not None:  # an answer that nobody asked for
                        self._require_own(call.name, one)
                self.require_written(operands)
            self.events.append(Event(call, True, operands, {}))
        except RefusedError as error:
            self.error = error

    def _is_fresh(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return not self._constant(tensor)
        return self._known(tensor) is None and not self._constant(tensor)

    def _known(self, tensor: Tensor) -> int | None:
        return None if tensor.layout is not torch.strided else self._index.get(tensor.untyped_storage()._cdata)

    def _add(self, tensor: Tensor, kind: str, source: int) -> int:
        storage = tensor.untyped_storage()
        self._refs.append(StorageWeakRef(storage))
        self._index[storage._cdata] = len(self.memories)
        self.memories.append(Memory(kind, source, storage.nbytes()))
        return len(self.memories) - 1

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether the program holds this very tensor."""
        return self._constant(tensor) and id(tensor) in self._constants

    def _constant(self, tensor: Tensor) -> bool:
        """Tell whether the program holds a tensor, or its storage."""
        key = id(tensor) if tensor.layout is not torch.strided else -tensor.untyped_storage()._cdata
        if any(one is tensor for one in self._opaque):
            return True
        if not self._constants:
            held = list(tensors_in(self._names))
            self._constants = {
                id(one) for one in held
            }  # which live as long as the program: no other gets their identity
            self._constants |= {-one.untyped_storage()._cdata for one in held if one.layout is torch.strided}
        return key in self._constants


def tensors_in(*roots: Any) -> Iterator[Tensor]:
    """Return the tensors that containers, modules and objects of this package hold."""
    waiting, met = list(roots), set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, tuple | list):
            waiting += one
        elif isinstance(one, MethodType):
            waiting.append(one.__self__)
        elif isinstance(one, nn.Module) or (type(one).__module__.startswith("twofour.") and hasattr(one, "__dict__")):
            waiting += vars(one).values()


def _is_certain(func: Any, name: str) -> bool:
    """Tell whether a function answers constants with a constant; an operator of others may look at what it likes."""
    if isinstance(func, OpOverload):
        known = func._schema.name.partition("::")[0] in KNOWN_SPACES
        return known and torch.Tag.nondeterministic_seeded not in func.tags and not any(part in name for part in ROOMS)
    if isinstance(func, OpOverloadPacket) and func._qualified_op_name.partition("::")[0] not in KNOWN_SPACES:
        return False
    return not any(part in name for part in (*ROOMS, *RANDOM))


def _writes(func: Any, name: str, kwargs: Mapping[str, Any]) -> bool:
    if isinstance(func, OpOverload):
        return func._schema.is_mutable
    if isinstance(func, OpOverloadPacket):
        return name.endswith("_") and not name.endswith("__")
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name not in ("__int__", "__invert__", "__index__", "__iter__")
    return in_place or operator or name == "__setitem__" or kwargs.get("out") is not None


def _mapped(recorder: Recorder, value: Any) -> Any:
    """Return arguments with a place for each tensor that is no constant."""
    if isinstance(value, Tensor):
        return recorder.place(value) or value
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(_mapped(recorder, one) for one in value)
    if isinstance(value, dict):
        return {name: _mapped(recorder, one) for name, one in value.items()}
    return value
