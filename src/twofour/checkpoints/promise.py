"""What a file's metadata says of its plain weights: which are sparse, and along which axis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twofour.errors import FormatError, cut

PROMISE = "twofour.patterns"
AXES = "twofour.axes"


@dataclass(frozen=True)
class Promise:
    """What is promised of named weights.

    Attributes:
        patterns: Names of the weights that are sparse, and their patterns.
        axes: Their reduction axes where it is not 1.
    """

    patterns: dict[str, str] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)


def describe(patterns: Mapping[str, str], axes: Mapping[str, int]) -> dict[str, str]:
    """Return a promise as entries of a safetensors file's metadata."""
    others = {name: axis for name, axis in axes.items() if axis != 1}
    return {PROMISE: json.dumps(dict(patterns)), **({AXES: json.dumps(others)} if others else {})}


def read_promise(metadata: Mapping[str, str], path: Path) -> Promise:
    """Read what `describe` wrote; a file without a promise promises nothing.

    Raises:
        FormatError: The promise is malformed; a malformed axis says nothing.
    """
    text = metadata.get(PROMISE, "{}")
    patterns = _parsed(text)
    if not isinstance(patterns, dict) or not all(isinstance(value, str) for value in patterns.values()):
        raise FormatError(
            f"the metadata of {path} is malformed",
            got=cut(text, 120),
            wanted=f"{PROMISE}: a JSON object of weight names and patterns",
            remedy="write the file again with `twofour prune`",
            code="promise",
        )
    axes = _parsed(metadata.get(AXES, "{}"))
    axes = axes if isinstance(axes, dict) else {}
    return Promise(patterns, {name: 0 for name, axis in axes.items() if type(axis) is int and axis == 0})


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
