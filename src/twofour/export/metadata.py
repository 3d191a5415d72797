"""What a twofour file says of its tensors: the JSON under the key `twofour` (docs/formats.md, section 2)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twofour.errors import FormatError, cut

FILE_VERSION = 1
KEY = "twofour"
"""Metadata key under which safetensors carries our JSON."""


@dataclass(frozen=True)
class Description:
    """The JSON of one file.

    Attributes:
        packed: The header of each packed weight, as it stands there.
        aliases: Name of a tied tensor -> name under which it is stored.
        settings: Advice for loading, and which weights are sparse.
    """

    packed: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """Return the JSON."""
        parts = {"packed": self.packed, "aliases": self.aliases, "settings": self.settings}
        return json.dumps({"version": FILE_VERSION, **parts})


def read_description(path: Path, text: str) -> Description:
    """Read what `to_text` wrote.

    Raises:
        FormatError: It is no JSON, names something twice, is of another version, or a part is missing or malformed.
    """
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except KeyError as error:
        raise malformed(
            "metadata-keys", path, f"the metadata has the key {cut(repr(error.args[0]), 80)} twice"
        ) from error
    except (ValueError, RecursionError) as error:
        raise malformed("metadata-json", path, f"the metadata is no JSON: {error}") from error
    version = found.get("version") if isinstance(found, dict) else found
    if type(version) is not int or version != FILE_VERSION:
        raise FormatError(
            "the file is of another version",
            got=f"{path}: version {cut(repr(version), 40)}",
            wanted=f"version {FILE_VERSION}",
            remedy="use the release of twofour that wrote it",
            code="version",
        )
    parts = {key: part for key in ("packed", "aliases", "settings") if isinstance(part := found.get(key), dict)}
    if len(parts) < 3:
        raise malformed("metadata-parts", path, "the metadata lacks packed, aliases or settings")
    if not all(isinstance(name, str) for name in parts["aliases"].values()):
        raise malformed("alias-name", path, "an alias is no name")
    return Description(**parts)


def malformed(code: str, path: Path, got: str, remedy: str = "write it again with twofour.save") -> FormatError:
    """Build the error for a file that is not as docs/formats.md describes it."""
    return FormatError(
        "the file is malformed",
        got=f"{path}: {got}",
        wanted="a file as docs/formats.md describes it",
        remedy=remedy,
        code=code,
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise KeyError(key)
        found[key] = value
    return found
