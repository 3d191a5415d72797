"""A digest over a stored graph: one damaged number is found, also where the graph stays well formed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(found: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a graph's JSON without `digest`: keys sorted, no spaces, letters beyond ASCII escaped."""
    text = json.dumps(
        {name: part for name, part in found.items() if name != "digest"}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a graph with the `digest` that belongs to it."""
    return {**found, "digest": digest(found)}
