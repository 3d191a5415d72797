"""Which recordings are kept: those of the calls that come most often.

A recording costs three runs of a small model. Of 100 kinds of calls in turns, with 64 places, 98 % would be recorded
if each pushed out the oldest. Here a kind of call gets a place once it came more often than the one that is used least,
as in TinyLFU (Einziger, Friedman and Manes, arXiv 1512.00727), whose small counters keep the past from weighing for
ever: 5 % of the calls record.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from twofour.graph.executor.replay import Calls, Replay

KEPT = 256
"""Recordings that are kept: of MiniLM 64 more took 0.1 MB, for their memory is one arena."""

REMEMBERED = 1024
"""Kinds of calls without a recording that are remembered, with how often they came."""

MOST_COUNTED = 15
"""Uses of a recording that count."""


@dataclass(slots=True)
class _Entry:
    replay: Replay | Calls
    used: int


class Recordings:
    """Recordings by what they hold for; a `Calls` says why there is none. Several threads may call it."""

    def __init__(self) -> None:
        self._entries: dict[Any, _Entry] = {}
        self._met: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def used(self, key: Any) -> Replay | Calls | None:
        """Return the recording for a call that is made now."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.used < MOST_COUNTED:
            entry.used += 1
        return entry.replay

    def get(self, key: Any) -> Replay | Calls | None:
        """Return the recording for a call."""
        entry = self._entries.get(key)
        return entry and entry.replay

    def is_due(self, key: Any) -> bool:
        """Note a call without a recording; tells whether it is to be recorded.

        It is when it comes for the second time and there is a place; else when it came more often than the recording
        that is used least, whose uses count less with each call that asks for its place.
        """
        met = self._met.pop(key, 0) + 1
        self._met[key] = met
        for one in list(self._met)[:-REMEMBERED]:
            self._met.pop(one, None)
        if met < 2 or len(self._entries) < KEPT:
            return met > 1
        least = min(list(self._entries.values()), key=lambda entry: entry.used)
        if met > least.used:
            return True
        least.used -= 1
        return False

    def put(self, key: Any, replay: Replay | Calls, most: int = KEPT) -> bool:
        """Keep a recording; tells whether others were dropped for it: those used least, of these the oldest.

        It counts as used often, so that it is there when its kind of call comes again.
        """
        self._entries.pop(key, None)
        self._met.pop(key, None)
        self._entries[key] = _Entry(replay, MOST_COUNTED)
        dropped = False
        while len(self._entries) > most:
            rest = [(entry.used, one) for one, entry in list(self._entries.items()) if one != key]
            if not rest:
                break
            self._entries.pop(min(rest, key=lambda pair: pair[0])[1], None)
            dropped = True
        return dropped

    def drop(self, tensors: Collection[int]) -> None:
        """Drop the recordings that keep one of some tensors, given by identity."""
        entries = [(key, entry.replay) for key, entry in list(self._entries.items())]
        replays = [(key, replay) for key, replay in entries if isinstance(replay, Replay)]
        keeping = [key for key, replay in replays if any(id(value) in tensors for value in replay.values)]
        for key in keeping:
            self._entries.pop(key, None)

    def replays(self) -> list[Replay]:
        """Return the recordings."""
        return [entry.replay for entry in list(self._entries.values()) if isinstance(entry.replay, Replay)]
