"""Words and figures of a page: what a record is about, what a machine is, how milliseconds and bytes are written."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from twofour.measure import Record

_SAID = ("case", "model", "data", "dtype", "shape", "geometry", "pattern", "tokens", "batch", "state", "threads")
"""Facts of a record's meta that tell it from others, in the order in which they are said."""


def described(record: Record) -> str:
    """Return in one line what was timed."""
    facts = {name: record.meta[name] for name in _SAID if isinstance(record.meta.get(name), str | int | float)}
    if facts.get("case") in ("optimize", "bench"):  # whole models: the name says it
        del facts["case"]
    said = [f"{name} {value}" if isinstance(value, int | float) else str(value) for name, value in facts.items()]
    return ", ".join(said) or record.note or "times"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds of three digits."""
    value = 1e3 * seconds
    digits = next((digits for digits, least in enumerate((100.0, 10.0, 1.0, 0.1)) if value >= least), 4)
    return f"{value:.{digits}f}"


def size(nbytes: float) -> str:
    """Return bytes as people read them."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e5 else f"{nbytes:,} B"


def moment(text: str) -> str:
    """Return a time in ISO 8601 to the minute, as people read it; what is none stays as it is."""
    try:
        return f"{datetime.datetime.fromisoformat(text):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return text


def facts_of(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is known of a machine as names and texts."""
    named = {
        "cpu": "processor",
        "cpu_identity": "identity",
        "isa": "instruction sets",
        "cores_allowed": "cores",
        "threads": "threads",
        "os": "system",
    }
    found = [(title, _text(machine[name])) for name, title in named.items() if machine.get(name)]
    commit = machine.get("commit")
    if isinstance(commit, Mapping):
        found.append(("commit", f"{str(commit.get('id'))[:10]}{' and changes' if commit.get('dirty') else ''}"))
    software = machine.get("software")
    if isinstance(software, Mapping):
        versions = [f"{name} {version}" for name, version in software.items() if isinstance(version, str)]
        found.append(("versions", ", ".join(versions)))
    return found


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
