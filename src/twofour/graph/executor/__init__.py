"""A program run by native code: recorded once for a set of sizes, then replayed with its memory planned.

The Python program is straight-line calls whose kernels look at sizes and types, never at values. So one run, watched
from below, says everything: which native calls are made with which memory, which functions of torch are called, what is
a view. A replay makes the same calls on descriptors, where views cost nothing. Python's wrappers took most of a small
model's time: 878 us for the 103 statements of a BERT of 12 layers and width 64, of which kernels had 200.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from twofour import native
from twofour.graph.executor.kept import Recordings
from twofour.graph.executor.recorder import FoldedError, Recorder, RefusedError, tensors_in
from twofour.graph.executor.replay import Arena, Calls, Replay
from twofour.graph.program import Program
from twofour.native.surroundings import no_autocast

__all__ = ["Calls", "Executor", "lie_of"]

logger = logging.getLogger("twofour.graph")

MOST_WEIGHTS = 64 << 20
"""Bytes of weights that recordings may keep beside the program's own; the recordings used least go beyond that."""


LARGE_RUN = 16 << 20
"""Bytes between inputs and outputs from which a run takes longer than malloc to look for what can go back: 0.3 ms."""


class Executor:
    """A program that runs native where it can: a set of sizes is recorded when it is met for the second time.

    What cannot be recorded, or raises, runs as the Python program, which is the reference. Several threads may call it:
    each run has an arena of its own.

    Args:
        python: The Python program.
    """

    def __init__(self, python: Program) -> None:
        self.python = python
        self._clear()

    def _clear(self) -> None:
        self._recordings = Recordings()
        self._arenas: list[Arena] = []
        self._said: set[str] = set()

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """Return the output leaves for input leaves."""
        return self.run(lie_of(leaves), leaves)

    def run(self, lie: tuple[Any, ...], leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the output leaves for input leaves that are known to lie so: to ask each takes a microsecond.

        Functions of torch compute in the types of the graph too, inside of autocast.
        """
        if torch.is_autocast_enabled("cpu"):
            with no_autocast("cpu"):
                return self.run(lie, leaves)
        key = _surroundings(), lie
        replay = self._recordings.used(key)
        if isinstance(replay, Replay):
            return self._run(key, replay, leaves)
        if replay is None and self._recordings.is_due(key):
            return self._record(key, leaves)
        return self.python(*leaves)

    def prepare(self, leaves: Sequence[Any]) -> Calls:
        """Record a run on these inputs and replay it once; returns what a run does from now on."""
        key = _surroundings(), lie_of(leaves)
        self.python(*leaves)  # what kernels and blocks look up once for a size is not to be recorded
        want = self._record(key, leaves)
        if isinstance(replay := self._recordings.get(key), Replay):
            found = self._run(key, replay, leaves)
            if not all(_same(a, b) for a, b in zip(found, want, strict=True)):
                self._refuse(key, "the replay differs from the Python program, please report it")
        return self.met(leaves) or Calls()

    def met(self, leaves: Sequence[Any]) -> Calls | None:
        """Return what a run on inputs that lie as these does; None where it was not recorded yet."""
        found = self._recordings.get((_surroundings(), lie_of(leaves)))
        return found.calls if isinstance(found, Replay) else found

    def _run(self, key: Any, replay: Replay, leaves: Sequence[Any]) -> tuple[Any, ...]:
        try:
            arena = self._arenas.pop()  # the warmest; no lock, since lists have their own
            if arena.nbytes < replay.arena_bytes:
                arena = Arena(replay.arena_bytes)
        except IndexError:
            arena = Arena(replay.arena_bytes)
            native.release_free_memory()  # a thread's first call: the model that was compiled is often gone by now
        try:
            found = replay.run(leaves, arena)
        except Exception as error:
            # The Python program raises the same with the layer's name, unless this is a fault of ours.
            found = self.python(*leaves)
            self._refuse(key, f"a replay raised {type(error).__name__}: {error}")
        finally:
            self._arenas.append(arena)
        if found is None:
            self._refuse(key, "a function of torch answered with another size than when it was recorded")
            return self.python(*leaves)
        return found

    def _record(self, key: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
        recorder, outputs = self._watched(leaves, fold=True)
        try:
            try:
                replay = Replay(recorder, leaves, outputs)
            except FoldedError:
                recorder, outputs = self._watched(leaves, fold=False)
                replay = Replay(recorder, leaves, outputs)
            self._keep(key, replay)
            if replay.calls.intermediate_bytes > LARGE_RUN:
                native.release_free_memory()  # the Python program's results: a replay stands in its arena
        except (RefusedError, ValueError) as error:
            self._refuse(key, str(error))
        return outputs

    def recorded(self, leaves: Sequence[Any]) -> tuple[Recorder, tuple[Any, ...]]:
        """Return what a run on these inputs calls, and its outputs; nothing is kept here.

        Raises:
            RefusedError: It cannot be recorded.
        """
        self.python(*leaves)  # what kernels and blocks look up once for a size is not to be recorded
        recorder, outputs = self._watched(leaves, fold=True)
        if isinstance(recorder.error, FoldedError):
            recorder, outputs = self._watched(leaves, fold=False)
        if recorder.error:
            raise recorder.error
        return recorder, outputs

    def _watched(self, leaves: Sequence[Any], *, fold: bool) -> tuple[Recorder, tuple[Any, ...]]:
        recorder = Recorder(leaves, self.python.names, fold=fold)
        with recorder.watching():
            return recorder, self.python(*leaves)

    def _refuse(self, key: Any, reason: str) -> None:
        self._keep(key, Calls(python=len(self.python.labels), reason=reason))
        if reason not in self._said:
            self._said.add(reason)
            logger.info("a graph runs as a Python program: %s", reason)

    def _keep(self, key: Any, replay: Replay | Calls) -> None:
        dropped = self._recordings.put(key, replay)
        held = {id(tensor) for tensor in tensors_in(self.python.names)}
        while sum(self._weights_of_its_own(held).values()) > MOST_WEIGHTS and len(self._recordings) > 1:
            dropped = self._recordings.put(key, replay, len(self._recordings) - 1)
        if dropped:
            kept = self._recordings.replays()
            most = max((one.arena_bytes for one in kept), default=0)
            self._arenas = [arena for arena in list(self._arenas) if arena.nbytes <= most]
            for arena in list(self._arenas):
                arena.forget(kept)

    def forget(self, tensors: Collection[int]) -> None:
        """Drop recordings that read some tensors, given by identity, which the program has no more, and all arenas."""
        self._recordings.drop(tensors)
        self._arenas = []

    def _weights_of_its_own(self, held: set[int]) -> dict[int, int]:
        """Return the bytes of what recordings keep and the program does not: oneDNN's weights for other sizes."""
        values = [value for one in self._recordings.replays() for value in one.values if isinstance(value, Tensor)]
        return {id(one): one.numel() * one.element_size() for one in values if id(one) not in held}

    def __getstate__(self) -> dict[str, Any]:
        return {"python": self.python}  # recordings hold addresses of this process: a copy makes its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.python = state["python"]
        self._clear()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.stride() == b.stride() and a.dtype is b.dtype
        return alike and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))
    return a is b or bool(a == b)


def lie_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return how inputs lie, of which there is a recording each."""
    lies = [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.is_neg(), type(leaf)) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return tuple(lies)


def _surroundings() -> tuple[Any, ...]:
    """Return what kernels look at beside their inputs."""
    dtype = torch.get_default_dtype()
    return torch.get_num_threads(), torch.is_grad_enabled(), dtype, os.environ.get("TWOFOUR_ISA")
